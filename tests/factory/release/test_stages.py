"""Each stage of a release ends it in its own way when there is something wrong."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flashvar_factory.config import schema
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.errors import (
    AuditError,
    PackagingError,
    ReleaseError,
    ReproducibilityError,
    SmokeError,
)
from flashvar_factory.release import members, pipeline, reproduce
from flashvar_factory.release.pipeline import Release, Stage
from flashvar_factory.release.pythons import Python
from flashvar_factory.release.smoke import Check, Report
from flashvar_factory.release.stages import STAGES
from flashvar_factory.release.steps import Outcome
from flashvar_factory.toolchain.nvcc import Toolchain

ROOT = Path(__file__).parents[3]
CONFIG = schema.read(ROOT / "variants.toml")
BUILDS = expand(CONFIG, select_all(parse(["sm80", "platform=x86_64"], CONFIG), CONFIG))
EXPECTED = members.expected(CONFIG, BUILDS, ROOT)
NVCC = Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", None, "PATH")
WHEEL = f"flashvar_sm80-{EXPECTED[0].version}-py3-none-manylinux_2_28_x86_64.whl"


@pytest.fixture
def release(tmp_path: Path) -> Release:
    folder = tmp_path / "work"
    (folder / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(folder / "wheels" / WHEEL, "w") as archive:
        archive.writestr("flashvar_sm80/notes.txt", "no wheel at all")
    python = Python((3, 11), False, Path("/usr/bin/python3.11"))
    return Release(
        CONFIG,
        ROOT,
        folder,
        EXPECTED[0].version,
        "c0ffee",
        tuple((build, NVCC) for build in BUILDS),
        EXPECTED,
        {"x86_64": ("sm80",)},
        (python,),
    )


def perform(stage: str, release: Release) -> None:
    """Run every step of one stage, after the wheels."""
    done = {"wheels/flashvar-sm80": Outcome("built", (release.wheels / WHEEL,))}
    for step in STAGES[stage].steps(release, done):
        step.run()


def another_build(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    again = release.folder / "again"
    again.mkdir()
    (again / WHEEL).write_bytes((release.wheels / WHEEL).read_bytes() + b"!")
    monkeypatch.setattr(reproduce, "build_again", lambda *a, **k: again)


def no_index(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    (release.folder / "index").mkdir()
    (release.folder / "index" / "index.html").write_text("", encoding="utf-8")
    check = Check("3.11", "pip", (), (), 1.0, "", "does not import")
    monkeypatch.setattr("flashvar_factory.release.smoke.run", lambda *a, **k: Report((check,)))


def nothing(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    del release, monkeypatch


Plant = Callable[[Release, pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Plant, type[PackagingError], int, str]] = {
    "audit": (nothing, AuditError, 6, "found errors"),
    "sbom": (nothing, PackagingError, 5, "sboms/"),
    "reproduce": (another_build, ReproducibilityError, 10, WHEEL),
    "index": (nothing, PackagingError, 5, "METADATA"),
    "variants": (nothing, PackagingError, 5, "one wheel of flashvar itself"),
    "smoke": (no_index, SmokeError, 11, "python3.11"),
}


@pytest.mark.parametrize("stage", FAULTS)
def test_own_exit_code(stage: str, release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, error, code, words = FAULTS[stage]
    plant(release, monkeypatch)
    with pytest.raises(error) as caught:
        perform(stage, release)
    assert type(caught.value).exit_code == code
    assert words in str(caught.value)


def test_every_stage_has_a_fault_here() -> None:
    assert list(STAGES) == ["wheels", *FAULTS]


def test_wheels_that_do_not_fit(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [release.wheels / WHEEL]
    monkeypatch.setattr("flashvar_factory.build.wheel.sdist", lambda *a, **k: made[0])
    monkeypatch.setattr("flashvar_factory.build.wheel.pure", lambda *a, **k: made[0])
    monkeypatch.setattr("flashvar_factory.build.wheel.binary", lambda *a, **k: made[0])
    with pytest.raises(ReleaseError, match=r"flashvar .* \(sdist\): expected one file, found none"):
        pipeline.run(release, {"wheels": STAGES["wheels"]})


def test_what_an_earlier_release_left_is_removed(release: Release) -> None:
    for name in (WHEEL.replace("sm80", "sm86"), WHEEL.replace("-0", "-9"), f".{WHEEL}.partial"):
        (release.wheels / name).write_bytes(b"")
    next(iter(STAGES["wheels"].steps(release, {})))
    assert [path.name for path in release.wheels.iterdir()] == [WHEEL]


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "numpy-2.0-py3-none-any.whl",
        "flashvar_tools-2.0-py3-none-any.whl",  # of a project of its own
        "folder",
    ],
)
def test_what_others_left_stays(name: str, release: Release) -> None:
    path = release.wheels / name
    path.mkdir() if name == "folder" else path.touch()
    with pytest.raises(ReleaseError, match=f"{name}: not a file of this release\nmove them away"):
        next(iter(STAGES["wheels"].steps(release, {})))
    assert sorted(release.wheels.iterdir()) == sorted([path, release.wheels / WHEEL])


def test_a_release_without_python_is_none(release: Release) -> None:
    stage: Stage = STAGES["smoke"]
    alone = Release(**{**vars(release), "pythons": ()})
    with pytest.raises(SmokeError, match="found none"):
        list(stage.steps(alone, {}))
