"""What benchmarks compute from times: operations, ratios, geometric means, tables."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flashvar.cli import timing

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


def test_models_are_named_cells() -> None:
    cells = {cell.name: cell for cell in import_module("benchmarks.cases").models()}
    assert cells["llama-3-8b-backward"].heads_kv == 8
    assert cells["bert-base-forward"].heads_kv == cells["bert-base-forward"].heads == 12


def test_random_calls_are_the_same_in_every_run() -> None:
    cases = import_module("benchmarks.cases")
    cells = cases.random_calls()
    assert cells == cases.random_calls()
    assert len({cell.name for cell in cells}) == len(cells)
    forwards = [cell for cell in cells if cell.direction == "forward"]
    assert len(forwards) == 120
    kinds = {cell.name.partition("-")[0] for cell in cells}
    assert kinds == {"self", "causal", "cross", "prompt", "decode"}
    trained = {cell.name.partition("-")[0] for cell in cells if cell.direction == "backward"}
    assert trained == {"self", "causal", "cross"}
    for cell in cells:
        assert cell.heads % cell.heads_kv == 0
        assert cell.batch * cell.keys * cell.heads_kv * cell.head_dim <= 5e8
        assert cell.causal == cell.name.startswith("causal-")
        assert not cell.causal or cell.keys == cell.seqlen  # masks of peers agree on these alone


def test_forms_differ_in_their_form_alone() -> None:
    for name, pair in import_module("benchmarks.cases").shapes():
        special, plain = pair.values()
        if "gqa" in pair:
            assert special.operations == plain.operations, name
            assert special.heads_kv * 8 == plain.heads_kv, name
        elif "packed" in pair:
            assert special.operations <= plain.operations, name
            assert len(special.lengths) == plain.batch, name
        elif "without" in pair:
            assert replace(special, feature=None) == plain, name
            assert special.feature in pair
            assert special.feature in import_module("benchmarks.contender").FEATURES
        else:
            assert special.head_dim < plain.head_dim, name
            assert special.operations == pytest.approx(plain.operations, rel=0.1), name


@pytest.mark.parametrize(
    ("milliseconds", "rounds"),
    [
        ([10.0, 10.0, 10.0], [25, 25, 25]),
        ([10.0, 10.0, 100.0], [25, 25, 25]),
        ([1000.0, 10.0, 10.0], [7, 25, 25]),
        ([0.1, 0.1], [60, 60]),
        ([500.0], [7]),
    ],
    ids=["even", "one is slow", "one is very slow", "short", "long"],
)
def test_the_middling_contender_decides_the_rounds(
    milliseconds: list[float], rounds: list[int]
) -> None:
    assert timing.rounds_for(milliseconds, seconds=0.25) == rounds


def test_who_takes_part_in_few_rounds_does_so_from_the_first_to_the_last() -> None:
    assert "".join(timing.turns({"a": 4, "b": 4, "c": 2})) == "abbcaababc"
    called = list(timing.turns({"fast": 60, "slow": 7}))
    places = [index for index, name in enumerate(called) if name == "slow"]
    apart = [after - before for before, after in pairwise(places)]
    assert (len(called), len(places)) == (67, 7)
    assert max(places[0], *apart, len(called) - places[-1]) <= 11


@pytest.mark.parametrize(
    ("host", "write", "writes"),
    [(0.0, 0.04, 1), (0.03, 0.04, 2), (0.2, 0.04, 6), (5000.0, 0.04, 256), (0.1, 0.0, 101)],
)
def test_the_device_is_busy_while_the_host_enqueues(host: float, write: float, writes: int) -> None:
    assert timing.writes_for(host, write) == writes


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


def test_a_matrix_product_is_the_last_to_be_compared_with() -> None:
    rows = rates("forward", flashvar_cuda=[200.0, 50.0], sdpa_flash=[100.0, 50.0])
    rows[0]["product_tflops"] = 800.0
    last = import_module("benchmarks.ratios").summary(rows)[-1]
    assert last == ("flashvar-cuda / matrix product", "0.250", "0.250", "c0", "1")


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


def test_who_is_approximate_is_no_peer_and_marked() -> None:
    ratios = import_module("benchmarks.ratios")
    found = ratios.to_peers({"sageattention": 400.0, "xformers": 200.0, "flashvar-cuda": 100.0})
    assert found["flashvar-cuda"]["to_best"] == found["sageattention"]["to_best"] / 4 == 0.5
    rows = rates("forward", sageattention=[400.0], xformers=[200.0], flashvar_cuda=[100.0])
    rows[2]["to_best"] = 0.5
    assert ratios.to_best_peers(rows)[1] == ("c0", "xformers", "200", "0.500")
    assert [line[:2] for line in ratios.summary(rows)[1:]] == [
        ("forward flashvar-cuda / sageattention (approximate)", "0.250"),
        ("forward flashvar-cuda / xformers", "0.500"),
    ]


def test_how_far_who_is_approximate_is_from_the_reference() -> None:
    ratios = import_module("benchmarks.ratios")
    rows = rates("forward", xformers=[1.0, 1.0], sageattention=[2.0, 2.0])
    assert ratios.differences(rows) == []
    for one, difference in zip(rows, (0.0, 0.001, 0.02, 0.03), strict=True):
        one["difference_to_reference"] = difference
    assert ratios.differences(rows)[1:] == [
        ("sageattention (approximate)", "0.0200", "0.0300", "2")
    ]
    assert ratios.differences(rows[:2]) == []


def test_a_closing_table_stands_below() -> None:
    closing = [[("mean", "2"), ("lowest one", "3")], [], [("last", "4")]]
    report = import_module("benchmarks.report").Report([], ("a", "b"), [("x", "1")], closing)
    assert report.table().splitlines() == ["a  b", "x  1"]
    below = ["mean        2", "lowest one  3", "", "last  4"]
    assert report.last_tables().splitlines() == below


def test_the_table_of_best_peers_ends_with_the_means() -> None:
    rows = [
        {"cell": cell, "direction": direction, "contender": who, "tflops": rate, "to_best": r}
        for direction, cell, who, rate, r in (
            ("forward", "a-forward", "sdpa-cudnn", 90.0, 0.9),
            ("forward", "a-forward", "flash-attn-4", 100.0, 1.0),
            ("forward", "a-forward", "flashvar-cuda", 200.0, 2.0),
            ("forward", "b-forward", "flashvar-cuda", 50.0, 0.5),
            ("forward", "b-forward", "sdpa-cudnn", 100.0, 1.0),
            ("backward", "a-backward", "sdpa-cudnn", 80.0, 1.0),
            ("backward", "a-backward", "flashvar-cuda", 120.0, 1.5),
            ("backward", "a-backward", "flashvar-sm80", 40.0, 0.5),
        )
    ]
    rows.append({"cell": "a-forward", "contender": "flex", "direction": "forward", "skipped": "no"})
    table = import_module("benchmarks.ratios").to_best_peers(rows)
    assert table[0][1:] == ("peer", "TFLOP/s", "flashvar-cuda", "flashvar-sm80")
    assert table[1:] == [
        ("a-forward", "flash-attn-4", "100", "2.000", "-"),
        ("b-forward", "sdpa-cudnn", "100", "0.500", "-"),
        ("a-backward", "sdpa-cudnn", "80", "1.500", "0.500"),
        ("geometric mean, forward", "", "", "1.000", "-"),
        ("geometric mean, backward", "", "", "1.500", "0.500"),
    ]
