"""A small release from a clean checkout: checked, resumed, the same bytes twice, or refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fewer_ops
import pytest
from checkout import committed_copy, git, small_project

from flashvar_factory.release import reproduce

Factory = Callable[..., "subprocess.CompletedProcess[str]"]

# The kernel that compiles fastest.
WORDS = ("sm80", "op=causal_conv1d_update", "dtype=bf16")
RELEASE = ("release", *WORDS, "--python", sys.executable)
WHEEL = "flashvar_sm80-*.whl"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the ops of one group."""
    changed = {"variants.toml": fewer_ops.variants("causal_conv1d").encode()}
    folder = tmp_path_factory.mktemp("release") / "project"
    return committed_copy(folder, changed, fewer_ops.other_sources("causal_conv1d"))


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    """Smoke tests install a stand-in for torch, which the other tests have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PIP_FIND_LINKS", raising=False)
        yield


@pytest.fixture(scope="module")
def released(factory: Factory, checkout: Path) -> str:
    """What the first release said."""
    done = factory(checkout, *RELEASE)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture
def clean(checkout: Path) -> Iterator[Path]:
    """The checkout, and as it was afterwards."""
    yield checkout
    git(checkout, "reset", "--quiet", "--hard")
    git(checkout, "clean", "--quiet", "--force")


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_dist_is_the_release_and_its_report(checkout: Path, released: str) -> None:
    document = json.loads((checkout / "dist" / "report.json").read_text(encoding="utf-8"))
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (checkout / "dist").iterdir()
        if not path.name.startswith("report.")
    }
    assert {file["file"]: file["sha256"] for file in document["files"]} == hashes
    assert len(hashes) == 4
    assert document["revision"] == git(checkout, "rev-parse", "HEAD").strip()
    assert (checkout / "dist" / "report.txt").read_text(encoding="utf-8") in released
    page = (checkout / "dist" / "report.html").read_text(encoding="utf-8")
    assert all(digest in page for digest in hashes.values())


def test_released_manifest_names_the_commit(checkout: Path, released: str) -> None:
    with zipfile.ZipFile(only(checkout / "dist", WHEEL)) as archive:
        manifest = json.loads(archive.read("flashvar_sm80/manifest.json"))
    assert manifest["source"]["revision"] == git(checkout, "rev-parse", "HEAD").strip()
    assert manifest["source"]["dirty"] is False


def test_again_is_nothing_to_do(factory: Factory, checkout: Path, released: str) -> None:
    done = factory(checkout, *RELEASE)
    assert done.returncode == 0, done.stdout
    assert "Building" not in done.stdout
    assert "building in" not in done.stdout
    steps = json.loads((checkout / "dist" / "report.json").read_text(encoding="utf-8"))["steps"]
    assert done.stdout.count("(done before)") == len(steps)


def test_what_was_lost_is_made_again_to_the_byte(
    factory: Factory, checkout: Path, released: str
) -> None:
    before = only(checkout / "dist", WHEEL).read_bytes()
    only(checkout / "build" / "release" / "wheels", WHEEL).unlink()
    shutil.rmtree(checkout / "build" / "wheels")
    done = factory(checkout, *RELEASE)
    assert done.returncode == 0, done.stdout
    assert "Building CUDA object" in done.stdout
    assert "wheels/pure: flashvar-" in done.stdout
    assert only(checkout / "dist", WHEEL).read_bytes() == before


@pytest.mark.parametrize("change", ["edited", "added"])
def test_dirty_checkout(change: str, factory: Factory, clean: Path, released: str) -> None:
    file = clean / ("README.md" if change == "edited" else "notes.txt")
    with file.open("a", encoding="utf-8") as opened:
        opened.write("more\n")
    before = sorted((clean / "dist").iterdir())
    done = factory(clean, *RELEASE)
    assert done.returncode == 8
    assert "expected a clean checkout" in done.stdout
    assert file.name in done.stdout
    assert sorted((clean / "dist").iterdir()) == before


def test_stranger_in_dist(factory: Factory, checkout: Path, released: str) -> None:
    stranger = checkout / "dist" / "torch-2.0-py3-none-any.whl"
    stranger.write_bytes(b"")
    done = factory(checkout, *RELEASE)
    stranger.unlink()
    assert done.returncode == 9
    assert f"{stranger.name}: not a file of this release" in done.stdout


STEPS = ["wheels", "audit", "sbom", "reproduce", "index", "variants", "smoke"]


def test_every_stage_says_what_it_found(checkout: Path, released: str) -> None:
    document = json.loads((checkout / "dist" / "report.json").read_text(encoding="utf-8"))
    assert list(dict.fromkeys(step["name"].split("/")[0] for step in document["steps"])) == STEPS
    results = {file["file"]: list(file["results"]) for file in document["files"]}
    assert sorted(results.values()) == [*[["audit"]] * 3, ["audit", "sbom"]]
    assert str(checkout) not in (checkout / "dist" / "report.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("word", "said"), [("shard=1/2", "merge-shards"), ("ptx=1", "found PTX")])
def test_no_release(word: str, said: str, factory: Factory, checkout: Path) -> None:
    done = factory(checkout, "release", *WORDS, word)
    assert done.returncode == 2
    assert said in done.stdout


def test_shards_are_merged_into_a_release(
    factory: Factory, checkout: Path, released: str, tmp_path: Path
) -> None:
    words = ("arch=sm_80,sm_86", *WORDS[1:])
    for number in ("1", "2"):
        output = str(tmp_path / number)
        done = factory(checkout, "wheels", *words, f"shard={number}/2", "--output", output)
        assert done.returncode == 0, done.stdout[-3000:]
    merge = (
        "merge-shards",
        *words,
        "--output",
        str(tmp_path / "dist"),
        "--shard",
        str(tmp_path / "1"),
    )
    missing = factory(checkout, *merge)
    assert missing.returncode == 9
    assert "flashvar-sm86" in missing.stdout
    merged = factory(checkout, *merge, "--shard", str(tmp_path / "2"))
    assert merged.returncode == 0, merged.stdout
    assert len(list((tmp_path / "dist").iterdir())) == 5
    # Built by another command, elsewhere: the bytes of the release.
    name = only(checkout / "dist", WHEEL).name
    assert (tmp_path / "dist" / name).read_bytes() == (checkout / "dist" / name).read_bytes()


def test_the_second_build_has_the_same_bytes(checkout: Path, released: str) -> None:
    (again,) = (checkout / "build" / "release").glob("again-*")
    wheel = only(again / reproduce.CONDITIONS[-1].folder / "project" / "dist", WHEEL)
    assert wheel.read_bytes() == only(checkout / "dist", WHEEL).read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        contents = [archive.read(name) for name in archive.namelist()]
    assert not any(str(checkout.parent).encode() in content for content in contents)


ONE_KERNEL = ("reproduce", "sm_75", "dtype=fp32", "per_thread=1")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The small project: whether two builds are compared does not depend on the kernels."""
    return small_project(tmp_path / "vecadd")


