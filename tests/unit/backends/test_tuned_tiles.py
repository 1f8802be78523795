"""The file of measured tiles, and the command that writes it; no GPU, the timer is made up."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashvar import errors
from flashvar.backends.triton.attention import measure, tiles, tuned
from flashvar.backends.triton.attention.tiles import Tile
from flashvar.cli import commands, tune
from flashvar.cli.comma_lists import unique
from flashvar.machine.system import Device, System

H200 = Device(0, "NVIDIA H200", (9, 0), 232448, 132, 1 << 37)
MACHINE = System(devices=(H200,), triton="3.7.1")
NAME = tuned.machine("3.7.1", "NVIDIA H200")
TILE = Tile(64, 32, 4, 2)


def chosen(*words: str) -> argparse.Namespace:
    return commands.parse(["tune", *words])


FORWARD_64 = chosen("--head-dim", "64", "--direction", "forward")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FLASHVAR_CACHE_DIR", str(tmp_path))
    tuned.tiles_of.cache_clear()
    yield tmp_path
    tuned.tiles_of.cache_clear()


def timer(direction: str, head_dim: int, tile: Tile) -> float:
    """The tile with 128 queries, 32 keys and 4 stages is the fastest; one stage does not run."""
    if tile.stages == 1:
        raise RuntimeError("out of resource: shared memory\nand more")
    return 10.0 - tile.block_q / 32 + tile.block_kv / 32 - tile.stages + tile.warps / 100


def test_what_is_kept_is_found(folder: Path) -> None:
    assert tuned.keep(NAME, {"forward 64": TILE}) == folder / "tuned.json"
    assert tuned.tiles_of(NAME) == {"forward 64": TILE}
    assert tuned.tiles_of(tuned.machine("3.6.0", "NVIDIA H200")) == {}


def test_a_measured_tile_comes_first_but_with_a_bias() -> None:
    facts = ("forward", (9, 0), H200.shared_memory, 64, 64)
    assert tiles.choose(*facts, tuned=TILE) == TILE
    assert tiles.choose(*facts, 2, TILE) == tiles.choose(*facts, 2) != TILE


def test_what_others_wrote_stays() -> None:
    tuned.keep("another machine", {"forward 64": TILE})
    tuned.keep(NAME, {"forward 64": TILE})
    tuned.keep(NAME, {"backward_q 64": TILE})
    assert set(tuned.tiles_of(NAME)) == {"forward 64", "backward_q 64"}
    assert tuned.tiles_of("another machine") == {"forward 64": TILE}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLASHVAR_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a/tuned.json"),
        ({"FLASHVAR_CACHE_DIR": "~/a", "HOME": "/c"}, "/c/a/tuned.json"),
        ({"FLASHVAR_CACHE_DIR": "~nobody-here/a", "HOME": "/c"}, None),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/flashvar/tuned.json"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/flashvar/tuned.json"),
        ({"HOME": "/c"}, "/c/.cache/flashvar/tuned.json"),
    ],
    ids=["ours", "ours-in-home", "ours-without-home", "xdg", "relative-xdg", "home"],
)
def test_where_the_file_lies(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLASHVAR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tuned.path() == (expected and Path(expected))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\0\xff",
        '{"schema": 2, "machines": {}}',
        '{"schema": 1}',
        '{"schema": 1, "machines": []}',
        '{"schema": 1, "machines": {"m": []}}',
        '{"schema": 1, "machines": {"m": {"forward 64": [64, 64, 4]}}}',
        '{"schema": 1, "machines": {"m": {"forward 64": [64, 63, 4, 2]}}}',
        '{"schema": 1, "machines": {"m": {"forward 64": [64, 1048576, 4, 2]}}}',
        '{"schema": 1, "machines": {"m": {"forward 64": [64, 64, 4, true]}}}',
    ],
)
def test_a_file_that_makes_no_sense_is_ignored_with_one_line(
    text: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "tuned.json").write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "flashvar"):
        assert tuned.tiles_of(NAME) == {}
        assert tuned.tiles_of(NAME) == {}
    assert len(caplog.records) == 1
    tuned.keep(NAME, {"forward 64": TILE})
    assert tuned.tiles_of(NAME) == {"forward 64": TILE}


def test_a_folder_that_cannot_be_written_keeps_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("FLASHVAR_CACHE_DIR", str(folder / "file" / "below"))
    assert tuned.keep(NAME, {"forward 64": TILE}) is None
    assert tuned.tiles_of(NAME) == {}


WRITER = """
import sys
from flashvar.backends.triton.attention import tuned
for number in range(5):
    tuned.keep(sys.argv[1], {f"forward {number}": tuned.Tile(64, 64, 4, 2)})
