"""What lies around in an environment: damaged metadata, leftover folders, files that are none."""

from __future__ import annotations

import os
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from installed import COMPILER, compile_library, library_source, put_binary, put_wheel

from flashvar._version import __version__
from flashvar.binaries import extras, loader, registry
from flashvar.binaries import manifest as manifests
from flashvar.binaries.extras import NO_EXTRAS
from flashvar.cli import diagnosis
from flashvar.errors import BinaryError, InstallError, ManifestError
from flashvar.installing import wheel_requirements
from flashvar.integrations.requirement import unmet
from flashvar.machine import system
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose

pytestmark = pytest.mark.usefixtures("fresh_registry")
NOT_UTF8 = b"Metadata-Version: 2.1\nName: caf\xe9\nVersion: 1\n"


def put_distribution(site: Path, name: str, content: bytes = NOT_UTF8) -> Path:
    folder = site / f"{name}-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_bytes(content)
    return folder


@pytest.mark.parametrize("name", ["somebody", "flashvar", "triton"])
def test_metadata_that_is_no_utf_8(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_distribution(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    on_cpu = Request.of("attention_fwd", "fp32", None, head_dim=64)
    assert choose(on_cpu).backend == "reference"
    system.gather.cache_clear()
    assert diagnosis.examine_this_machine().system.triton is not None
    system.gather.cache_clear()
    if name == "flashvar":
        assert extras.of_installed("linux_x86_64") == NO_EXTRAS


def test_a_wheel_of_ours_with_such_metadata_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put_wheel(tmp_path, fakes.manifest("80"))
    next(tmp_path.glob("*.dist-info/METADATA")).write_bytes(NOT_UTF8)
    monkeypatch.syspath_prepend(tmp_path)
    (binary,) = registry.installed().binaries
    assert binary.folder.path == folder
    assert binary.folder.origin == "wheel without a name of unknown version"


def test_a_folder_that_torch_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    leftover = type(os)("torch")
    leftover.__path__ = [str(tmp_path / "torch")]  # type: ignore[attr-defined]
    monkeypatch.setattr(system, "import_module", lambda name: leftover)
    system.gather.cache_clear()
    found = system.gather()
    system.gather.cache_clear()
    assert found.torch is None
    assert found.problem == (
        f"torch is not installed, a folder of its name is left over: {tmp_path / 'torch'}"
    )


@pytest.mark.parametrize(
    ("entry_points", "failure", "words"),
    [
        (
            b"\xff\xfe",
            UnicodeDecodeError("utf-8", b"", 0, 1, "odd"),
            r"broken \(.*entry_points.txt",
        ),
        (b"[torch.backends]\nx y\n", TypeError("Pair"), r"those of other are broken \(.*Pair.*txt"),
        (
            b"[torch.backends]\nnpu = other:load\n",
            RuntimeError("Failed to load the backend extension: npu. You can"),
            "the backend npu of other cannot be loaded",
        ),
    ],
    ids=["not UTF-8", "not a pair", "a backend that fails"],
)
def test_another_package_breaks_the_import_of_torch(
    entry_points: bytes,
    failure: Exception,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise failure

    folder = tmp_path / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_bytes(entry_points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(system, "import_module", fail)
    system.gather.cache_clear()
    report = diagnosis.examine_this_machine()
    system.gather.cache_clear()
    assert report.system.problem is not None
    assert re.search(words, report.system.problem)
    assert any("other" in fix for fix in report.fixes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "expected JSON"),
        ('{"schema": 2, "schema": 2}', "'schema' more than once"),
        ('{"kernels": [{"op": "a", "op": "b"}]}', "'op' more than once"),
    ],
    ids=["deep", "a key twice", "a key twice, inside"],
)
def test_odd_json(text: str, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        manifests.parse(text)


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "endless"])
def test_a_manifest_that_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ManifestError, match="expected a readable manifest, found"):
        manifests.read(path)


