"""Wheels as archives: names, RECORD, and the same bytes for the same files."""

from __future__ import annotations

import base64
import csv
import hashlib
import zipfile
from pathlib import Path

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive
from flashvar_factory.inspect.archive import Name

INFO = "flashvar-1.0.dist-info"
FILES = {
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\n",
    "flashvar/lib.so": b"\x7fELF",
    "flashvar/__init__.py": b"",
    "flashvar/with,comma.py": b"x = 1\n",
}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("flashvar-1.0-py3-none-any.whl", Name("flashvar", "1.0", "py3-none-any", None)),
        (
            "flashvar_sm80-1.0+hdim64-py3-none-manylinux_2_28_x86_64.whl",
            Name("flashvar_sm80", "1.0+hdim64", "py3-none-manylinux_2_28_x86_64", None),
        ),
        (
            "flashvar-1.0-py3-none-manylinux_2_28_x86_64-sm80.whl",
            Name("flashvar", "1.0", "py3-none-manylinux_2_28_x86_64", "sm80"),
        ),
        ("flashvar-1.0-py3-none-any-null.whl", Name("flashvar", "1.0", "py3-none-any", "null")),
        ("a-1.0-2build-py2.py3-none-any.whl", Name("a", "1.0", "py2.py3-none-any", None)),
    ],
)
def test_names(file: str, expected: Name) -> None:
    assert archive.parse_name(file) == expected


@pytest.mark.parametrize(
    "file",
    [
        *("flashvar.whl", "flashvar-1.0.whl", "a-1-py3-none-any-SM.whl"),
        *("a-1-py3-none-any (1).whl", "a-1-py3 -none-any.whl", "a-1-py3-nöne-any.whl"),
    ],
)
def test_not_the_name_of_a_wheel(file: str) -> None:
    with pytest.raises(PackagingError, match="expected the file name of a wheel"):
        archive.parse_name(file)


@pytest.mark.parametrize("seconds", ["", "abc", "-1", "1e9", "4354819199", "9" * 5000])
def test_a_time_that_no_archive_can_name(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
    with pytest.raises(ConfigurationError, match="SOURCE_DATE_EPOCH: expected seconds"):
        archive.epoch()


@pytest.mark.parametrize("seconds", [0, archive.EARLIEST, 4354819198])
def test_times_that_an_archive_can_name(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(seconds))
    archive.write(tmp_path / "flashvar-1.0-py3-none-any.whl", FILES, INFO)
    with zipfile.ZipFile(tmp_path / "flashvar-1.0-py3-none-any.whl") as opened:
        years = {member.date_time[0] for member in opened.infolist()}
    assert years == {2107 if seconds > archive.EARLIEST else 1980}


def test_record_is_right(tmp_path: Path) -> None:
    path = tmp_path / "flashvar-1.0-py3-none-any.whl"
    archive.write(path, {**FILES, f"{INFO}/RECORD": b"stale"}, INFO)
    files = archive.read(path)
    rows = list(csv.reader(files.pop(f"{INFO}/RECORD").decode().splitlines()))
    assert rows.pop() == [f"{INFO}/RECORD", "", ""]
    assert {row[0] for row in rows} == set(FILES) == set(files)
    for name, digest, size in rows:
        found = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        assert (digest, size) == (f"sha256={found.decode()}", str(len(files[name])))


def test_same_files_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    archive.write(tmp_path / "a.whl", FILES, INFO)
    archive.write(tmp_path / "b.whl", dict(reversed(FILES.items())), INFO)
    assert (tmp_path / "a.whl").read_bytes() == (tmp_path / "b.whl").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert {entry.date_time for entry in wheel.infolist()} == {(2023, 11, 14, 22, 13, 20)}
        assert wheel.namelist()[-2:] == [f"{INFO}/RECORD", f"{INFO}/WHEEL"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [(None, archive.EARLIEST), ("0", archive.EARLIEST), ("1700000000", 1700000000)],
)
def test_the_time_of_everything(
    said: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    if said is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", said)
    assert archive.epoch() == expected


def test_truncated(tmp_path: Path) -> None:
    path = tmp_path / "flashvar-1.0-py3-none-any.whl"
    archive.write(path, FILES, INFO)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PackagingError) as caught:
        archive.read(path)
    assert str(caught.value) == (
        f"{path}: expected a whole zip archive, found no end record at its end: it is cut short, "
        "or has data after it; build or fetch it again"
    )


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match=r"^[^:]*a\.whl: expected a wheel, found no file"):
        archive.read(tmp_path / "a.whl")
