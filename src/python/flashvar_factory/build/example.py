"""Writes a small project of one op, which the factory builds, audits and indexes as it is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from flashvar._version import __version__
from flashvar.binaries.install_commands import public
from flashvar.errors import ConfigurationError
from flashvar_factory.build import global_names
from flashvar_factory.config import names
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive

# A whole project. Its files spell its name as `_NAME`, which `renamed` replaces.
TEMPLATE: Final = Path(__file__).parents[1] / "data" / "project"
_NAME: Final = "vecadd"
# Files that get a leading dot. With it, git would apply them to the checkout of the factory.
_DOTTED: Final = frozenset({"gitignore", "github"})
# flashvar's loader takes every library in the entry-point group `flashvar.binaries`.
_LOADER: Final = "flashvar"
# Where a project keeps the wheel of the factory that builds it.
VENDOR: Final = "vendor"
FACTORY: Final = "flashvar_factory"
# A namespace of C++, the beginning of functions in C, of distributions and of files.
_VALID: Final = re.compile(r"[a-z][a-z0-9]*")


def write(name: str, folder: Path, factory: Path | None = None) -> list[Path]:
    """Write the project `name` into a folder that is empty or missing; returns its files.

    The project gets a copy of `factory`, the wheel of flashvar-factory, and installs that.

    Raises:
        ConfigurationError: the name is not one, something is in the folder, or `factory` is another
            file.
    """
    if not _VALID.fullmatch(name) or names.why_not(name) or global_names.is_taken(name):
        raise ConfigurationError(
            "expected a name of lower-case letters and digits that C++, CUDA and the C library do "
            f"not use, such as mykernels, found {name!r}"
        )
    if name == _LOADER:
        raise ConfigurationError(
            f"expected a name of your own, found {name!r}, whose loader would take your binaries "
            "for its own; choose another"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"{folder}: expected an empty folder or none, found something; name another with "
            "--output"
        )
    if factory is not None and not _is_factory(factory):
        raise ConfigurationError(
            f"{factory}: expected a wheel of flashvar-factory, found another file"
        )
    try:
        return _written(name, folder, factory)
    except BaseException:  # an interrupt too: half a project would be refused the next time
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _written(name: str, folder: Path, factory: Path | None) -> list[Path]:
    """The files of the project, which are written."""
    made = []
    for source in sorted(TEMPLATE.rglob("*")):
        relative = source.relative_to(TEMPLATE)
        if source.is_dir() or "__pycache__" in relative.parts:
            continue
        first = relative.parts[0]
        dotted = f".{first}" if first in _DOTTED else first
        path = folder / renamed(str(Path(dotted, *relative.parts[1:])), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renamed(source.read_text(encoding="utf-8"), name), encoding="utf-8")
        made.append(path)
    if factory is not None:
        (folder / VENDOR).mkdir()
        made.append(Path(shutil.copy(factory, folder / VENDOR)))
    return made


def _is_factory(file: Path) -> bool:
    try:
        return file.is_file() and archive.parse_name(file.name).distribution == FACTORY
    except PackagingError:
        return False


def renamed(text: str, name: str) -> str:
    """A text of the template for a project of this name."""
    text = text.replace(_NAME, name).replace(_NAME.upper(), name.upper())
    return text.replace("@version@", public(__version__))
