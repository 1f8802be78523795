"""The command line: `python -m flashvar_factory list|configure|build|...`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flashvar.errors import FlashvarError
from flashvar_factory import (
    build,
    develop,
    index,
    manifest_writer,
    native,
    schema,
    toolchain,
    version,
    wheel,
)
from flashvar_factory import configure as configuring
from flashvar_factory import words as selection_words
from flashvar_factory.expand import Build, expand, select_all, select_dev
from flashvar_factory.schema import Config
from flashvar_factory.words import Words

Arguments = argparse.Namespace

WORDS_HELP = "hdim=64,128 arch=native|all|sm_XY dtype=... op=... ptx=1 jobs=N toolkit=pypi|system"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is that of the error, which is printed as one message."""
    parsed = _parser().parse_args(arguments)
    command: Callable[[Arguments], None] = parsed.command
    try:
        command(parsed)
    except FlashvarError as error:
        print(f"{parsed.name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{parsed.name}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashvar_factory", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="where variants.toml is")
    commands = parser.add_subparsers(required=True, dest="name", metavar="command")

    def add(name: str, command: Callable[[Arguments], None]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        added.set_defaults(command=command)
        return added

    for name, command in (
        ("list", _list),
        ("configure", _configure),
        ("build", _build),
        ("develop", _develop),
        ("wheels", _wheels),
    ):
        added = add(name, command)
        added.add_argument("words", nargs="*", help=WORDS_HELP)
        if name == "list":
            added.add_argument("--json", action="store_true", help="for machines")
        if name == "wheels":
            added.add_argument("--output", type=Path, default=Path("dist"))
    add("toolkit", _toolkit).add_argument("words", nargs="*", help="toolkit=pypi|system")
    add("devices", _devices)
    added = add("manifest", _manifest)
    for option in ("--plan-json", "--library", "--objects-dir", "--output"):
        added.add_argument(option, type=Path, required=True)
    added = add("index", _index)
    added.add_argument("--wheels", type=Path, default=Path("dist"))
    added.add_argument("--output", type=Path, default=Path("build/index"))
    return parser


def _list(arguments: Arguments) -> None:
    """Say what a selection builds (everything, when none is given)."""
    config, words, _ = _read(arguments)
    release = version.read(config, arguments.root)
    builds = expand(config, select_all(words, config, _devices_for(words)))
    if arguments.json:
        print(json.dumps(_document(config, release, builds), indent=1))
        return
    for one in builds:
        labelled = version.of_build(release, one, config)
        print(f"{one.distribution} {labelled}: code {one.code}, {len(one.kernels)} kernels")
        for kernel in one.kernels:
            print(f"  {kernel.name}")


def _document(config: Config, release: str, builds: Sequence[Build]) -> dict[str, object]:
    return {
        "project": config.project.name,
        "version": release,
        "builds": [
            {
                "architecture": one.architecture.name,
                "code": one.code,
                "code_kinds": one.code_kinds,
                "family": one.family,
                "shared_memory": one.shared_memory,
                "distribution": one.distribution,
                "version": version.of_build(release, one, config),
                "kernels": [
                    {"name": kernel.name, "op": kernel.op, **dict(kernel.axes)}
                    for kernel in one.kernels
                ],
            }
            for one in builds
        ],
    }


def _configure(arguments: Arguments) -> None:
    """Write the plans of a development build, without compiling."""
    config, words, chain = _read(arguments)
    for one in _dev_builds(config, words):
        directory = arguments.root / build.FOLDER / one.architecture.name
        plan = configuring.configure(
            config, one, chain(), root=arguments.root, directory=directory, lineinfo=True
        )
        print(plan.cmake)


def _build(arguments: Arguments) -> None:
    """Compile a selection for development into build/dev/site."""
    _built(arguments)


def _built(arguments: Arguments) -> tuple[Config, list[Path]]:
    config, words, chain = _read(arguments)
    builds = _dev_builds(config, words)
    compiler = chain()
    print(f"nvcc {compiler.version} of {compiler.origin}: {compiler.nvcc}")
    packages = []
    for one in builds:
        print(f"{one.architecture.name}: {', '.join(kernel.name for kernel in one.kernels)}")
        packages.append(build.build(config, one, compiler, root=arguments.root, jobs=words.jobs))
    return config, packages


def _develop(arguments: Arguments) -> None:
    """Build a selection, make this Python environment find it, and show that it loads."""
    config, packages = _built(arguments)
    develop.link_into_environment(build.site(arguments.root), config.project.name)
    for package in packages:
        print(develop.verify(package))
    print(f"compile commands: {arguments.root / 'build' / 'compile_commands.json'}")


def _wheels(arguments: Arguments) -> None:
    """Build wheels: the project's own, and one per selected architecture."""
    config, words, chain = _read(arguments)
    builds = expand(config, select_all(words, config, _devices_for(words)))
    compiler = chain()
    output = arguments.root / arguments.output
    made = [wheel.pure(config, root=arguments.root, output=output)]
    for one in builds:
        made.append(
            wheel.binary(config, one, compiler, root=arguments.root, output=output, jobs=words.jobs)
        )
    for path in made:
        print(f"{path.stat().st_size:>12,} {path}")


def _toolkit(arguments: Arguments) -> None:
    """Say which nvcc would compile."""
    _, _, chain = _read(arguments)
    compiler = chain()
    print(f"nvcc {compiler.version} of {compiler.origin}: {compiler.nvcc}")


def _devices(arguments: Arguments) -> None:
    """Print the compute capability of every CUDA device, one a line."""
    for major, minor in native.capabilities():
        print(f"{major}.{minor}")


def _manifest(arguments: Arguments) -> None:
    """Describe a linked library (CMake calls this)."""
    manifest_writer.write(
        plan_json=arguments.plan_json,
        library=arguments.library,
        objects_dir=arguments.objects_dir,
        output=arguments.output,
    )


def _index(arguments: Arguments) -> None:
    """Make a static package index of the wheels in a folder."""
    site = (arguments.root / arguments.output).resolve()
    for name in index.write(arguments.root / arguments.wheels, site):
        print(f"  {name}")
    print(f"pip install --index-url {site.as_uri()}/ --extra-index-url https://pypi.org/simple ...")


def _read(arguments: Arguments) -> tuple[Config, Words, Callable[[], toolchain.Toolchain]]:
    """The configuration, the words checked against it, and how to find the compiler."""
    arguments.root = arguments.root.resolve()
    config = schema.read(arguments.root / schema.FILE_NAME)
    words = selection_words.parse(arguments.words, config)
    return config, words, lambda: toolchain.find(words.toolkit, os.environ, arguments.root)


def _devices_for(words: Words) -> tuple[native.Capability, ...]:
    """The devices of this machine, asked for only where the words need them."""
    wanted = words.architectures is None or selection_words.NATIVE in words.architectures
    return native.capabilities() if wanted else ()


def _dev_builds(config: Config, words: Words) -> tuple[Build, ...]:
    return expand(config, select_dev(words, config, _devices_for(words)))


if __name__ == "__main__":
    sys.exit(main())
