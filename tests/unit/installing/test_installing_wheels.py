"""A wheel is judged as a whole before it is installed, and nothing else than what was judged is."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fakes
import pytest

from flashvar._version import __version__
from flashvar.binaries.install_commands import public
from flashvar.binaries.kinds import Architecture
from flashvar.binaries.manifest import LibraryFile
from flashvar.cli import install
from flashvar.errors import DamagedWheelError, InstallError, WheelNotFoundError
from flashvar.installing import check_wheel, installer, record, repack
from flashvar.installing.source import WheelSource
from flashvar.installing.wheel_requirements import WheelRequirement

VERSION = public(__version__)
REQUIREMENT = WheelRequirement(Architecture.parse("89"), "flashvar-sm89", VERSION)
INFO = f"flashvar_sm89-{VERSION}.dist-info"
LIBRARY = b"\x7fELF"
STRANGER = b"a file of somebody else"


def row(name: str, content: bytes, algorithm: str = "sha256") -> str:
    digest = base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=")
    return f'"{name}",{algorithm}={digest.decode()},{len(content)}\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A binary wheel as pip and uv leave it, and a file beside that is not the wheel's."""
    (tmp_path / "stranger.txt").write_bytes(STRANGER)
    said = fakes.manifest("89", version=VERSION)
    library = LibraryFile("libflashvar_sm89.so", len(LIBRARY), hashlib.sha256(LIBRARY).hexdigest())
    said = replace(said, distribution="flashvar-sm89", library=library)
    files = {
        f"flashvar_sm89/{library.file}": LIBRARY,
        "flashvar_sm89/manifest.json": said.to_json().encode(),
        f"{INFO}/METADATA": f"Name: flashvar-sm89\nVersion: {VERSION}\n".encode(),
        f"{INFO}/WHEEL": b"Tag: py3-none-any\n",
        f"{INFO}/entry_points.txt": b"[flashvar.binaries]\nsm_89 = flashvar_sm89\n",
        f"{INFO}/INSTALLER": b"uv",
    }
    listed = "".join(row(name, content) for name, content in files.items())
    files[f"{INFO}/RECORD"] = f"{listed}{INFO}/RECORD,,\n".encode()
    files[".lock"] = b""
    for name, content in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "tree"


def judge(tree: Path) -> str:
    """What `flashvar install` does with a tree; the requirement."""
    files = record.read(tree, REQUIREMENT)
    check_wheel.contents(tree, files, REQUIREMENT)
    return repack.write(files, REQUIREMENT, tree.parent / "judged")


def lines(tree: Path) -> Path:
    return tree / INFO / "RECORD"


def add(text: str) -> Callable[[Path], object]:
    """One line more in RECORD."""
    return lambda tree: lines(tree).write_text(lines(tree).read_text() + text)


def edit(old: str, new: str) -> Callable[[Path], object]:
    return lambda tree: lines(tree).write_text(lines(tree).read_text().replace(old, new))


def put(name: str, content: bytes = b"", listed: bool = True) -> Callable[[Path], object]:
    """One file more, with the hash that it has."""

    def change(tree: Path) -> None:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
        if listed:
            add(row(name, content))(tree)

    return change


def link(tree: Path) -> None:
    library = tree / "flashvar_sm89" / "libflashvar_sm89.so"
    library.rename(tree.parent / "elsewhere.so")
    library.symlink_to(tree.parent / "elsewhere.so")


def link_of_a_folder(tree: Path) -> None:
    (tree / "flashvar_sm89" / "more").symlink_to(tree.parent)


