"""The files of a release fit: nothing missing, twice, strange or of another version."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flashvar_factory.config import schema, version
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.errors import ReleaseError
from flashvar_factory.release import members
from flashvar_factory.release.members import Member
from flashvar_factory.release.merge import merge
from flashvar_factory.release.publish import REPORTS, prepare

ROOT = Path(__file__).parents[3]
CONFIG = schema.read(ROOT / "variants.toml")
VERSION = version.read(CONFIG, ROOT)
BUILDS = expand(CONFIG, select_all(parse(["arch=sm_80,sm_89", "platform=x86_64"], CONFIG), CONFIG))
EXPECTED = members.expected(CONFIG, BUILDS, ROOT)

SDIST = f"flashvar-{VERSION}.tar.gz"
PURE = f"flashvar-{VERSION}-py3-none-any.whl"
FACTORY = f"flashvar_factory-{VERSION}-py3-none-any.whl"
SM80 = f"flashvar_sm80-{VERSION}-py3-none-manylinux_2_28_x86_64.whl"
SM89 = f"flashvar_sm89-{VERSION}-py3-none-manylinux_2_28_x86_64.whl"
NAMES = dict(zip([SDIST, PURE, FACTORY, SM80, SM89], EXPECTED, strict=True))
SHARDS = {"one": [SDIST, PURE, FACTORY, SM80], "two": [SM89]}


def write_pure(path: Path, *requirements: str, name: str = "flashvar") -> None:
    lines = [f"Requires-Dist: {one}\n" for one in requirements]
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n" + "".join(lines)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name.replace('-', '_')}-{VERSION}.dist-info/METADATA", text)


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, Path]:
    folders = {}
    for shard, names in SHARDS.items():
        folders[shard] = tmp_path / shard
        folders[shard].mkdir()
        for name in names:
            (folders[shard] / name).write_bytes(name.encode())
    extra = f'flashvar-sm89=={VERSION}; sys_platform == "linux" and extra == "sm89"'
    write_pure(folders["one"] / PURE, "torch>=2.8", extra)
    write_pure(folders["one"] / FACTORY, name="flashvar-factory")
    return folders


def test_expected() -> None:
    assert (
        Member("flashvar", "sdist", VERSION),
        Member("flashvar", "any", VERSION),
        Member("flashvar-factory", "any", VERSION),
        Member("flashvar-sm80", "manylinux_2_28_x86_64", VERSION),
        Member("flashvar-sm89", "manylinux_2_28_x86_64", VERSION),
    ) == EXPECTED


@pytest.mark.parametrize(("name", "member"), NAMES.items())
def test_a_file_name_is_a_member(name: str, member: Member) -> None:
    assert members.read(Path(name)) == member


def test_an_sdist_of_another_kind_is_no_member_of_a_release() -> None:
    member = members.read(Path(f"flashvar-{VERSION}.zip"))
    assert member is not None
    assert member.platform != members.SDIST


@pytest.mark.parametrize(
    "name", ["notes.txt", "flashvar.whl", f"flashvar-{VERSION}-py3-none-any-null.whl"]
)
def test_another_file_is_none(name: str) -> None:
    assert members.read(Path(name)) is None


def test_shards_that_fit_are_merged(shards: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "dist"
    merged = merge(list(shards.values()), output, CONFIG, EXPECTED)
    assert sorted(path.name for path in output.iterdir()) == sorted(
        [SDIST, PURE, FACTORY, SM80, SM89]
    )
    assert sorted(merged) == sorted(output.iterdir())
    assert (output / SM89).read_bytes() == SM89.encode()


def test_a_merge_that_is_cut_off(
    shards: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a release has its name only when it is whole."""
    output = tmp_path / "dist"

    def interrupted(source: Path, target: Path) -> None:
        Path(target).write_bytes(source.read_bytes()[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge(list(shards.values()), output, CONFIG, EXPECTED)
    assert [path.name for path in output.iterdir() if members.read(path) is not None] == []
    monkeypatch.undo()
    assert len(merge(list(shards.values()), output, CONFIG, EXPECTED)) == 5
    assert len(list(output.iterdir())) == 5


FAULTS = {
    "missing": (lambda one, two: (two / SM89).unlink(), "flashvar-sm89", "found none"),
    "twice": (lambda one, two: (two / SM80).write_bytes(b""), SM80, "there twice"),
    "stranger": (
        lambda one, two: (two / "notes.txt").write_text(""),
        "notes.txt",
        "not a file of",
    ),
    "other distribution": (
        lambda one, two: (two / SM89.replace("sm89", "sm99")).write_text(""),
        "sm99",
        "not a file of",
    ),
    "other version": (
        lambda one, two: (two / SM89).rename(two / SM89.replace(VERSION, "9.9")),
        f"expected version {VERSION}",
        "found 9.9",
    ),
    "no folder": (lambda one, two: two.rename(two.with_name("moved")), "two", "expected a folder"),
    "extra of nothing": (
        lambda one, two: write_pure(one / PURE, f"flashvar-sm99=={VERSION}; extra == 'sm99'"),
        "the extra sm99 names flashvar-sm99",
        "does not build",
    ),
    "extra of another version": (
        lambda one, two: write_pure(one / PURE, "flashvar-sm80==9.9 ; extra == 'sm80'"),
        "wants flashvar-sm80 9.9",
        f"has {VERSION}",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_do_not_fit(fault: str, shards: dict[str, Path], tmp_path: Path) -> None:
    plant, *words = FAULTS[fault]
    plant(shards["one"], shards["two"])
    with pytest.raises(ReleaseError) as caught:
        merge(list(shards.values()), tmp_path / "dist", CONFIG, EXPECTED)
    assert caught.value.exit_code == 9
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)
    assert not (tmp_path / "dist").exists()


def test_an_extra_that_was_not_asked_for_is_no_fault(tmp_path: Path) -> None:
    write_pure(tmp_path / PURE, f"flashvar-sm90=={VERSION}; extra == 'sm90'", "x-y; extra == 'z'")
    assert members.extras_complaints(tmp_path / PURE, CONFIG, EXPECTED) == []


def test_a_label_says_that_a_member_is_partial() -> None:
    builds = expand(CONFIG, select_all(parse(["sm80", "hdim=64"], CONFIG), CONFIG))
    assert [one.partial for one in members.expected(CONFIG, builds, ROOT)] == [*[False] * 3, True]


def test_dist_of_an_earlier_run_loses_its_report(tmp_path: Path) -> None:
    for name in (SM80, f".{SM89}.partial", *REPORTS):
        (tmp_path / name).write_text("")
    prepare(tmp_path, EXPECTED)
    assert [path.name for path in tmp_path.iterdir()] == [SM80]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("notes.txt", "not a file of"),
        (SM80.replace("sm80", "sm99"), "not a file of"),
        (SM80.replace(VERSION, "9.9"), "found 9.9"),
    ],
)
def test_other_files_in_dist(name: str, word: str, tmp_path: Path) -> None:
    for file in (name, SM80, *REPORTS):
        (tmp_path / file).write_text("")
    with pytest.raises(ReleaseError, match=word) as caught:
        prepare(tmp_path, EXPECTED)
    assert name in str(caught.value)
    assert SM80 not in str(caught.value) or name == SM80
    assert (tmp_path / REPORTS[0]).exists()


@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_not_merged(
    put: Callable[[Path], object], shards: dict[str, Path], tmp_path: Path
) -> None:
    (shards["two"] / SM89).unlink()
    put(shards["two"] / SM89)
    with pytest.raises(ReleaseError, match="expected a file, found a link, a folder or something"):
        merge(list(shards.values()), tmp_path / "out", CONFIG, EXPECTED)
