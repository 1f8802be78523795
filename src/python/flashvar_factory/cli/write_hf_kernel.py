"""Write the wheels of a folder as a repository of Hugging Face's kernels: nothing is uploaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar.errors import ConfigurationError
from flashvar_factory.config import schema
from flashvar_factory.release import hf_kernel


def configure(parser: argparse.ArgumentParser) -> None:
    """Where the wheels are, where the repository goes, and what it exports."""
    parser.add_argument(
        "--wheels", type=Path, default=Path("dist"), help="folder of wheels (default: dist)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/hf-kernel"),
        help="folder of the repository (default: build/hf-kernel)",
    )
    parser.add_argument(
        "--module",
        nargs="+",
        metavar="NAME",
        help="modules whose public names the kernel has (default: the package)",
    )
    parser.add_argument(
        "--kernel-version", type=int, default=1, help="branch v<N> of the Hub (default: 1)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the repository, and say how to load it."""
    if arguments.kernel_version < 1:
        raise ConfigurationError(
            f"--kernel-version: expected an integer above 0, found {arguments.kernel_version}: "
            "name 1 for the branch v1 of the Hub, and so on"
        )
    project = schema.read(arguments.root / schema.FILE_NAME).project.name
    output = arguments.root / arguments.output
    made = hf_kernel.write(
        arguments.root / arguments.wheels,
        output,
        project,
        modules=arguments.module or [project],
        version=arguments.kernel_version,
    )
    for folder in made:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{size:>12,} {folder}")
    print(f'kernels.get_local_kernel(Path("{output}"))')