# Words of the sentence.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an absolute path": (
        lambda tree: add(row(str(tree.parent / "stranger.txt"), STRANGER))(tree),
        "stranger.txt",
    ),
    "a path that climbs": (add(row("flashvar_sm89/../../stranger.txt", STRANGER)), "stranger.txt"),
    "a path that climbs at once": (add(row("../stranger.txt", STRANGER)), "stranger.txt"),
    "a file of another package": (put("torch/__init__.py", STRANGER), "torch/__init__.py"),
    "code that every Python runs": (put("flashvar.pth", STRANGER), "flashvar.pth"),
    "a script": (put(f"flashvar_sm89-{VERSION}.data/scripts/x", STRANGER), ".data/scripts"),
    "a file that is not there": (add(row("flashvar_sm89/absent", b"")), "flashvar_sm89/absent"),
    "a file that is not listed": (put("flashvar_sm89/more.so", listed=False), "more.so"),
    "a link to a file": (link, "a link"),
    "a link to a folder": (link_of_a_folder, "flashvar_sm89/more"),
    "a file twice": (put("flashvar_sm89/libflashvar_sm89.so", LIBRARY), "once"),
    "no hash": (edit("INSTALLER", "INSTALLER,,\nflashvar_sm89/x"), "flashvar_sm89/x"),
    "a weak hash": (put("flashvar_sm89/x", listed=False), "flashvar_sm89/x"),
    "another hash": (lambda tree: (tree / INFO / "WHEEL").write_bytes(b"Tag: x\n"), "other bytes"),
    "no RECORD": (lambda tree: lines(tree).unlink(), "RECORD"),
    "a RECORD that is no text": (lambda tree: lines(tree).write_bytes(b"\xff\xfe"), "RECORD"),
    "a RECORD that is no table": (add('"\n'), "RECORD"),
    "a RECORD of other columns": (add("flashvar_sm89\n"), "RECORD"),
    "an empty RECORD": (lambda tree: lines(tree).write_text(""), "does not list"),
    "metadata of two": (lambda tree: (tree / "torch-1.dist-info").mkdir(), "torch-1.dist-info"),
    "metadata of another": (
        lambda tree: (tree / INFO).rename(tree / f"torch-{VERSION}.dist-info"),
        "torch-",
    ),
    "no entry point": (
        lambda tree: (
            (tree / INFO / "entry_points.txt").unlink(),
            edit(
                row(f"{INFO}/entry_points.txt", b"[flashvar.binaries]\nsm_89 = flashvar_sm89\n"), ""
            )(tree),
        ),
        "expected an entry point",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wheel_that_is_not_what_it_lists_is_refused(damage: str, tree: Path) -> None:
    change, words = DAMAGES[damage]
    change(tree)
    with pytest.raises(DamagedWheelError) as refused:
        judge(tree)
    assert words in str(refused.value)
    assert str(refused.value).count("\n") == 0
    assert not (tree.parent / "judged").exists()
    assert (tree.parent / "stranger.txt").read_bytes() == STRANGER


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha3_256", "crc32", ""])
def test_hashes_are_sha_2(algorithm: str, tree: Path) -> None:
    put("flashvar_sm89/x", b"x", listed=False)(tree)
    known = (
        row("flashvar_sm89/x", b"x", algorithm)
        if algorithm in hashlib.algorithms_available
        else f"flashvar_sm89/x,{algorithm}=x,1\n"
    )
    add(known)(tree)
    with pytest.raises(DamagedWheelError, match="SHA-2"):
        judge(tree)


def test_what_is_packed_is_what_was_judged(tree: Path) -> None:
    requirement = judge(tree)
    (path,) = (tree.parent / "judged").glob("*.whl")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert requirement == f"flashvar-sm89=={VERSION} --hash=sha256:{digest}"
    with zipfile.ZipFile(path) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    text = packed.pop(f"{INFO}/RECORD").decode()
    for name, content in packed.items():
        assert content == (tree / name).read_bytes()
        assert name in text
    assert f"{INFO}/INSTALLER" not in {*packed, *text.split(",")}


@pytest.mark.parametrize("way", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_a_wheel_that_is_packed_in_another_way_is_refused(way: int, tmp_path: Path) -> None:
    """Wheels have deflated files; of others, damaged data are errors of all kinds."""
    path = tmp_path / "wheels" / "flashvar_sm89-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", way) as archive:
        archive.writestr("a.so", LIBRARY)
    content = bytearray(path.read_bytes())
    content[44:54] = b"\xff" * 10  # behind the header, which has 30 bytes and a name
    path.write_bytes(content)
    pip = installer.Pip((sys.executable, "-c", "pass"))
    with pytest.raises(DamagedWheelError, match="neither stored nor deflated: fetch it again"):
        pip.fetch(REQUIREMENT, WheelSource(folder=path.parent), tmp_path)


# What installers print of a file that they cannot fetch, and the error.
SAID = {
    "pip, cut off": (
        "error: incomplete-download\n\n\u00d7 Download failed after 6 attempts because not enough "
        "bytes were received (1.2 kB/2.3 kB)",
        DamagedWheelError,
    ),
    "pip, no wheel": (
        "ERROR: Wheel 'flashvar-sm89' located at /dist/a.whl is invalid.",
        DamagedWheelError,
    ),
    "pip, no metadata": (
        "ERROR: flashvar-sm89 has an invalid wheel, .dist-info directory not found",
        DamagedWheelError,
    ),
    "pip, other bytes": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
        DamagedWheelError,
    ),
    "pip, not there": (
        "ERROR: HTTP error 404 while getting http://index/a.whl",
        WheelNotFoundError,
    ),
    "uv, cut off": (
        "error: Failed to download `flashvar-sm89==1`\n"
        "  cause: error decoding response body\n"
        "  cause: end of file before message length reached",
        DamagedWheelError,
    ),
    "uv, no wheel": (
        "error: Failed to prepare distributions\n"
        "  Caused by: Failed to download `flashvar-sm89==1`\n"
        "  Caused by: Failed to extract archive\n"
        "  Caused by: unexpected end of file",
        DamagedWheelError,
    ),
    "uv, no wheel, in a drawing": (
        "  \u00d7 Failed to download `flashvar-sm89==1`\n"
        "  ├─▶ Failed to extract archive:\n"
        "  │   a.whl\n"
        "  ╰─▶ invalid Zip archive: Could not find EOCD",
        DamagedWheelError,
    ),
    "uv, no metadata": (
        "error: Failed to install: a.whl (flashvar-sm89==1)\n"
        "  Caused by: The wheel is invalid: Missing .dist-info directory",
        DamagedWheelError,
    ),
    "uv, other bytes": ("error: Hash mismatch for `flashvar-sm89==1`", DamagedWheelError),
    "uv, not there": (
        "error: Failed to download `flashvar-sm89==1`\n"
        "  cause: Failed to fetch: http://index/a.whl\n"
        "  cause: HTTP status client error (404 Not Found) for url (http://index/a.whl)",
        WheelNotFoundError,
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_the_same_cause_is_the_same_error_with_every_installer(case: str) -> None:
    printed, error = SAID[case]
    done = subprocess.CompletedProcess([], 1, "", printed)
    with pytest.raises(InstallError) as failed:
        installer._check_fetched(done, REQUIREMENT, WheelSource())
    assert type(failed.value) is error


def test_a_label_is_a_part_of_the_version_that_is_asked_for(tmp_path: Path) -> None:
    """uv finds no hash for a version with a label where the requirement has none."""
    files = {f"{INFO.replace(VERSION, f'{VERSION}+hdim64')}/RECORD": b""}
    requirement = repack.write(files, REQUIREMENT, tmp_path)
    assert requirement.startswith(f"flashvar-sm89=={VERSION}+hdim64 --hash=sha256:")
    assert install._listed({REQUIREMENT: requirement}) == f"flashvar-sm89=={VERSION}+hdim64"
