"""Tells which sources a binary's machine code does not depend on: other ops' and other families'.

A C++ or CUDA file is an op's by its path: in a folder of the op's name, which lies in src/cuda or
in a folder there, or in src/cuda/abi with the op's name in front. If another file includes one of
an op's files, or could, all files of the op count as shared: machine code of other ops may depend
on them. A header elsewhere is an op's if files of that op alone include it. The files of a family
of kernels lie in its folder of src/cuda.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from flashvar_factory.build import code, source

# Of a line that includes a file, as git and Python understand it.
INCLUDES: Final = "#[ \t]*(include|import|embed)"
_INCLUDED: Final = re.compile(INCLUDES + r'\w*[ \t]*(?:"(?P<own>[^"]+)"|<(?P<other>[^>]+)>)')
_ABI: Final = "abi"
_HEADERS: Final = frozenset({".cuh", ".h", ".hpp"})


@dataclass(frozen=True)
class Include:
    """That a source includes a file."""

    op: str | None  # whose source that is; None: no op's alone
    path: str | None  # as it says; None: the preprocessor computes it

    def may_be_of(self, name: str) -> bool:
        """Whether it is of this file, whatever folders the compiler searches."""
        if self.path is None:
            return True
        parts = [one for one in posixpath.normpath(self.path).split("/") if one != ".."]
        return f"/{name}".endswith("/" + "/".join(parts))


def includes(lines: Iterable[tuple[str, str]], ops: Collection[str]) -> set[Include]:
    """What the lines of sources say that match INCLUDES, each behind its file's name."""
    found = [(name, _INCLUDED.search(line)) for name, line in lines]
    return {
        Include(_by_path(name, ops), match and (match["own"] or match["other"]))
        for name, match in found
        # Of other files a line without a path is a comment that begins with such a word.
        if match or PurePosixPath(name).suffix in code.CPP
    }


def owners(
    names: Collection[str], included: Collection[Include], ops: Collection[str]
) -> dict[str, str]:
    """The op of each file that belongs to one op alone; `names` are all sources there are."""
    found = {name: op for name in names if (op := _by_path(name, ops)) is not None}
    shared = {
        op
        for name, op in found.items()
        if any(one.op != op and one.may_be_of(name) for one in included)
    }
    users = [(one.op, one) for one in included]
    for name in names:
        if name not in found and (op := _only_user(name, users)) is not None:
            found[name] = op
    return {name: op for name, op in found.items() if op not in shared}


def _only_user(name: str, included: Iterable[tuple[str | None, Include]]) -> str | None:
    """The only user of a header, if it has one. `included`: includes, with their users."""
    if PurePosixPath(name).suffix not in _HEADERS:
        return None
    users = {user for user, one in included if one.may_be_of(name)}
    return users.pop() if len(users) == 1 else None


def other_families(
    names: Collection[str], lines: Iterable[tuple[str, str]], family: str, families: Collection[str]
) -> set[str]:
    """The families none of whose files a binary of `family` includes.

    `names` are all sources there are, `lines` those of them that match INCLUDES.
    """
    reached: dict[str | None, set[str]] = {}  # what files of a family, or of none, may include
    for name, line in lines:
        meant = [file for one in includes([(name, line)], ()) for file in _meant(one, name, names)]
        others = {other for file in meant if (other := family_of(file, families))}
        reached.setdefault(family_of(name, families), set()).update(others)
    found, new = set[str](), {family}
    while new:
        found |= new
        new = set[str]().union(*(reached.get(mine, ()) for mine in (None, *found))) - found
    return {*families} - found


def _meant(one: Include, name: str, names: Collection[str]) -> list[str]:
    """The files that an include of `name` may mean: those where compilers search, or else any."""
    if one.path is not None:
        folders = (posixpath.dirname(name), source.CUDA)
        searched = [posixpath.normpath(posixpath.join(folder, one.path)) for folder in folders]
        if existing := [path for path in searched if path in names]:
            return existing
    return [file for file in names if one.may_be_of(file)]


def of_families(
    names: Iterable[str], lines: Iterable[tuple[str, str]], families: Collection[str]
) -> dict[str, str]:
    """The family of each file that is in a family's folder, or a header for its files alone."""
    users = [
        (family_of(name, families), one)
        for name, line in lines
        for one in includes([(name, line)], ())
    ]
    found = {name: family_of(name, families) or _only_user(name, users) for name in names}
    return {name: family for name, family in found.items() if family is not None}


def family_of(name: str, families: Collection[str]) -> str | None:
    """The family in whose folder a file is."""
    path = PurePosixPath(name)
    parts = path.relative_to(source.CUDA).parts if path.is_relative_to(source.CUDA) else ()
    return parts[0] if len(parts) > 1 and parts[0] in families else None


def _by_path(name: str, ops: Collection[str]) -> str | None:
    """The op that a file is of by its path alone."""
    path = PurePosixPath(name)
    if path.suffix not in code.CPP or not path.is_relative_to(source.CUDA):
        return None
    folders = path.relative_to(source.CUDA).parts[:-1]
    if folders == (_ABI,):
        mine = [op for op in ops if path.name == f"{op}.h" or path.name.startswith(f"{op}_")]
    else:
        mine = [folder for folder in folders[:2] if folder in ops and folders[0] != _ABI]
    return mine[0] if len(mine) == 1 else None
