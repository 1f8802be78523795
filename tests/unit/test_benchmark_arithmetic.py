"""What benchmarks compute from times: operations, ratios, geometric means, tables."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert "benchmarks" not in sys.modules or hasattr(sys.modules["benchmarks"], "__path__")


def make_cell(**changes: Any) -> Any:
    common = {"name": "x", "direction": "forward", "dtype": "bf16", "batch": 2, "seqlen": 10}
    sizes = {"heads": 3, "heads_kv": 1, "head_dim": 8, "causal": False}
    return import_module("benchmarks.cases").Cell(**{**common, **sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "operations"),
    [
        ({}, 4 * 2 * 3 * 10 * 10 * 8),
        ({"causal": True}, 2 * 2 * 3 * 10 * 10 * 8),
        ({"direction": "backward"}, 10 * 2 * 3 * 10 * 10 * 8),
        ({"heads_kv": 3}, 4 * 2 * 3 * 10 * 10 * 8),
        ({"lengths": (10, 6)}, 4 * 3 * (100 + 36) * 8),
    ],
    ids=["full", "causal", "backward", "as-many-key-heads", "packed"],
)
def test_operations(changes: dict[str, Any], operations: int) -> None:
    assert make_cell(**changes).operations == operations


def test_cells_are_eighteen_in_both_directions() -> None:
    cells = import_module("benchmarks.cases").attention()
    assert len({cell.name for cell in cells}) == len(cells) == 36
    assert {cell.batch * cell.seqlen for cell in cells} == {16384}
    assert {cell.heads * cell.head_dim for cell in cells} == {2048}


def test_forms_differ_in_their_form_alone() -> None:
    for name, pair in import_module("benchmarks.cases").forms():
        special, plain = pair.values()
        if "gqa" in pair:
            assert special.operations == plain.operations, name
            assert special.heads_kv * 8 == plain.heads_kv, name
        else:
            assert special.operations <= plain.operations, name
            assert len(special.lengths) == plain.batch, name


def rates(direction: str, **tflops: list[float]) -> list[dict[str, Any]]:
    return [
        {"cell": f"c{i}", "direction": direction, "contender": name.replace("_", "-"), "tflops": r}
        for name, found in tflops.items()
        for i, r in enumerate(found)
    ]


def test_the_summary_has_means_and_the_lowest_cell() -> None:
    rows = rates("forward", sdpa_flash=[100.0, 100.0, 100.0], flashvar_cuda=[200.0, 50.0, 100.0])
    rows += rates("backward", sdpa_flash=[100.0], flashvar_cuda=[110.0])
    rows.append({"cell": "c0", "direction": "forward", "contender": "flex", "skipped": "no"})
    assert import_module("benchmarks.ratios").summary(rows)[1:] == [
        ("forward flashvar-cuda / sdpa-flash", "1.000", "0.500", "c1", "3"),
        ("backward flashvar-cuda / sdpa-flash", "1.100", "1.100", "c0", "1"),
    ]


def test_only_cells_that_both_ran_are_compared() -> None:
    rows = rates("forward", sdpa_flash=[100.0], flashvar_cuda=[200.0, 50.0])
    found = import_module("benchmarks.ratios").by_cell(
        rows, "forward", "flashvar-cuda", "sdpa-flash"
    )
    assert found == {"c0": 2.0}


def test_the_best_peer_is_none_of_ours() -> None:
    found = import_module("benchmarks.ratios").to_peers(
        {"sdpa-flash": 100.0, "sdpa-cudnn": 200.0, "flashvar-triton": 400.0, "flashvar-cuda": 100.0}
    )
    assert found["flashvar-cuda"] == {"to_reference": 1.0, "to_best": 0.5}


def test_a_closing_table_stands_below() -> None:
    report = import_module("benchmarks.report")
    table = report.Report(
        [], ("a", "b"), [("x", "1")], [("mean", "2"), ("lowest one", "3")]
    ).table()
    assert table.splitlines() == ["a  b", "x  1", "", "mean        2", "lowest one  3"]
