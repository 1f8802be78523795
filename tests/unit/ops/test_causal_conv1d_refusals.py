"""What causal_conv1d refuses, in three beats: what was expected, what was found, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashvar
from flashvar.ops.causal_conv1d.api import causal_conv1d

PACKED = {"x": torch.randn(1, 9, 5), "cu_seqlens": torch.tensor([0, 4, 9])}
REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"x": [1.0]}, flashvar.InvalidInputError, "x must be a torch.Tensor, found list"),
    "no weight": ({"weight": None}, flashvar.InvalidInputError, "weight must be a torch.Tensor"),
    "sparse": ({"x": torch.randn(2, 9, 5).to_sparse()}, flashvar.LayoutError, "sparse_coo"),
    "rank": ({"x": torch.randn(9, 5)}, flashvar.ShapeError, "[batch, seqlen, dim], or packed"),
    "four dimensions": ({"x": torch.randn(1, 2, 9, 5)}, flashvar.ShapeError, "found (1, 2, 9, 5)"),
    "other layout": ({"layout": "bdt"}, flashvar.ShapeError, "check that layout='bdt'"),
    "no layout": ({"layout": "tbd"}, flashvar.LayoutError, "found 'tbd': name the order"),
    "conv1d's weight": (
        {"weight": torch.randn(5, 1, 4)}, flashvar.ShapeError, "found (5, 1, 4): squeeze"
    ),
    "and its state": (
        {"weight": torch.randn(5, 1, 4), "return_final_state": True}, flashvar.ShapeError,
        "found (5, 1, 4): squeeze",
    ),
    "state of no dimensions": (
        {"initial_state": torch.tensor(1.0), "return_final_state": True}, flashvar.ShapeError,
        "or more columns], one for each sequence",
    ),
    "width 1": ({"weight": torch.randn(5, 1)}, flashvar.ShapeError, "at least 2, found 1"),
    "bias": ({"bias": torch.randn(4)}, flashvar.ShapeError, "that is (5,), found (4,)"),
    "residual": ({"residual": torch.randn(2, 9, 1)}, flashvar.ShapeError, "(2, 9, 1): expand"),
    "states": ({"initial_state": torch.randn(3, 5, 3)}, flashvar.ShapeError, "found (3, 5, 3)"),
    "turned": ({"initial_state": torch.randn(2, 3, 5)}, flashvar.ShapeError, "transpose it"),
    "columns": ({"initial_state": torch.randn(2, 5, 2)}, flashvar.ShapeError, "3 or more columns"),
    "states of packed": (
        {**PACKED, "initial_state": torch.randn(1, 5, 3)}, flashvar.ShapeError, "must be [2, 5, 3"
    ),
    "packed batch": (
        {**PACKED, "x": torch.randn(2, 9, 5)}, flashvar.ShapeError, "batch 1 with cu_seqlens"
    ),
    "cu_seqlens' rank": (
        {**PACKED, "cu_seqlens": torch.tensor([[0, 9]])}, flashvar.ShapeError, "found (1, 2)"
    ),
    "one offset": (
        {**PACKED, "cu_seqlens": torch.tensor([0])}, flashvar.ShapeError, "the 9 rows, found one"
    ),
    "no cu_seqlens": (
        {**PACKED, "cu_seqlens": torch.tensor([], dtype=torch.int32)}, flashvar.ShapeError, "(0,)"
    ),
    "their dtype": (
        {**PACKED, "cu_seqlens": torch.tensor([0.0, 9.0])}, flashvar.DtypeError, "int32 or int64"
    ),
    "not from 0": (
        {**PACKED, "cu_seqlens": torch.tensor([1, 9])}, flashvar.ShapeError, "found [1, 9]: pass 0"
    ),
    "not to the end": (
        {**PACKED, "cu_seqlens": torch.tensor([0, 8])}, flashvar.ShapeError, "rows, 9, found"
    ),
    "down": (
        {**PACKED, "cu_seqlens": torch.tensor([0, 5, 4, 9])}, flashvar.ShapeError, "[0, 5, 4, 9]"
    ),
    "integers": ({"x": torch.ones(2, 9, 5).int()}, flashvar.DtypeError, "found torch.int32: cast"),
    "float64 beside": (
        {"bias": torch.randn(5).double()}, flashvar.DtypeError, "with torch.float32 x"
    ),
    "devices": ({"bias": torch.randn(5, device="meta")}, flashvar.DeviceError, "cpu, found meta"),
    "activation": ({"activation": "gelu"}, flashvar.InvalidInputError, "found 'gelu': apply"),
    "no string": ({"activation": True}, flashvar.InvalidInputError, "found True: apply"),
    "return_final_state": (
        {"return_final_state": 4}, flashvar.InvalidInputError, "found 4: pass one of them"
    ),
    "state_len alone": ({"state_len": 4}, flashvar.InvalidInputError, "found 4 without it"),
    "short state_len": (
        {"state_len": 2, "return_final_state": True}, flashvar.ShapeError, "at least width - 1"
    ),
    "two state_lens": (
        {"state_len": 4, "return_final_state": True, "initial_state": torch.randn(2, 5, 3)},
        flashvar.ShapeError, "columns of initial_state, 3, found 4",
    ),
    "backend": ({"backend": "cudnn"}, flashvar.InvalidInputError, "found 'cudnn': leave it out"),
    "no binary": (
        {"backend": "cuda"}, flashvar.BackendUnavailableError, "causal_conv1d_fwd fp32 on CPU"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(changed: dict[str, Any], kind: type[Exception], words: str) -> None:
    given = {"x": torch.randn(2, 9, 5), "weight": torch.randn(5, 4)}
    with pytest.raises(kind) as caught:
        causal_conv1d(**(given | changed))
    assert words in str(caught.value)


def test_a_mapped_cu_seqlens_is_refused() -> None:
    ends = torch.tensor([[0, 4, 9], [0, 2, 9]])
    with pytest.raises(flashvar.InvalidInputError, match="pack all sequences into one x"):
        torch.vmap(
            lambda one: causal_conv1d(PACKED["x"], torch.randn(5, 4), cu_seqlens=one),
            randomness="same",
        )(ends)
