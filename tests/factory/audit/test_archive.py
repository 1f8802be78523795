"""Archives that are damaged, that escape, or that are not what their RECORD says."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from audited import faults
from fake_artifacts import Wheel
from planted import member_info

from flashvar_factory import audit
from flashvar_factory.cli import main
from flashvar_factory.errors import PackagingError

INFO = "flashvar_sm80-0.1.0.dist-info"
LIBRARY = "flashvar_sm80/libflashvar_sm80.so"

pytestmark = pytest.mark.usefixtures("auditwheel")

NAMES = {
    "../outside": "found a path with '..'",
    "flashvar_sm80/../../outside": "found a path with '..'",
    "/etc/passwd": "found an absolute path",
    "C:/outside": "found an absolute path",
    "folder\\outside": "found a name that systems read differently",
}


@pytest.mark.parametrize(("name", "sentence"), NAMES.items(), ids=NAMES)
def test_entry_that_escapes(name: str, sentence: str, tmp_path: Path) -> None:
    path = Wheel().write(tmp_path)
    with zipfile.ZipFile(path, "a") as opened:
        opened.writestr(zipfile.ZipInfo(name), b"")
    (fault,) = faults(path)
    assert fault.startswith("archive: ")
    assert sentence in fault


def test_symbolic_link(tmp_path: Path) -> None:
    path = Wheel().write(tmp_path)
    link = zipfile.ZipInfo("flashvar_sm80/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as opened:
        opened.writestr(link, "/etc/passwd")
    (fault,) = faults(path)
    assert "found a symbolic link" in fault


def test_name_twice(tmp_path: Path) -> None:
    path = Wheel().write(tmp_path)
    with zipfile.ZipFile(path, "a") as opened, pytest.warns(UserWarning, match="Duplicate name"):
        opened.writestr(f"{INFO}/METADATA", b"another")
    (fault,) = faults(path)
    assert "expected one file of this name, found 2" in fault


def test_the_name_of_a_wheel_is_said_once(tmp_path: Path) -> None:
    path = Wheel().write(tmp_path)
    path.write_bytes(b"PK")
    (fault,) = faults(path)
    assert fault.count(path.name) == 1


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9], ids=lambda keep: f"{keep:.0%}")
def test_truncated(keep: float, tmp_path: Path) -> None:
    path = Wheel().write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    (fault,) = faults(path)
    assert "expected a whole zip archive" in fault


def test_damaged_bytes(tmp_path: Path) -> None:
    path = Wheel().write(tmp_path)
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    path.write_bytes(content)
    (fault,) = faults(path)
    assert "expected a whole zip archive" in fault


def rewritten(path: Path, change: Callable[[list[str]], list[str]]) -> Path:
    """The wheel with other lines in its RECORD."""
    with zipfile.ZipFile(path) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    lines = files[f"{INFO}/RECORD"].decode().splitlines()
    files[f"{INFO}/RECORD"] = "\n".join(change(lines)).encode()
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in files.items():
            opened.writestr(member_info(name), content)
    return path


RECORDS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "hash": (
        lambda lines: [line.replace("sha256=", "sha256=A") for line in lines],
        "the file was changed after the wheel was made",
    ),
    "size": (
        lambda lines: [line if line.endswith(",") else f"{line}0" for line in lines],
        "the file was changed after the wheel was made",
    ),
    "row too few": (
        lambda lines: [line for line in lines if not line.startswith(LIBRARY)],
        f"{LIBRARY}: expected a row in RECORD, found none",
    ),
    "row too many": (
        lambda lines: [*lines, "ghost,sha256=x,1"],
        "ghost: expected a file, as RECORD says, found none",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), RECORDS.values(), ids=RECORDS)
def test_tampered_record(
    change: Callable[[list[str]], list[str]], sentence: str, tmp_path: Path
) -> None:
    found = faults(rewritten(Wheel().write(tmp_path), change))
    assert {fault.partition(":")[0] for fault in found} == {"record"}
    assert any(sentence in fault for fault in found)


def test_no_record(tmp_path: Path) -> None:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    zipfile.ZipFile(path, "w").close()
    assert faults(path) == [
        "record: thing-1.0.dist-info/RECORD: expected a RECORD, found none",
    ]


@pytest.mark.parametrize("name", ["\x1b[2J", "\n", "\udcff"], ids=ascii)
def test_a_file_name_that_does_not_print(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"thing-1.0-py3-none-any{name}.whl"
    path.write_bytes(b"")
    assert main(["audit", str(path), "--root", str(tmp_path)]) == 5
    said = "".join(capsys.readouterr())
    assert f"any{ascii(name)[1:-1]}.whl: expected the file name of a wheel" in said
    assert said.removesuffix("\n").isprintable()


@pytest.mark.parametrize("name", ["nothing-1.0-py3-none-any.whl", "notes.txt"])
def test_not_a_wheel_is_an_error(name: str, tmp_path: Path) -> None:
    if name == "notes.txt":
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(PackagingError) as caught:
        audit.audit(tmp_path / name)
    assert caught.value.exit_code == 5
