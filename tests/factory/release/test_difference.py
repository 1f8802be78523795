"""The first difference of two builds is named: a file, an entry, a byte, a field."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from flashvar_factory.release import difference

Entries = list[tuple[str, bytes, tuple[int, int, int, int, int, int]]]

THEN = (2026, 1, 1, 0, 0, 0)
ENTRIES: Entries = [("a.py", b"same", THEN), ("b.so", b"1234567", THEN)]


def folder(where: Path, entries: Entries, name: str = "x.whl") -> Path:
    where.mkdir()
    with zipfile.ZipFile(where / name, "w") as archive:
        for entry, content, moment in entries:
            archive.writestr(zipfile.ZipInfo(entry, moment), content)
    return where


def test_same_bytes(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", ENTRIES), folder(tmp_path / "two", ENTRIES)
    assert difference.of_builds(one.iterdir(), two.iterdir()) is None


DIFFERENT: dict[str, tuple[Entries, str]] = {
    "content": (
        [ENTRIES[0], ("b.so", b"1234x67", THEN)],
        "x.whl: b.so: 7 and 7 bytes, which differ at byte 4: 35 36 37 and 78 36 37",
    ),
    "length": ([ENTRIES[0], ("b.so", b"1234", THEN)], "differ at byte 4: 35 36 37 and the end"),
    "order": (ENTRIES[::-1], "the entries are sorted otherwise"),
    "entry": (ENTRIES[:1], "the entries ['b.so'] are in one alone"),
    "time": (
        [ENTRIES[0], ("b.so", b"1234567", (2026, 1, 1, 9, 0, 0))],
        "b.so: date_time is (2026, 1, 1, 0, 0, 0) and (2026, 1, 1, 9, 0, 0)",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different(kind: str, tmp_path: Path) -> None:
    entries, words = DIFFERENT[kind]
    one, two = folder(tmp_path / "one", ENTRIES), folder(tmp_path / "two", entries)
    found = difference.of_builds(one.iterdir(), two.iterdir())
    assert found is not None
    assert words in found


def test_other_names(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", ENTRIES), folder(tmp_path / "two", ENTRIES, "y.whl")
    assert "['x.whl']" in str(difference.of_builds(one.iterdir(), two.iterdir()))


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"abc")
    (tmp_path / "two").write_bytes(b"abd")
    found = difference.of_files(tmp_path / "one", tmp_path / "two")
    assert found == "3 and 3 bytes, which differ at byte 2: 63 and 64"


def test_a_damaged_archive_is_compared_as_bytes(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", ENTRIES), folder(tmp_path / "two", ENTRIES)
    content = (two / "x.whl").read_bytes()
    (two / "x.whl").write_bytes(content.replace(b"1234567", b"1234568"))
    at = content.index(b"1234567") + 6
    found = difference.of_builds(one.iterdir(), two.iterdir())
    assert found is not None
    assert f"which differ at byte {at:,}" in found
