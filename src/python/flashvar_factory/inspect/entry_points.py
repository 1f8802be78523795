"""Reads entry_points.txt and WHEEL, files of lines that state a name and a value."""

from __future__ import annotations

from typing import Final

_BLANKS: Final = " \t\r"


def parse(text: str) -> dict[str, list[tuple[str, str]]]:
    """The entries of each group of entry_points.txt; what is outside of a group is of group ""."""
    groups: dict[str, list[tuple[str, str]]] = {}
    group = ""
    for line in text.split("\n"):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1]  # spaces are a part of it: readers look for the exact name
            groups.setdefault(group, [])
        elif line.strip(_BLANKS):
            name, _, value = line.partition("=")
            groups.setdefault(group, []).append((name.strip(_BLANKS), value.strip(_BLANKS)))
    return groups


def headers(text: str) -> list[tuple[str, str]]:
    """The lines of WHEEL, each with its name; a line of another form has the name "".

    Also an empty one that others follow: readers of messages stop there.
    """
    rows = []
    for line in text.rstrip("\n").split("\n"):
        name, colon, value = line.partition(": ")
        rows.append((name, value) if colon else ("", line))
    return rows