"""


def test_writers_at_the_same_time_lose_nothing(folder: Path, python: str) -> None:
    sources = Path(tuned.__file__).parents[4]
    environment = {"PYTHONPATH": str(sources), "FLASHVAR_CACHE_DIR": str(folder)}
    writers = [
        subprocess.Popen([python, "-c", WRITER, f"machine {number}"], env=environment)
        for number in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    machines = json.loads((folder / "tuned.json").read_text())["machines"]
    assert {name: len(found) for name, found in machines.items()} == {
        f"machine {number}": 5 for number in range(3)
    }
    assert sorted(path.name for path in folder.iterdir()) == ["tuned.json", "tuned.lock"]


@pytest.mark.parametrize("direction", ["forward", "backward_q", "backward_kv"])
def test_candidates_fit_and_begin_with_the_table(direction: str) -> None:
    found = measure.candidates(direction, (9, 0), H200.shared_memory, 128)
    assert found[0] == tiles.choose(direction, (9, 0), H200.shared_memory, 128, 128)
    assert len(found) == len(set(found)) > 5
    for tile in found:
        needed = tiles.shared_bytes(direction, tile, 128, 128, (9, 0))
        assert needed <= H200.shared_memory


def test_the_command_keeps_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    code = tune.run(chosen("--head-dim", "64", "96", "--json"), system=MACHINE, timer=timer)
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["triton"]) == ("NVIDIA H200", "3.7.1")
    assert [(one["kernel"], one["head_dim"]) for one in report["kernels"]] == [
        (kernel, head_dim)
        for head_dim in (64, 96)
        for kernel in ("forward", "backward_q", "backward_kv")
    ]
    found = tuned.tiles_of(NAME)
    assert found["forward 64"] == Tile(128, 32, 4, 4)
    for one in report["kernels"]:
        assert found[tuned.key(one["kernel"], one["head_dim"])] == Tile(*one["tile"])
        assert one["milliseconds"] <= one["table_milliseconds"]


def test_head_dims_are_separated_as_in_warmup() -> None:
    for words in (("64,96",), ("64", "96"), ("64,96", "64")):
        assert unique(chosen("--head-dim", *words).head_dim) == (64, 96)


def test_the_command_tells_people_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.run(FORWARD_64, system=MACHINE, timer=timer) == 0
    shown = capsys.readouterr()
    assert "forward, head dim 64: 64 queries x 64 keys, 4 warps, 3 stages: " in shown.err
    assert "does not run (RuntimeError: out of resource: shared memory)" in shown.err
    assert "kept in " in shown.out


def test_nothing_runs_nothing_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(direction: str, head_dim: int, tile: Tile) -> float:
        raise RuntimeError("no")

    assert tune.run(FORWARD_64, system=MACHINE, timer=broken) == 1
    assert "nothing is kept" in capsys.readouterr().out
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("system", "head_dim", "error"),
    [
        (System(devices=(H200,)), 64, errors.BackendUnavailableError),
        (System(triton="3.7.1"), 64, errors.BackendUnavailableError),
        (MACHINE, 60, errors.ConfigurationError),
        (MACHINE, 520, errors.ConfigurationError),
    ],
    ids=["no-triton", "no-device", "odd-head-dim", "large-head-dim"],
)
def test_what_cannot_be_tuned_is_said(
    system: System, head_dim: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        tune.run(chosen("--head-dim", str(head_dim)), system=system, timer=timer)


def test_launches_use_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dataclasses import replace

    from flashvar.backends.triton.attention import launch
    from flashvar.ops.attention.problem import Inputs, Options
    from flashvar.ops.attention.validate import inspect

    monkeypatch.setattr(launch, "gather", lambda: MACHINE)
    q = torch.empty(1, 64, 2, 64, dtype=torch.half)
    problem = replace(inspect(Inputs(q, q, q), Options()), device=0)
    assert launch.best_tile(problem, "forward") != TILE
    tuned.keep(NAME, {"forward 64": TILE})
    assert launch.best_tile(problem, "forward") == TILE
