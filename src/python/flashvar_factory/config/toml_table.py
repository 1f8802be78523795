"""Strict reader of a TOML table: every key is checked, and unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from flashvar.errors import ConfigurationError
from flashvar_factory.config import names as naming
from flashvar_factory.config.suggestions import did_you_mean, listed, nearest
from flashvar_factory.errors import ToolchainError

Value = str | int


_SHOWN: Final = 200
# Bytes of a file; ours has 3,000.
LIMIT: Final = 1 << 20
# Dots in one line: readers take the square of the time for a key of many parts.
_DOTS: Final = 200
# Bytes of a text, of which file names are made: these may have 255.
LONGEST: Final = 200
# What an `int` of C++ holds: an axis ends up there.
LARGEST: Final = 2**31 - 1


def read(path: Path) -> str:
    """The text of a file; ConfigurationError when there is no such, or one that is too large."""
    try:
        if not path.is_file():  # a named pipe would be waited for
            raise ConfigurationError(f"{path}: expected a readable file, found none")
        with path.open("rb") as file:
            content = file.read(LIMIT + 1)
        if len(content) > LIMIT:
            raise ConfigurationError(f"{path}: expected at most {LIMIT:,} bytes, found more")
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise ConfigurationError(
            f"{path}: expected a readable file, found: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path}: expected UTF-8, found the byte {error.object[error.start]:#04x} at "
            f"{error.start}; save it as UTF-8"
        ) from error


def document(text: str, file: str) -> Table:
    """The whole of a TOML document; `file` is what errors call it."""
    return Table(loads(text, file), "", file)


def plain(path: Path) -> dict[str, Any]:
    """The document at `path` as it is."""
    return loads(read(path), path.name)


def loads(text: str, file: str) -> dict[str, Any]:
    """The values of a TOML document; `file` is what errors call it."""
    for number, line in enumerate(text.split("\n"), start=1):
        if (dots := line.count(".")) > _DOTS:
            raise ConfigurationError(
                f"{file}: expected at most {_DOTS} dots in line {number}, found {dots:,}; write "
                "tables instead of keys of so many parts"
            )
    try:
        loaded: dict[str, Any] = _reader().loads(text)
    except (ValueError, RecursionError) as error:  # of a number of 5,000 digits, of deep arrays
        raise ConfigurationError(f"{file}: expected TOML, found: {error}") from error
    return loaded


def _reader() -> ModuleType:
    """Python's own, from 3.11 on, else the package it came from."""
    for name in ("tomllib", "tomli"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    raise ToolchainError(
        "expected a reader of TOML, found none in this Python: pip install tomli, or use 3.11"
    )


def _shown(value: object) -> str:
    """A value in a message: its beginning."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


class Table:
    """One table of a document; `where` is its dotted key, "" for the document."""

    def __init__(self, value: object, where: str, file: str) -> None:
        self.where = where
        self.file = file
        if not isinstance(value, dict):
            raise self.wrong(None, "a table", value)
        self.rest: dict[str, object] = dict(value)
        self.taken: list[str] = []

    def wrong(self, key: str | None, expected: str, found: object) -> ConfigurationError:
        """The error for the value of `key` (of the table itself for None)."""
        return ConfigurationError(f"{self.path(key)}: expected {expected}, found {_shown(found)}")

    def path(self, key: str | None) -> str:
        """`file: table.key`."""
        name = ".".join(part for part in (self.where, key) if part)
        return f"{self.file}: {name if len(name) <= _SHOWN else f'{name[:_SHOWN]} ...'}"

    def take(self, key: str) -> object:
        """The value of a key that must be there."""
        self.taken.append(key)
        if key not in self.rest:
            near = nearest(key, self.rest)
            found = "none" if near is None else f"the unknown key {near!r}"
            raise ConfigurationError(f"{self.path(key)}: expected this key, found {found}")
        return self.rest.pop(key)

    def text(self, key: str, pattern: str, meaning: str, longest: int = LONGEST) -> str:
        """A string that matches `pattern` whole; `meaning` describes that."""
        value = self.take(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self.wrong(key, meaning, value)
        if len(value.encode()) > longest:
            found = f"{value[:_SHOWN]}..., {len(value.encode()):,} bytes"
            raise self.wrong(key, f"{meaning} of at most {longest} bytes", found)
        return value

    def name(self, key: str) -> str:
        """A string that may be a name in C++."""
        value = self.text(key, r".*", "a string")
        return self._named(key, value)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of such strings: not empty, nothing twice."""
        return tuple(self._named(key, value) for value in self.values(key))

    def _named(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.wrong(key, "strings", value)
        if expected := naming.why_not(value):
            raise self.wrong(key, expected, value)
        return value

    def positive(self, key: str, otherwise: str = "") -> int:
        """An integer above zero that C++ can count to; `otherwise` is what else it might be."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
            expected = f"an integer from 1 to {LARGEST}"
            raise self.wrong(key, f"{expected}, or {otherwise}" if otherwise else expected, value)
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def table(self, key: str) -> Table:
        """A table below this one."""
        return Table(self.take(key), f"{self.where}.{key}" if self.where else key, self.file)

    def values(self, key: str) -> tuple[Value, ...]:
        """A list of strings and integers: not empty, nothing twice."""
        value = self.take(key)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list with at least one value", value)
        seen: list[Value] = []
        for item in value:
            if isinstance(item, bool) or not isinstance(item, str | int):
                raise self.wrong(key, "strings or integers", item)
            if item in seen:
                raise self.wrong(key, "each value once", item)
            seen.append(item)
        return tuple(seen)

    def end(self, also: Iterable[str] = ()) -> None:
        """Refuse what nobody took; `also` are valid keys that happen to be absent."""
        if self.rest:
            key = next(iter(self.rest))
            valid = sorted({*self.taken, *also})
            raise ConfigurationError(
                f"{self.path(key)}: unknown key, expected {listed(valid)}{did_you_mean(key, valid)}"
            )
