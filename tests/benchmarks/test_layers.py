"""What `run.py layers` writes of whole layers, small and on the CPU; the clock is made up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks.report import BenchmarkError, Options

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, of two heads on the CPU, each layer of which takes 2 ms or SDPA's 1."""
    monkeypatch.syspath_prepend(str(ROOT))
    layers, cases = import_module("benchmarks.layers"), import_module("benchmarks.cases")
    timing = import_module("benchmarks.timing")

    def small(cell: object) -> object:
        return replace(cell, batch=1, seqlen=5, hidden=16, head_dim=8, warm_up=2)  # type: ignore

    known = cases.layers()
    monkeypatch.setattr(cases, "layers", lambda: [small(known[0]), small(known[1])])

    def measure(calls: dict[str, object], *, seconds: float) -> object:
        spent = {name: timing.Timing(1.0 if name == "sdpa" else 2.0, 1, 2, 7) for name in calls}
        return timing.Measurement(spent, {"sm_mhz": 1980.0})

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(layers, "current_device", lambda: torch.device("cpu"))
    return layers


def test_every_layer_of_a_cell_is_called(benchmark: ModuleType) -> None:
    report = benchmark.run(Options())
    found = {(row["direction"], row["contender"]): row for row in report.rows}
    assert {direction for direction, _ in found} == {"forward", "step"}
    for direction in ("forward", "step"):
        for contender in ("gated-delta-net", "attention", "sdpa"):
            row = found[direction, contender]
            assert "skipped" not in row, row["skipped"]
            assert row["tokens_per_s"] == (5000.0 if contender == "sdpa" else 2500.0)
            assert row["to_contender"] == (0.5 if contender == "sdpa" else 1.0)
            assert (row["warm_up"], row["sm_mhz"]) == (2, 1980.0)
        assert "ModuleNotFoundError" in found[direction, "fla-gated-delta-net"]["skipped"]


def test_calls_before_the_clock(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[torch.Tensor] = []
    # Layers that draw different numbers of parameters.
    made = {name: partial(_Recorded, inputs, size) for name, size in (("sdpa", 3), ("other", 7))}
    monkeypatch.setattr(benchmark, "CONTENDERS", made)
    benchmark.run(Options(only=("forward",)))
    assert [tuple(x.shape) for x in inputs] == [(1, 5, 16)] * 4
    assert all(torch.equal(x, inputs[0]) for x in inputs)


class _Recorded(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: list[torch.Tensor], size: int, cell: object) -> None:
        super().__init__()
        self.inputs = inputs
        self.parameters_of_its_own = torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x.clone())
        return x


def test_the_layers_of_a_cell_have_one_size(benchmark: ModuleType) -> None:
    cell = next(iter(import_module("benchmarks.cases").layers()))
    x = torch.randn(cell.batch, cell.seqlen, cell.hidden)
    for name in ("gated-delta-net", "attention", "sdpa"):
        layer = benchmark.CONTENDERS[name](cell)
        assert layer(x).shape == x.shape, name
    alike = [benchmark.CONTENDERS[name](cell) for name in ("attention", "sdpa")]
    alike[1].load_state_dict(alike[0].state_dict())
    assert torch.allclose(alike[0](x), alike[1](x), atol=1e-5)


def test_cells_by_head_dim_and_hidden_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    cells = import_module("benchmarks.cases").layers()
    assert len({cell.name for cell in cells}) == len(cells)
    assert {(32, 1024), (128, 1024)} <= {(cell.head_dim, cell.hidden) for cell in cells}
    assert all(cell.hidden % cell.head_dim == 0 for cell in cells)
    assert len({cell.batch * cell.seqlen for cell in cells}) == 1


def test_an_unknown_layer(benchmark: ModuleType) -> None:
    with pytest.raises(BenchmarkError, match=r"--contender must name one of gated-delta-net, "):
        benchmark.run(Options(contenders=("nobody",)))
