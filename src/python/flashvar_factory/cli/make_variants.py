"""Make wheel variants (PEP 825) from the wheels in a folder: experimental."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from flashvar.errors import ConfigurationError
from flashvar_factory.config import schema
from flashvar_factory.release import variants


def configure(parser: argparse.ArgumentParser) -> None:
    """Where the wheels are, where the variants go, and that one knows what this is."""
    parser.add_argument(
        "--wheels", type=Path, default=Path("dist"), help="folder of wheels (default: dist)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/variants"),
        help="folder of the variants (default: build/variants)",
    )
    parser.add_argument(
        "--experimental", action="store_true", help="required, because the format may still change"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the variants, and say how to install one."""
    if not arguments.experimental:
        raise ConfigurationError(
            "expected --experimental, found nothing: wheel variants are a draft that few "
            "installers read; repeat the command with it, and upload them nowhere yet"
        )
    project = schema.read(arguments.root / schema.FILE_NAME).project.name
    output = arguments.root / arguments.output
    for path in variants.write(arguments.root / arguments.wheels, output, project):
        print(f"{path.stat().st_size:>12,} {path}")
    print(f"index them with: --extra-wheels {shlex.quote(str(arguments.output))}")
    where = f"--no-index --find-links {shlex.quote(str(output))}"
    print(f"uv pip install --preview-features wheel-variants {where} {project}")
