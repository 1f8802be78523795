"""A source that changed without a newer time is compiled again, which ninja alone would not do."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from flashvar_factory.build import compiled_from

HOUR = 3600 * 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project, whose folder has an object of its one source."""
    (tmp_path / "src" / "cuda").mkdir(parents=True)
    (tmp_path / "src" / "cuda" / "a.cuh").write_text("first", encoding="utf-8")
    compiled_from.claim(tmp_path / "build" / "cmake", tmp_path)
    (tmp_path / "build" / "cmake").mkdir()
    (tmp_path / "build" / "cmake" / "a.o").touch()
    return tmp_path


def set_time(path: Path, difference: int) -> None:
    when = time.time_ns() + difference
    os.utime(path, ns=(when, when))


def keeps(root: Path) -> bool:
    """Whether the object is still there behind the next claim."""
    compiled_from.claim(root / "build" / "cmake", root)
    return (root / "build" / "cmake" / "a.o").exists()


def test_unchanged_sources_keep_the_folder(root: Path) -> None:
    set_time(root / "src" / "cuda" / "a.cuh", -HOUR)
    assert keeps(root)


@pytest.mark.parametrize(("difference", "kept"), [(HOUR, True), (-HOUR, False)])
def test_other_content(
    difference: int, kept: bool, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = root / "src" / "cuda" / "a.cuh"
    source.write_text("second", encoding="utf-8")
    set_time(source, difference)
    assert keeps(root) is kept
    said = f"starts empty: {source} changed, and its time is older than the last build"
    assert (said in capsys.readouterr().out) is not kept


def test_a_clock_that_went_back(root: Path) -> None:
    """Then files that the factory writes are older than their objects too."""
    set_time(root / "build" / compiled_from.FILE, HOUR)
    assert not keeps(root)


def test_without_a_record_ninja_decides(root: Path) -> None:
    (root / "build" / compiled_from.FILE).unlink()
    assert keeps(root)


def test_an_interrupted_removal_is_repeated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    source = root / "src" / "cuda" / "a.cuh"
    source.write_text("second", encoding="utf-8")
    set_time(source, -HOUR)
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keeps(root)
    monkeypatch.undo()
    assert not keeps(root)
