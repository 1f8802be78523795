"""Lists of the documentation, as Python-Markdown reads them: what belongs to an item of a list
stands four columns to the right after a blank line, or the list ends there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import ROOT, pages

FENCE = re.compile(r"```.*?\n *```\n", re.DOTALL)
ITEM = re.compile(r" *(?:[*-]|\d\d?\.) ")
SENTENCE_END = re.compile(r" {1,3}\d+\. ")  # of an item, whose last word is a number
NUMBERED = re.compile(r"(?:[2-9]|\d\d)\. ")


def broken(text: str) -> Iterator[str]:
    """Lines that are not what they look like: an item within a paragraph, a list's paragraph
    outside of the list, a number that no list goes on with, and the last word of a sentence."""
    first, in_a_list = "", False  # the first line of this block; whether a list goes on
    for line in FENCE.sub("\n", text).splitlines():
        if not line.strip():
            first = ""
        elif not first:
            first = line
            if re.match(r" {1,3}\S", line) or (NUMBERED.match(line) and not in_a_list):
                yield line
            in_a_list = bool(ITEM.match(line)) or (in_a_list and line.startswith("    "))
        elif (ITEM.match(line) and not ITEM.match(first)) or SENTENCE_END.match(line):
            yield line


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_items_are_items(page: Path) -> None:
    assert not list(broken(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1. a\n   b\n2. c\n", []),
        ("1. a\n\n    b\n\n2. c\n", []),
        ("1. a\n\n    ```sh\n    * b\n    ```\n\n2. c\n", []),
        ("a\n* b\n", ["* b"]),
        ("1. a\n\n    b\n2. c\n", ["2. c"]),
        ("1. a\n\n   b\n\n2. c\n", ["   b", "2. c"]),
        ("1. a\n\nb\n\n2. c\n", ["2. c"]),
        ("* from 292 to\n  195. Then b\n", ["  195. Then b"]),
    ],
)
def test_an_item_that_is_none_is_found(text: str, found: list[str]) -> None:
    assert list(broken(text)) == found
