"""Strict reader of JSON objects: every value is checked, and unknown keys are errors."""

from __future__ import annotations

import json
import re

from flashvar.errors import ManifestError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST = 1000


class Table:
    """One object; each key is read at most once."""

    def __init__(self, value: object, where: str) -> None:
        """Wrap `value`, which is at the path `where` of the document ("" at the top)."""
        if not isinstance(value, dict):
            raise wrong(where or "the document", "an object", value)
        self.where = where
        self.rest: dict[str, object] = dict(value)

    def path(self, key: str) -> str:
        """The path of `key` from the top of the document."""
        return f"{self.where}.{key}" if self.where else key

    def take(self, key: str) -> object:
        """The value of `key`, unchecked; marks the key as read."""
        if key not in self.rest:
            raise ManifestError(f"{self.path(key)}: expected a value, found no such key")
        return self.rest.pop(key)

    def text(self, key: str) -> str:
        """A string that is not empty and printable in one line."""
        value = self.take(key)
        if not _prints(value):
            raise wrong(self.path(key), "a printable string that is not empty", value)
        return str(value)

    def sha256(self, key: str) -> str:
        """A sha256 in hex."""
        value = self.take(key)
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise wrong(self.path(key), "64 lower-case hex digits", value)
        return value

    def integer(self, key: str) -> int:
        """An integer that is not negative."""
        return _count(self.take(key), self.path(key))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers that are not negative."""
        value = self.take(key)
        if not isinstance(value, list):
            raise wrong(self.path(key), "a list of integers", value)
        return tuple(_count(item, f"{self.path(key)}[{i}]") for i, item in enumerate(value))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of printable strings that are not empty."""
        value = self.take(key)
        if not isinstance(value, list) or not all(_prints(item) for item in value):
            raise wrong(self.path(key), "a list of printable strings that are not empty", value)
        return tuple(value)

    def table(self, key: str) -> Table:
        """A nested object."""
        return Table(self.take(key), self.path(key))

    def tables(self, key: str) -> list[Table]:
        """A list of nested objects, at least one."""
        value = self.take(key)
        if not isinstance(value, list) or not value:
            raise wrong(self.path(key), "a list of objects that is not empty", value)
        return [Table(item, f"{self.path(key)}[{i}]") for i, item in enumerate(value)]

    def end(self) -> None:
        """Refuse keys that were not read."""
        if self.rest:
            first = next(iter(self.rest))
            raise ManifestError(f"{self.path(first)}: expected no such key")


def _prints(value: object) -> bool:
    """Whether a value is a printable string of limited length: no control characters."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable()


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise wrong(where, "an integer that is not negative", value)
    return value


def wrong(where: str, expected: str, found: object) -> ManifestError:
    """The error for a value other than the expected."""
    return ManifestError(f"{where}: expected {expected}, found {json.dumps(found)[:80]}")
