"""The version file and the changelog are read, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import CONFIG

from flashvar.errors import FlashvarError
from flashvar_factory.config import version
from flashvar_factory.release import notes


def put(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return root


def test_a_version(tmp_path: Path) -> None:
    root = put(tmp_path, CONFIG.project.version_file, b'"""Ours."""\n\n__version__ = "1.2.3"\n')
    assert version.read(CONFIG, root) == "1.2.3"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "found none"),
        (b'__version__ = "1.0"\n__version__ = "2.0"\n', "expected one line"),
        (b'__version__ = "newest"\n', "expected a version such as 1.2.3, found"),
        (b'__version__ = "1.' + b"9" * 5000 + b'"\n', "expected a version such as 1.2.3, found"),
        (b'__version__ = "1.0-RC1"\n', "expected the version as '1.0rc1', found '1.0-RC1'"),
        (b'__version__ = "1.0+own"\n', "expected the version as '1.0', found '1.0+own'"),
        (b'__version__ = "1.0"\n# \xff\n', "expected UTF-8, found the byte 0xff at 22"),
        (b'__version__ = "1.0"\n' + b"#" * (1 << 20), "expected at most 1,048,576 bytes"),
    ],
    ids=[
        "empty",
        "twice",
        "no version",
        "5,000 digits",
        "other spelling",
        "label",
        "not UTF-8",
        "huge",
    ],
)
def test_no_version(content: bytes, words: str, tmp_path: Path) -> None:
    root = put(tmp_path, CONFIG.project.version_file, content)
    with pytest.raises(FlashvarError, match=r"_version\.py: expected") as caught:
        version.read(CONFIG, root)
    assert words in str(caught.value)


def test_a_changelog_without_headings(tmp_path: Path) -> None:
    root = put(tmp_path, "CHANGELOG.md", b"Nothing yet.\n")
    with pytest.raises(FlashvarError, match="found headings of none"):
        notes.changes(root, "1.0")


def test_a_changelog_of_a_day_that_is_none(tmp_path: Path) -> None:
    root = put(tmp_path, "CHANGELOG.md", b"## 1.0 - 2026-02-30\n\nWorks.\n")
    with pytest.raises(FlashvarError, match=r"expected a date in the heading of 1\.0"):
        notes.changes(root, "1.0")


def test_a_changelog_with_a_version_twice(tmp_path: Path) -> None:
    part = b"## 1.0 - 2026-01-31\n\nWorks.\n"
    root = put(tmp_path, "CHANGELOG.md", part + part)
    with pytest.raises(FlashvarError, match=r"expected one heading of 1\.0, found 2"):
        notes.changes(root, "1.0")


def test_a_changelog_that_is_no_text(tmp_path: Path) -> None:
    root = put(tmp_path, "CHANGELOG.md", b"## 1.0 - 2026-01-31\n\n\xff\n")
    with pytest.raises(FlashvarError, match=r"CHANGELOG\.md: expected UTF-8"):
        notes.changes(root, "1.0")
