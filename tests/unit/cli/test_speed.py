"""`doctor --bench`: the record, what is timed, how both are shown; no GPU, times are made up."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from benchmarks import cases, recorded, result_file
from benchmarks import timing as benchmarks_timing

from flashvar.cli import bench, diagnosis, doctor_page, main, page_text, speed, timing
from flashvar.cli.diagnosis import Report, examine
from flashvar.cli.speed import RECORDED, Cell, Result, Speed
from flashvar.ops.attention import speed as cells
from flashvar.ops.attention.speed import CELLS
from flashvar.selection.request import Overrides
from flashvar.selection.rules import select

H200 = fakes.system(fakes.H200)


def report(machine: Any = H200) -> Report:
    return examine(machine, fakes.inventory("90a"), Overrides())


def shown(measured: Speed) -> list[str]:
    text = page_text.render(doctor_page.page(replace(report(), speed=measured)))
    return text.partition("\nSpeed of causal attention, TFLOP/s\n")[2].splitlines()


def test_the_record_is_what_the_benchmarks_found() -> None:
    """If not: `python -m benchmarks.recorded` writes it anew."""
    derived = recorded.derive(sorted(recorded.RESULTS.glob("*.json")))
    assert json.loads(RECORDED.read_text(encoding="utf-8")) == derived
    assert set(derived["gpus"]["NVIDIA H200"]["cells"]["attention"]) == {
        cell.name for cell in CELLS
    }


def test_the_newest_run_of_a_gpu_counts_and_a_forced_one_never(tmp_path: Path) -> None:
    run = result_file.read(recorded.RESULTS / "attention-h200.json")
    for name, time, settings in (
        ("a", "2030-01-01", {}),
        ("b", "2020-01-01", {}),
        ("c", "2040-01-01", {"FLASHVAR_FORCE_ARCH": "sm_80"}),
    ):
        changed = {**run, "environment": {**run["environment"], "time": time, "settings": settings}}
        result_file.write(tmp_path / f"{name}.json", changed)
    found = recorded.derive(sorted(tmp_path.glob("*.json")))
    assert found["gpus"]["NVIDIA H200"]["time"] == "2030-01-01"


def test_cells_are_those_of_the_benchmarks() -> None:
    theirs = {(one.direction, one.head_dim): one for one in cases.attention()
              if one.causal and one.seqlen == cells.SEQLEN}  # fmt: skip
    for cell in CELLS:
        one = theirs[cell.direction, cell.head_dim]
        assert (one.batch, one.heads, one.dtype) == (cell.batch, cell.heads, cells.DTYPE)
        assert one.operations == cell.work


def test_every_timed_call_can_be_selected() -> None:
    for name, op in speed.timed_ops().items():
        for cell in (*op.CELLS, *op.MORE_CELLS):
            found = select(cell.request(0), H200, fakes.inventory("90a"), Overrides())
            assert found.chosen is not None, f"{name}: {cell.name}"


def test_no_record_for_an_unknown_gpu() -> None:
    assert speed.record_of("NVIDIA A10") is None


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention alone, of small tensors of the CPU where the device's would be."""
    monkeypatch.setattr(bench, "timed_ops", lambda: {"attention": cells})
    monkeypatch.setattr(cells, "TOKENS", 32)
    monkeypatch.setattr(cells, "SEQLEN", 16)
    monkeypatch.setattr(cells, "WIDTH", 128)
    monkeypatch.setattr(torch.cuda, "device", lambda number: contextlib.nullcontext())
    real, cpu = bench._calls, torch.device("cpu")
    monkeypatch.setattr(
        bench, "_calls", lambda op, cell, candidate, device: real(op, cell, candidate, cpu)
    )


@pytest.mark.usefixtures("on_the_cpu")
def test_every_cell_is_timed_for_all_who_serve_it() -> None:
    budgets = []

    def timer(calls: dict[str, bench.Call], seconds: float) -> dict[str, float]:
        budgets.append(seconds)
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 2.0)

    found = bench.check(report(), 0, quiet=True, timer=timer)
    assert sum(budgets) == pytest.approx(speed.SECONDS)
    assert [one.cell for one in found.results] == list(CELLS)
    for one in found.results:
        assert one.candidate == "cuda sm_90"
        assert one.rates["flashvar"] == one.rates["sdpa-flash"] == one.cell.work / 2e9
        assert "sdpa-cudnn" in one.failures  # the CPU has none
    assert found.record is not None


