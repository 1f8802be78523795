"""The environment of a test run without this project: tests see no binaries but their own.

The environment of `nox -s build-dev` has the project installed, and the binaries that are built in
it. Tests would find those beside what they install themselves, here and in every program that they
start. So they run in a second environment, inside of the first: its Python, scripts and packages,
except those of the project. An environment that does not have the project is used as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

PROJECT: Final = "flashvar"
FOLDER: Final = f"without-{PROJECT}"
# These are about what is installed: the development build, or a wheel.
GPU: Final = Path(__file__).with_name("gpu")


def wanted(arguments: Iterable[str], here: Path) -> bool:
    """Whether no test of these is one for a GPU, which are about what is installed."""
    paths = ((here / argument.partition("::")[0]).resolve() for argument in arguments)
    return not any(path.is_relative_to(GPU) for path in paths)


def of_project(site: Path) -> set[Path]:
    """The files and folders of an environment that are the project's; `site` has its packages."""
    found = set(site.glob(f"{PROJECT}-dev.pth"))
    for distribution in metadata.distributions(path=[str(site)]):
        if distribution.name.startswith(PROJECT):
            for file in distribution.files or ():
                path = Path(os.path.normpath(site / file))
                inside = path.is_relative_to(site)
                found.add(site / path.relative_to(site).parts[0] if inside else path)
    return found


def environment(prefix: Path, site: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Make the second environment of the one at `prefix`; the variables of programs in it.

    It stays where it is, for build folders have its paths in them; and only what differs is
    replaced, for other tests may run in it.
    """
    hidden, made = of_project(site), prefix / FOLDER
    for folder in (prefix / "bin", site):
        copy = made / folder.relative_to(prefix)
        copy.mkdir(parents=True, exist_ok=True)
        hidden.add(folder / "__pycache__")  # each has its own
        shown = {path.name: path for path in folder.iterdir() if path not in hidden}
        for path in copy.iterdir():
            if path.name not in {*shown, "__pycache__"}:
                path.unlink()
        for name, path in shown.items():
            _show(path, copy / name, prefix, made)
    _write(made / "pyvenv.cfg", (prefix / "pyvenv.cfg").read_bytes())
    others = [one for one in variables["PATH"].split(os.pathsep) if Path(one) != prefix / "bin"]
    path = os.pathsep.join([str(made / "bin"), *others])
    return {**variables, "VIRTUAL_ENV": str(made), "PATH": path}


def _show(path: Path, at: Path, prefix: Path, made: Path) -> None:
    """Put a link to `path` there, or a script that runs the Python of the second environment."""
    first = f"#!{prefix}/bin/".encode()
    if path.is_file() and path.stat().st_mode & 0o111:
        with path.open("rb") as file:
            if file.read(len(first)) == first:
                _write(at, f"#!{made}/bin/".encode() + file.read(), mode=0o755)
                return
    # The link that a venv's Python is; one to that link would be the first environment's Python.
    target = path.resolve() if path.is_symlink() else path
    if not (at.is_symlink() and at.readlink() == target):
        new = at.with_name(f"{at.name}.{os.getpid()}")
        new.symlink_to(target)
        new.replace(at)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    if not path.is_file() or path.is_symlink() or path.read_bytes() != content:
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(content)
        new.chmod(mode)
        new.replace(path)
