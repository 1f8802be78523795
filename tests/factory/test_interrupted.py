"""What a command leaves that an interrupt or a full disk ended: it is called again and succeeds."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_wheels
import pytest

from flashvar_factory import index
from flashvar_factory.build import example, process, self_contained
from flashvar_factory.build import wheel as wheels
from flashvar_factory.cli import main
from flashvar_factory.errors import PackagingError


def second_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose second call is interrupted."""
    calls = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return call(*arguments, **options)

    return interrupted


@pytest.mark.parametrize("exists", [True, False])
def test_init(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    if exists:
        folder.mkdir()
    monkeypatch.setattr(Path, "write_text", second_call(Path.write_text))
    with pytest.raises(KeyboardInterrupt):
        example.write("mine", folder)
    monkeypatch.undo()
    assert len(example.write("mine", folder)) > 10


def test_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example.write("mine", tmp_path / "mine")
    words = ["project", "sm90", "--root", str(tmp_path / "mine"), "--output", str(tmp_path / "own")]
    monkeypatch.setattr(self_contained, "_copy", second_call(self_contained._copy))
    assert main(words) == 130
    monkeypatch.undo()
    assert "unfinished: write it again" in (tmp_path / "own" / "pyproject.toml").read_text("utf-8")
    assert main(words) == 0
    assert "unfinished" not in (tmp_path / "own" / "pyproject.toml").read_text("utf-8")


def test_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    index.write(tmp_path / "dist", tmp_path / "site")
    before = (tmp_path / "site" / index.PAGE).stat().st_ino
    monkeypatch.setattr(Path, "replace", second_call(Path.replace))
    with pytest.raises(KeyboardInterrupt):
        index.write(tmp_path / "dist", tmp_path / "site")
    monkeypatch.undo()
    assert (tmp_path / "site" / index.PAGE).stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "site"]


def test_two_indexes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would remove files that the pages of the first one list."""
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    copied = index._copied

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(PackagingError, match="expected no other command that writes this"):
            index.write(tmp_path / "dist", tmp_path / "site")
        return copied(*arguments)

    monkeypatch.setattr(index, "_copied", meanwhile)
    assert index.write(tmp_path / "dist", tmp_path / "site") == ["flashvar"]
    assert index.write(tmp_path / "dist", tmp_path / "site") == ["flashvar"]


def test_an_index_that_was_killed(tmp_path: Path) -> None:
    fake_wheels.bare(tmp_path / "dist", "flashvar", "1.0")
    (tmp_path / ".site.partial" / "other").mkdir(parents=True)
    (tmp_path / ".site.partial" / "half.whl").touch()
    index.write(tmp_path / "dist", tmp_path / "site")
    assert {path.name for path in (tmp_path / "site").iterdir() if path.is_dir()} == {"flashvar"}
    assert not (tmp_path / "site" / "half.whl").exists()


def test_a_wheel_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier one stays, and no part of the new one gets its name."""
    folder, output = tmp_path / "build", tmp_path / "dist"
    output.mkdir()
    earlier = output / "mine-1.0-py3-none-any.whl"
    earlier.write_bytes(b"earlier")

    def build(command: list[str], **_: object) -> Any:
        (folder / "made").mkdir(parents=True)
        (folder / "made" / "mine-1.1-py3-none-any.whl").write_bytes(b"whole")
        return process.subprocess.CompletedProcess(command, 0, "")

    def half(source: Path, target: Path) -> None:
        Path(target).write_bytes(source.read_bytes()[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(process, "run", build)
    monkeypatch.setattr(shutil, "move", half)
    with pytest.raises(OSError, match="No space left"):
        wheels._build(tmp_path, tmp_path, folder, "mine", output, [])
    assert list(output.iterdir()) == [earlier]
    monkeypatch.undo()
    monkeypatch.setattr(process, "run", build)
    made = wheels._build(tmp_path, tmp_path, folder, "mine", output, [])
    assert (list(output.iterdir()), made.read_bytes()) == ([made], b"whole")