@pytest.mark.parametrize("kind", ["a FIFO", "endless"])
def test_a_library_that_is_no_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have no bytes, as the manifest says, and reading them does not end."""
    folder = put_wheel(tmp_path, fakes.manifest("80"))
    described = manifests.read(folder / manifests.FILE_NAME)
    library = folder / described.library.file
    library.unlink()
    if kind == "a FIFO":
        os.mkfifo(library)
    else:
        library.symlink_to("/dev/zero")
    empty = replace(described, library=replace(described.library, bytes=0))
    (folder / manifests.FILE_NAME).write_text(empty.to_json(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (refusal,) = registry.installed().rejected
    assert f"expected {library.name} to be a regular file, found something else" in refusal.reason


@pytest.mark.parametrize("start", [1 << 20, 1 << 63, (1 << 64) - 1], ids=str)
def test_segments_that_start_behind_the_library(start: int, tmp_path: Path) -> None:
    header = struct.pack("<6s26xQ14xHH4x", b"\x7fELF\x02\x01", start, 56, 1)
    binary = put_binary(tmp_path / "binary", fakes.manifest("80"), header)
    with pytest.raises(BinaryError, match="expected an ELF library, found a part of one"):
        loader.load(binary)


@pytest.mark.skipif(COMPILER is None, reason="makes its libraries with a C compiler")
@pytest.mark.parametrize("kept", [0, 3, 63, 64, 200, 4096, -1, -4096], ids=str)
def test_a_truncated_library_with_a_matching_hash(kept: int, tmp_path: Path) -> None:
    good = compile_library(library_source(), tmp_path)
    start, size, count = struct.unpack_from("<32xQ14xHH", good)
    ends = [
        sum(struct.unpack_from("<8xQ16xQ", good, start + number * size)) for number in range(count)
    ]
    part = good[: kept if kept >= 0 else max(ends) + kept]
    binary = put_binary(tmp_path / "binary", fakes.manifest("80"), part)
    with pytest.raises(BinaryError, match=r"found a part of one|it is truncated"):
        loader.load(binary)


@pytest.mark.parametrize("ours_first", [True, False])
def test_of_two_wheels_the_one_of_our_version_wins(
    ours_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = {"ours": tmp_path / "ours", "older": tmp_path / "older"}
    ours = put_wheel(sites["ours"], fakes.manifest("80", version=__version__))
    put_wheel(sites["older"], fakes.manifest("80", version="0.0.1"), "0.0.1")
    for name in sorted(sites, reverse=not ours_first):  # the last one lies first on the path
        monkeypatch.syspath_prepend(sites[name])
    inventory = registry.installed()
    assert [one.folder.path for one in inventory.binaries] == [ours]
    assert [one.reason for one in inventory.rejected] == [
        f"replaced by wheel flashvar-sm80 {__version__}, which has flashvar's version"
    ]


def test_what_the_user_names_wins_whatever_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(tmp_path / "site", fakes.manifest("80"))
    named = put_binary(tmp_path / "named", fakes.manifest("80", version="0.0.1"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "named"))
    (binary,) = registry.installed().binaries
    assert binary.folder.path == named.folder.path
    assert binary.version_mismatch is not None


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA", "INSTALLER"])
def test_a_pipe_among_metadata_is_not_waited_for(file: str, tmp_path: Path) -> None:
    folder = put_distribution(tmp_path, "somebody")
    (folder / "entry_points.txt").write_text("[flashvar.binaries]\nsm_80 = a\n", encoding="utf-8")
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    found = list(registry.in_wheels([str(tmp_path)]))
    assert len(found) == (file != "entry_points.txt")


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA", "INSTALLER"])
def test_metadata_of_32_gigabytes_is_not_read(file: str, tmp_path: Path) -> None:
    folder = put_distribution(tmp_path, "somebody")
    (folder / "entry_points.txt").write_text("[flashvar.binaries]\nsm_80 = a\n", encoding="utf-8")
    with (folder / file).open("wb") as opened:
        opened.truncate(1 << 35)
    found = list(registry.in_wheels([str(tmp_path)]))
    assert len(found) == (file != "entry_points.txt")


def put_odd(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "32 gigabytes":
        with path.open("wb") as opened:
            opened.truncate(1 << 35)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "not UTF-8":
        path.write_bytes(NOT_UTF8)
    else:
        path.symlink_to({"endless": "/dev/zero", "a dangling link": "nowhere"}[kind])


@pytest.mark.parametrize(
    "kind", ["a FIFO", "32 gigabytes", "endless", "a folder", "not UTF-8", "a dangling link"]
)
def test_odd_metadata_of_each_distribution_that_is_asked_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flashvar", "triton", "transformers"):
        put_odd(put_distribution(tmp_path, name) / "METADATA", kind)
    monkeypatch.syspath_prepend(tmp_path)
    assert system.gather_for_cpu().triton == "unknown"
    assert extras.of_installed("linux_x86_64") == NO_EXTRAS
    with pytest.raises(InstallError, match=r"damaged, cut short, .*; install flashvar here again"):
        wheel_requirements.of_installed("linux_x86_64")
    assert "found an unknown version (" in str(unmet("transformers", "5", "old"))


@pytest.mark.parametrize(
    ("kind", "autoload", "words"),
    [
        ("a FIFO", None, r"those of other are broken \(no regular file\): .*entry_points.txt"),
        ("endless", "1", r"those of other are broken \(no regular file\)"),
        ("32 gigabytes", None, r"those of other are broken \(more than 16777216 bytes\)"),
        ("a folder", None, "imported"),
        ("a dangling link", None, "imported"),
        ("a FIFO", "0", "imported"),
    ],
)
def test_torch_is_not_imported_where_that_would_not_end(
    kind: str,
    autoload: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(name: str) -> None:
        raise ModuleNotFoundError(f"{name} is imported", name="torch")

    folder = put_distribution(tmp_path, "other", b"Name: other\n")
    put_odd(folder / "entry_points.txt", kind)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    if autoload is not None:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    monkeypatch.setattr(system, "import_module", stop)
    monkeypatch.delitem(sys.modules, "torch")
    system.gather.cache_clear()
    found = system.gather()
    system.gather.cache_clear()
    assert found.problem is not None
    assert re.search(words, found.problem)
    assert found.torch_repair == (None if words == "imported" else "reinstall other, or remove it")


def test_an_entry_point_that_is_repeated_is_one(tmp_path: Path) -> None:
    folder = put_distribution(tmp_path, "somebody")
    text = "[flashvar.binaries]\n" + "sm_80 = a\n" * 1000
    (folder / "entry_points.txt").write_text(text, encoding="utf-8")
    assert len(list(registry.in_wheels([str(tmp_path)]))) == 1


def test_of_200_000_entry_points_of_one_wheel_few_are_looked_at(tmp_path: Path) -> None:
    folder = put_distribution(tmp_path, "somebody")
    lines = (f"sm_80 = folder_{number}\n" for number in range(200_000))
    text = "[flashvar.binaries]\n" + "".join(lines)
    (folder / "entry_points.txt").write_text(text, encoding="utf-8")
    assert len(list(registry.in_wheels([str(tmp_path)]))) == 64
