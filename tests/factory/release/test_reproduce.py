"""The folder that two builds are compared in: what others keep there stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory.release import reproduce

TOOLCHAIN = cast("Any", None)


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "copy_sources", lambda root, to, work: to.mkdir(parents=True))
    monkeypatch.setattr(reproduce, "_build", lambda conditions, words, toolchain, copy, root: copy)


def test_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for _ in range(2):
        for copy in reproduce.build_twice((), TOOLCHAIN, root=tmp_path, folder=work):
            assert list(copy.iterdir()) == []
            (copy / "stale.whl").touch()
    again = reproduce.build_again((), TOOLCHAIN, root=tmp_path, folder=work)
    assert list(again.iterdir()) == []


@pytest.mark.parametrize("folder", [".", "work", "file"])
def test_what_no_run_left_stays(folder: str, tmp_path: Path) -> None:
    mine = [tmp_path / "variants.toml", tmp_path / "work" / "one" / "a", tmp_path / "work" / "b"]
    (tmp_path / "work" / "one").mkdir(parents=True)
    for path in (*mine, tmp_path / "file"):
        path.touch()
    for build in (reproduce.build_twice, reproduce.build_again):
        with pytest.raises(ConfigurationError, match="which stays as it is"):
            build((), TOOLCHAIN, root=tmp_path, folder=tmp_path / folder)
    assert all(path.exists() for path in mine)


@pytest.mark.parametrize("name", ["one", "one/mine", "two/mine", "two/in-a-longer-path/mine"])
def test_folders_of_the_same_names_stay_too(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "work" / name
    mine.parent.mkdir(parents=True)
    mine.touch()
    with pytest.raises(ConfigurationError, match=f"found {name}, which stays as it is"):
        reproduce.build_twice((), TOOLCHAIN, root=tmp_path, folder=tmp_path / "work")
    assert mine.exists()
