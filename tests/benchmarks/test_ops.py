"""What `run.py ops` and `host` call of each op, small and on the CPU; the clock is made up."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.report import BenchmarkError, Options

from flashvar.cli.speed import Call, timed_ops
from flashvar.ops.causal_conv1d import speed as convolution
from flashvar.ops.gated_delta_rule import speed as rule
from flashvar.ops.gated_delta_rule import update_speed as update
from flashvar.ops.merge_states import speed as merging

ROOT = Path(__file__).parents[2]
SMALL: dict[Any, Any] = {
    convolution: lambda cell: replace(cell, batch=min(cell.batch, 2), seqlen=6, dim=4, work=192.0),
    rule: lambda cell: replace(cell, heads=(1, 2), batch=1, seqlen=3),
    update: lambda cell: replace(cell, sequences=2, work=192.0),
    merging: lambda cell: replace(cell, seqlen=3, work=192.0),
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark, of small calls of the CPU, each of which takes 2 ms or the copy 1."""
    monkeypatch.syspath_prepend(str(ROOT))
    ops = import_module("benchmarks.ops")
    timing = import_module("benchmarks.timing")

    def measure(calls: dict[str, Call], *, seconds: float) -> object:
        for call in calls.values():
            call()
        spent = {name: timing.Timing(1.0 if name == "copy" else 2.0, 1, 2, 7) for name in calls}
        return timing.Measurement(spent, {"sm_mhz": 1980.0})

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(ops, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(update, "HEAD_DIM", 8)
    monkeypatch.setattr(rule, "HEAD_DIM", 8)
    for module, small in SMALL.items():
        for name in ("CELLS", "MORE_CELLS", "SMALL_CELLS"):
            monkeypatch.setattr(module, name, tuple(map(small, getattr(module, name))))
    monkeypatch.setattr(import_module("flashvar.ops.attention.speed"), "CELLS", ())
    ops._cases.cache_clear()
    yield ops
    ops._cases.cache_clear()


def test_every_cell_has_rates_of_all_who_serve_it(benchmark: ModuleType) -> None:
    report = benchmark.run(Options())
    cells = {
        (name, cell.name)
        for name, op in timed_ops().items()
        for cell in (*op.CELLS, *op.MORE_CELLS)
    }
    found = {(row["op"], row["cell"], row["contender"]): row for row in report.rows}
    assert {(op, cell) for op, cell, _ in found} == cells
    for op, cell in cells:
        ours = found[op, cell, "flashvar"]
        assert "skipped" not in ours, ours["skipped"]
        assert (ours["median_ms"], ours["sm_mhz"]) == (2.0, 1980.0), ours
        assert ours["unit"] in ("TB/s", "TFLOP/s")
        if op == "gated_delta_rule":
            assert found[op, cell, "torch"]["to_contender"] == 1.0
        else:
            assert found[op, cell, "copy"]["to_contender"] == 0.5
    for peer in ("fla", "flash-qla", "causal-conv1d"):
        assert any(name == peer and "skipped" in row for (_, _, name), row in found.items()), peer


def test_a_process_makes_the_cases_once(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(benchmark, "timed_ops", lambda: made.append(1) or timed_ops())
    benchmark.run(Options(only=("gated_delta_rule_update:*",), contenders=("flashvar",)))
    assert len(made) == 1


def test_other_processes_can_have_the_work(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, str]] = []

    def fill(tasks: list[tuple[str, str]], processes: int, do: Any) -> None:
        assert processes == 3
        assert not sent
        pickle.loads(pickle.dumps(do))(tasks[:2])
        sent.extend(tasks)

    monkeypatch.setattr(benchmark.worker_pool, "fill", fill)
    only = ("gated_delta_rule_update:*fp32",)
    rows = benchmark.run(Options(only=only, processes=3)).rows
    assert {(f"{row['op']}: {row['cell']}", row["contender"]) for row in rows} == set(sent)
    assert len(sent) == len(rows)
    # The cells of one contender are neighbors, so each process gets its share of them.
    assert [contender for _, contender in sent] == sorted(
        (contender for _, contender in sent), key=[one for _, one in sent].index
    )


def test_the_chosen_are_measured(benchmark: ModuleType) -> None:
    options = Options(only=("gated_delta_rule_update:*bf16",), contenders=("flashvar", "copy"))
    rows = benchmark.run(options).rows
    assert {row["contender"] for row in rows} == {"flashvar", "copy"}
    assert {row["op"] for row in rows} == {"gated_delta_rule_update"}
    assert len(rows) == 6
    with pytest.raises(BenchmarkError, match=r"--contender must name one of flashvar, .*'nobody'"):
        benchmark.run(Options(contenders=("nobody",)))


def test_host_times_a_small_call_of_every_other_op(benchmark: ModuleType) -> None:
    host = import_module("benchmarks.host")
    found = host._other_ops(torch.device("cpu"))
    for name, op in timed_ops().items():
        for cell in op.SMALL_CELLS:
            found[f"op, {cell.name}"].call()
        assert op.SMALL_CELLS or name == "attention", name