def test_two_builds_are_the_same_bytes(factory: Factory, small: Path) -> None:
    done = factory(small, *ONE_KERNEL)
    assert done.returncode == 0, done.stdout[-3000:]
    folders = [small / "build" / "reproduce" / one.folder for one in reproduce.CONDITIONS]
    one, two = (only(folder / "project" / "dist", "*.whl") for folder in folders)
    assert one.read_bytes() == two.read_bytes()
    assert f"the same {one.stat().st_size:,} bytes twice: {one.name}" in done.stdout


def test_a_folder_in_the_library_is_a_difference(factory: Factory, small: Path) -> None:
    line = 'target_compile_definitions(${FLASHVAR_LIBRARY} PRIVATE HERE="${CMAKE_SOURCE_DIR}")\n'
    with (small / "src" / "cuda" / "CMakeLists.txt").open("a", encoding="utf-8") as file:
        file.write(line)
    with (small / "src" / "cuda" / "abi" / "info.cc").open("a", encoding="utf-8") as file:
        file.write("[[gnu::used]] static const char kHere[] = HERE;\n")
    done = factory(small, *ONE_KERNEL)
    assert done.returncode == 10, done.stdout[-3000:]
    assert "vecadd_sm75/libvecadd_sm75.so: " in done.stdout
