"""Two processes over gloo: torch's context_parallel with flashvar, DTensors, and sharded layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import result_file
from two_ranks import found_by, run_ranks

needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason=f"torch {torch.__version__} shards its own function on CUDA devices alone",
)
needs_slices = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason=f"DTensor of torch {torch.__version__} has no whole slices of a tensor",
)
TESTS = Path(__file__).parents[1]
# Where a part lies after a call of parts that lie over this dimension.
PLACES = {
    "heads": "S(2)",
    "batch": "S(0)",
    "heads bhsd": "S(1)",
    "heads bhsd->bshd": "S(1)",
    "grouped heads": "S(2)",
    "one head of keys": "S(0)",
    "sequence": "R",
    "heads with bias": "S(2)",
    "heads with a bias for all": "S(2)",
    "batch with a bias for all": "S(0)",
    "heads with sinks": "S(2)",
    "heads with sinks of all": "S(2)",
    "batch with sinks": "S(0)",
    "packed": "S(1)",
    "packed queries": "S(1)",
    "dropout": "R",
    "merged, heads": "S(2)",
    "merged, batch": "S(0)",
    "merged, sequence": "S(2)",
    "merged, packed rows": "S(0)",
    "merged, stacked": "S(2)",
    "merged, layouts alike": "S(1)",
    "merged, constants": "S(1)",
    "lse": "S(2)",
    "cache": "S(0)",
}
PLACES_OF_TORCHS = {"torch's function, heads": "S(1)", "torch's function, batch": "S(0)"}

# Where the results of linear attention lie, then the gradients of the inputs.
PLACES_OF_LINEAR = {
    "heads": "S(2) S(1) S(2) S(2) S(2) S(2) S(2) S(0) S(0) S(1)",
    "grouped heads": "S(2) S(1) S(2) S(2) S(2) S(2) S(2) S(0) S(0) S(1)",
    "three heads in groups": "R R R R R R R R R R",
    "batch": "S(0) S(0) S(0) S(0) S(0) S(0) S(0) P(sum) P(sum) S(0)",
    "packed, heads": "S(2) S(1) S(2) S(2) S(2) S(2) S(2) S(0) S(0) S(1)",
    "sequence": "R R R R R R R R R R",
    "no gate": "S(2) S(2) S(2) S(2) S(2)",
    "channels": "S(2) S(1) S(2) S(0) S(0) S(2) S(1)",
    "channels bdt": "S(1) S(1) S(1) S(0) S(0) S(1) S(1)",
    "channels, packed": "S(2) S(1) S(2) S(0) S(0) S(2) S(1)",
    "convolved batch": "S(0) S(0) S(0) P(sum) P(sum) S(0) S(0)",
    "updated heads": "S(2) S(1) S(1) S(1)",
    "updated whole": "R R R R",
}
REFUSALS = {
    "mixture": "DTensors with plain k, v, g, beta: ",
    "shape": r"beta must be \[batch, seqlen, heads of v\], .* found \(4, 6, 2, 8\): ",
    "copied": r"writes states in place, must be placed as .* found \(states S\(0\), .*redistribute",
    "fewer channels than ranks": "state of causal_conv1d_update .* 1 in dimension 1 over 2 ranks",
    "convolution": "all tensors of causal_conv1d must be DTensors, .* with plain weight: ",
    "copied columns": r"writes state in place, must be placed as .* found \(x R, state S\(2\), ",
    "named sequences": "seq_idx must come with plain tensors, found DTensors: pass cu_seqlens",
    "second derivative": "gated_delta_rule has first derivatives only, found a request for the s",
    "parts": r"DTensors with plain outs\[1\], lses\[0\], lses\[1\]: ",
}
REFUSED_LAYERS = {
    "colwise, local": r"weight must be \[dim, width\] with dim 32 for x .* found \(64, 4\): ",
    "colwise, DTensors": "all tensors of causal_conv1d must be DTensors, .* with plain weight: ",
    "colwise, no convolutions": r"q must have 2 heads of 8 channels, found \(2, 5, 8\): .*DTensors",
}


@needs_registry
def test_context_parallel(tmp_path: Path, python_with_models: str) -> None:
    """Activated before it or inside: outputs, gradients and who computed, of every setting."""
    results = tmp_path / "results.json"
    script = TESTS / "gpu" / "context_parallel.py"
    run_ranks(python_with_models, script, "--rehearse", "--results", str(results))
    checked = result_file.read(results)["cases"]
    assert len(checked) == 14
    for case in checked:
        assert case["right"], case
        assert max(case["errors"].values()) < 1e-5, case
        assert case["forwards_of_flashvar"] == case["forwards_expected"] > 0


@pytest.fixture(scope="module")
def sharded(
    python_with_models: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return found_by(python_with_models, "sharded_attention", tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def linear(
    python_with_models: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return found_by(python_with_models, "sharded_linear", tmp_path_factory.mktemp("linear"))


@pytest.fixture(scope="module")
def layers(
    python_with_models: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return found_by(python_with_models, "sharded_layers", tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("case", PLACES)
def test_dtensors(case: str, sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert max(found[case]["errors"]) < 1e-12
        assert found[case]["places"][1] == PLACES[case]


@needs_registry
@pytest.mark.parametrize("case", PLACES_OF_TORCHS)
def test_torchs_function_of_dtensors(case: str, sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert max(found[case]["errors"]) < 1e-12
        assert set(found[case]["places"]) == {PLACES_OF_TORCHS[case]}
        assert found[case]["report"] == {"run by flashvar below torch's dispatcher": 1}


@needs_slices
def test_rotation_of_dtensors_in_place(sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert len(found["rotated"]["errors"]) == 10
        assert max(found["rotated"]["errors"]) < 1e-12


@needs_slices
def test_rotation_of_dtensors_from_offsets(sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert len(found["rotated from offsets"]["errors"]) == 9
        assert max(found["rotated from offsets"]["errors"]) < 1e-12


def test_dtensors_beside_plain_tensors(sharded: list[dict[str, Any]]) -> None:
    words = "all tensors of {} must be DTensors, or none, found DTensors with plain {}: "
    wanted = [words.format("attention", "k, v"), words.format("rotary embeddings", "cos, sin")]
    for found in sharded:
        mixed, copied = found["mixture"][:2], found["mixture"][2:]
        assert [said[: said.index(": ") + 2] for said in mixed] == wanted
        names = [
            said.partition(" must come with plain tensors, found DTensors")[0] for said in copied
        ]
        assert names == ["k", "cache_leftpad", "block_table", "block_table"]


@pytest.mark.parametrize("case", PLACES_OF_LINEAR)
def test_dtensors_of_linear_attention(case: str, linear: list[dict[str, Any]]) -> None:
    for found in linear:
        assert max(found[case]["errors"]) < 1e-12
        assert " ".join(found[case]["places"]) == PLACES_OF_LINEAR[case]


def test_dtensors_of_linear_attention_that_lie_anywhere(linear: list[dict[str, Any]]) -> None:
    for found in linear:
        cases = {name: one for name, one in found.items() if name.startswith("anywhere")}
        assert len(cases) == 16
        for name, one in (*cases.items(), ("two dimensions", found["two dimensions"])):
            assert max(one["errors"]) < 1e-12, name


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_dtensors(case: str, linear: list[dict[str, Any]]) -> None:
    for found in linear:
        assert re.search(REFUSALS[case], found["refusals"][case])


@pytest.mark.parametrize(
    "case",
    ["tensor parallel", "tensor parallel, without gate and convolutions", "fully sharded"],
)
def test_sharded_layers(case: str, layers: list[dict[str, Any]]) -> None:
    for found in layers:
        assert max(found[case]) < 1e-12


@pytest.mark.parametrize("case", REFUSED_LAYERS)
def test_layers_of_which_only_projections_are_sharded(
    case: str, layers: list[dict[str, Any]]
) -> None:
    assert all(re.search(REFUSED_LAYERS[case], found[case]) for found in layers)
