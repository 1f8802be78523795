"""Pictures are drawn from what a benchmark wrote: rates, ratios, host time and sizes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
CARD = {
    "device": {"name": "a card", "driver": "1.2", "cudnn": 91900},
    "versions": {"torch": "2.11"},
}


Draw = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draw:
    """`call(*words)` runs the program in this process, which loads matplotlib once."""

    def called(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["draw.py", *words])
        monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "benchmarks" / "draw.py"), run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return called


@pytest.fixture
def draw(tmp_path: Path, call: Draw) -> Draw:
    """`draw(*documents)` draws into tmp_path / "out"; the exit code, and what is said of it."""

    def drawn(*documents: dict[str, Any]) -> tuple[int, str]:
        files = []
        for index, document in enumerate(documents):
            files.append(str(tmp_path / f"{index}.json"))
            result_file.write(Path(files[-1]), {"schema": 2, "environment": CARD} | document)
        return call(*files, "--out", str(tmp_path / "out"))

    return drawn


def rates(direction: str, **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "direction": direction,
            "contender": contender,
            "head_dim": 64,
            "causal": causal,
            "seqlen": seqlen,
            "tflops": 100.0 + seqlen / 100,
            **changes,
        }
        for contender in ("sdpa-flash", "sdpa-cudnn", "flashvar-cuda")
        for causal in (False, True)
        for seqlen in (1024, 4096)
    ]


def host(contender: str) -> dict[str, Any]:
    return {"contender": contender, "median_us": 9.0, "low_us": 8.0, "high_us": 10.0}


def of_op(op: str, contender: str) -> dict[str, Any]:
    return {"op": op, "unit": "TB/s", "cell": "small", "contender": contender, "rate": 3.25}


def test_everything_that_was_measured_is_drawn(tmp_path: Path, draw: Draw) -> None:
    skipped = {"direction": "forward", "contender": "flex", "skipped": "not here"}
    wheel = {"distribution": "x", "platform": "linux_x86_64", "version": "1+hdim64.ptx"}
    wheel |= {"bytes": 10**6, "installed_bytes": 1}
    code, said = draw(
        {
            "benchmark": "attention",
            "rows": [*rates("forward"), *rates("backward"), skipped],
        },
        {
            "benchmark": "host",
            "rows": [host("flashvar-eager"), host("sdpa-flash-eager"), host("empty-like")],
        },
        {"benchmark": "size", "rows": [wheel]},
        {"benchmark": "ops", "rows": [of_op("merge_states", "copy"), of_op("an_op", "fla")]},
    )
    assert code == 0, said
    names = ["forward", "backward", "causal", "best-peer", "each-peer", "host", "sizes"]
    names += ["merge-states", "an-op"]
    found = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert set(found) == {f"{name}.{ending}" for name in names for ending in ("png", "svg")}
    assert min(found.values()) > 1000


@pytest.mark.parametrize("benchmark", ["attention", "host", "ops", "import"])
def test_nothing_measured_is_nothing_drawn(benchmark: str, draw: Draw) -> None:
    code, said = draw({"benchmark": benchmark, "rows": []})
    assert code == 2
    assert "measure first" in said


def test_a_picture_has_one_machine(draw: Draw) -> None:
    document = {"benchmark": "attention", "rows": rates("forward")}
    other = {"environment": {**CARD, "device": {"name": "another card"}}}
    code, said = draw(document, document | other)
    assert code == 2
    assert "expected files of one machine, found a card, driver 1.2," in said


def test_several_runs_are_said_to_be(
    tmp_path: Path, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = import_module("matplotlib.figure").Figure
    save = figure.savefig

    def save_one(self: Any, file: Path, **options: Any) -> None:
        if file.name == "forward.svg":  # each takes a quarter of a second
            save(self, file, **options)

    monkeypatch.setattr(figure, "savefig", save_one)
    runs = [{"benchmark": "attention", "rows": rates(way)} for way in ("forward", "backward")]
    assert draw(*runs)[0] == 0
    # Its words are drawn as outlines, below a comment that has them.
    picture = (tmp_path / "out" / "forward.svg").read_text(encoding="utf-8")
    assert "of 2 runs" in picture
    assert "all in one run" not in picture


def test_a_file_that_is_not_there_is_named(tmp_path: Path, call: Draw) -> None:
    code, said = call(str(tmp_path / "none.json"))
    assert code == 2
    assert "expected a file of --json at" in said


def test_the_best_peer_is_the_fastest_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    points = import_module("benchmarks.drawing.points")
    a, b = points.Point(64, False, 1024), points.Point(64, False, 4096)
    measured = {
        "sdpa-flash": {a: 100.0, b: 200.0},
        "sdpa-cudnn": {a: 300.0},
        "sageattention": {a: 600.0, b: 600.0},  # approximate
        "flashvar-cuda": {a: 900.0, b: 900.0},
    }
    best = points.best_peer(measured)
    assert best == {a: 300.0, b: 200.0}
    assert points.over(measured["flashvar-cuda"], best) == {a: 3.0, b: 4.5}


RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def figures(
    tmp_path: Path, call: Draw, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], dict[str, Any]]:
    """`figures(record)` gives what is drawn from it, by name."""
    figure, drawn = import_module("matplotlib.figure").Figure, {}
    monkeypatch.setattr(figure, "savefig", lambda self, file, **_: drawn.update({file.stem: self}))

    def made(record: Path) -> dict[str, Any]:
        assert call(str(record), "--out", str(tmp_path / "out"))[0] == 0
        assert drawn
        return drawn

    return made


def words(figure: Any) -> list[Any]:
    text = import_module("matplotlib.text").Text
    return [one for one in figure.findobj(text) if one.get_text()]


def assert_legible(figures: dict[str, Any]) -> None:
    """360 pixels show its smallest letters as 9, and no word stands outside of it."""
    for name, one in figures.items():
        sizes = [word.get_fontsize() for word in words(one)]
        assert min(sizes) * 360 / 72 / one.get_figwidth() >= 9, name
        all_of_it = one.get_tightbbox()
        assert min(all_of_it.min) > -0.01, name
        assert all_of_it.x1 < one.get_figwidth() + 0.01, name


@pytest.mark.parametrize(
    "record", ["attention-h200", "host-h200", "ops-gated-delta-rule-h200", "size"]
)
def test_a_picture_is_legible_on_a_phone(
    record: str, figures: Callable[[Path], dict[str, Any]]
) -> None:
    assert_legible(figures(RESULTS / f"{record}.json"))


def test_pictures_say_who_is_approximate(
    tmp_path: Path, figures: Callable[[Path], dict[str, Any]]
) -> None:
    document = result_file.read(RESULTS / "attention-h200.json")
    added = {"xformers", "sageattention"}
    document["rows"] = [row for row in document["rows"] if row["contender"] not in added]
    # What a title says of one direction it says of both.
    forward = [row for row in document["rows"] if row["direction"] == "forward"]
    result_file.write(tmp_path / "exact.json", {**document, "rows": forward})
    of_exact = figures(tmp_path / "exact.json")["best-peer"]
    assert "exact" not in " ".join(word.get_text() for word in words(of_exact))
    of_flash = [row for row in document["rows"] if row["contender"] == "sdpa-flash"]
    document["rows"] += [{**row, "contender": "xformers"} for row in of_flash]
    document["rows"] += [
        {**row, "contender": "sageattention", "tflops": 9000.0}
        for row in of_flash
        if row["direction"] == "forward" and row["head_dim"] < 256
    ]
    result_file.write(tmp_path / "more.json", document)
    drawn = figures(tmp_path / "more.json")
    assert_legible(drawn)
    said = {name: [word.get_text() for word in words(one)] for name, one in drawn.items()}
    assert {"xformers", "Sage (approx.)"} <= {*said["forward"]}
    assert "xformers" in said["backward"]
    assert "Sage (approx.)" not in said["backward"]
    assert {"vs xformers", "vs Sage (approx.)"} <= {*said["each-peer"]}
    assert "every other kernel that is exact" in " ".join(said["best-peer"])
    assert "0.05" not in said["best-peer"]  # of a rate of 9000


@pytest.mark.parametrize(("maps", "rows"), [(0, [0]), (3, [3]), (5, [3, 2]), (6, [3, 3])])
def test_a_row_of_maps_is_legible_on_a_page(maps: int, rows: list[int]) -> None:
    parts = import_module("benchmarks.drawing.heat")._parts([("vs peer", {})] * maps)
    assert [len(part) for part in parts] == rows