@pytest.mark.usefixtures("on_the_cpu")
def test_calls_are_timed_as_the_benchmarks_time_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []

    def measure(calls: dict[str, bench.Call], *, seconds: float) -> dict[str, timing.Timing]:
        spent.append(seconds * len(calls))
        return {name: timing.Timing(2.0, 1.0, 9.0, 7) for name in calls}

    assert benchmarks_timing.timing.measure is bench.measure
    monkeypatch.setattr(bench, "measure", measure)
    found = bench.check(report(), 0, quiet=True)
    assert sum(spent) == pytest.approx(speed.SECONDS)
    assert {one.rates["flashvar"] * 2e9 for one in found.results} == {one.work for one in CELLS}


@pytest.mark.usefixtures("on_the_cpu")
def test_the_reference_is_not_timed() -> None:
    named = examine(H200, fakes.inventory("90a"), Overrides("reference"))
    found = bench.check(named, 0, quiet=True, timer=lambda calls, _: dict.fromkeys(calls, 1.0))
    assert [one.failures["flashvar"] for one in found.results] == ["reference runs it"] * 4


def test_no_such_device() -> None:
    found = bench.check(report(), 2, quiet=True)
    assert (found.why, found.results) == ("torch sees no cuda:2", ())


def result(cell: Cell, ours: float) -> Result:
    rates = {"flashvar": ours, "sdpa-flash": 250.0}
    return Result("attention", cell, "cuda sm_90", rates, {"sdpa-cudnn": "No available kernel."})


def test_rates_stand_beside_the_record() -> None:
    record = speed.record_of("NVIDIA H200")
    assert record is not None
    results = tuple(
        result(cell, record.cells["attention"][cell.name]["flashvar"]) for cell in CELLS
    )
    heading, first, *_ = lines = shown(Speed(0, "NVIDIA H200", results, record))
    assert " ".join(heading.split()) == ("flashvar recorded SDPA flash SDPA cuDNN runs with")
    rate = f"{record.cells['attention'][CELLS[0].name]['flashvar']:.0f}"
    assert " ".join(first.split()) == f"forward, head dim 64 {rate} {rate} (100%) 250 - cuda sm_90"
    assert "  Recorded on NVIDIA H200 on 2026-" in "\n".join(lines)
    assert "  SDPA cuDNN: No available kernel." in lines
    assert not any("Slower than recorded" in line for line in lines)


def test_a_record_is_of_an_op() -> None:
    """A cell of the same name of another op has no record, and its page says so."""
    record = speed.record_of("NVIDIA H200")
    other = replace(result(CELLS[0], 100.0), op="merge_states")
    measured = Speed(0, "NVIDIA H200", (other,), record)
    assert measured.recorded(other) == {}
    assert measured.ratio(other) is None
    page = doctor_page.page(replace(report(), speed=measured))
    text = page_text.render(page).partition("\nSpeed of merge_states, TB/s\n")[2]
    assert "Nothing is recorded for NVIDIA H200." in text


def test_a_cell_that_doctor_does_not_ask_about_has_a_candidate() -> None:
    cell = replace(CELLS[0], axes=((96, 96),))
    bare = examine(H200, fakes.inventory(), Overrides())
    assert cell.request(0) not in [one.request for one in bare.decisions]
    assert bench._candidate(bare, 0, cell) == "triton"
    assert bench._candidate(report(), 0, cell) == "cuda sm_90"


def test_a_slow_card_is_told_so() -> None:
    record = speed.record_of("NVIDIA H200")
    assert record is not None
    results = tuple(result(cell, 100.0) for cell in CELLS)
    assert any("Slower" in line for line in shown(Speed(0, "NVIDIA H200", results, record)))


def test_nothing_recorded_is_said() -> None:
    results = (result(CELLS[0], 100.0),)
    assert "  Nothing is recorded for NVIDIA A10." in shown(Speed(0, "NVIDIA A10", results))


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_without_a_gpu_the_command_says_so(
    form: list[str],
    fresh_registry: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(diagnosis, "gather", lambda: fakes.system())
    assert main(["doctor", "--bench", *form]) == 1
    assert "torch sees no cuda:0" in capsys.readouterr().out


def test_a_healthy_machine_without_the_device_fails_too(
    fresh_registry: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "gather", lambda: H200)
    assert main(["doctor", "--bench", "--device", "5"]) == 1
    assert "not measured: torch sees no cuda:5" in capsys.readouterr().out
