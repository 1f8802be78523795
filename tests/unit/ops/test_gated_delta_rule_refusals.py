"""What gated_delta_rule refuses, in three beats: what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gated_delta_rule_calls import Tensors, made

import flashvar
from flashvar.ops.gated_delta_rule.api import gated_delta_rule

Change = Callable[[Tensors], Tensors]
REFUSALS: dict[str, tuple[Change, type[Exception], str]] = {
    "no tensor": (lambda x: {"q": 3}, flashvar.InvalidInputError, "q must be a torch.Tensor"),
    "no beta": (lambda x: {"beta": None}, flashvar.InvalidInputError, "found NoneType"),
    "a sparse tensor": (lambda x: {"g": x["g"].to_sparse()}, flashvar.LayoutError, "strided"),
    "a switch": (
        lambda x: {"qk_l2norm": 1}, flashvar.InvalidInputError, "qk_l2norm must be True or False"
    ),
    "scale": (lambda x: {"scale": "1"}, flashvar.InvalidInputError, "scale must be a number"),
    "scale of nan": (
        lambda x: {"scale": float("nan")}, flashvar.InvalidInputError, "float32 can hold, found nan"
    ),
    "scale of float64": (
        lambda x: {"scale": 10**40}, flashvar.InvalidInputError, "must be a finite number"
    ),
    "backend": (lambda x: {"backend": "best"}, flashvar.InvalidInputError, "found 'best'"),
    "state_layout": (lambda x: {"state_layout": "kk"}, flashvar.LayoutError, "found 'kk'"),
    "dimensions": (lambda x: {"q": x["q"][0]}, flashvar.ShapeError, "with .unsqueeze(0)"),
    "dtype": (lambda x: {"q": x["q"].int()}, flashvar.DtypeError, "found torch.int32"),
    "dtypes": (lambda x: {"k": x["k"].half()}, flashvar.DtypeError, "one dtype"),
    "k and q": (lambda x: {"k": x["k"][..., 1:]}, flashvar.ShapeError, "q and k must have one"),
    "no head dim": (lambda x: {"v": x["v"][..., :0]}, flashvar.ShapeError, "at least 1"),
    "rows of v": (lambda x: {"v": x["v"][:, 1:]}, flashvar.ShapeError, "batch and seqlen of q"),
    "heads": (
        lambda x: {"q": x["q"].expand(-1, -1, 3, -1), "k": x["k"].expand(-1, -1, 3, -1)},
        flashvar.ShapeError,
        "a multiple of those of q and k, found 2 and 3",
    ),
    "g": (lambda x: {"g": x["g"][..., :1]}, flashvar.ShapeError, "g must be [batch, seqlen"),
    "beta of H": (lambda x: {"beta": x["beta"].mT}, flashvar.ShapeError, "beta must be [batch"),
    "dtype of g": (lambda x: {"g": x["g"].double()}, flashvar.DtypeError, "found torch.float64"),
    "A_log": (
        lambda x: {"A_log": torch.zeros(3)}, flashvar.ShapeError, "A_log must be [heads of v]"
    ),
    "A_log alone": (
        lambda x: {"A_log": torch.zeros(2), "g": None}, flashvar.InvalidInputError, "g must be"
    ),
    "dt_bias alone": (
        lambda x: {"dt_bias": torch.zeros(2)}, flashvar.InvalidInputError, "must come with A_log"
    ),
    "allow_neg_eigval": (
        lambda x: {"allow_neg_eigval": True}, flashvar.InvalidInputError, "with beta_sigmoid=True"
    ),
    "a gate above 0": (
        lambda x: {"g": x["g"] + 2}, flashvar.InvalidInputError, "g must be at most 0"
    ),
    "cu_seqlens with a batch": (
        lambda x: {"cu_seqlens": torch.tensor([0, 5])}, flashvar.ShapeError, "must have batch 1"
    ),
    "initial states": (
        lambda x: {"initial_state": x["initial_state"][:1]},
        flashvar.ShapeError,
        "that is (2, 2, 8, 6), found (1, 2, 8, 6)",
    ),
    "their order": (
        lambda x: {"state_layout": "vk"}, flashvar.ShapeError, "[sequences, heads of v, V, K]"
    ),
    "their dtype": (
        lambda x: {"initial_state": x["initial_state"].bfloat16()}, flashvar.DtypeError, "float32"
    ),
    "another device": (
        lambda x: {"beta": x["beta"].to("meta")}, flashvar.DeviceError, "cpu, found meta"
    ),
    "no pool": (
        lambda x: {"state_indices": torch.tensor([0, 1]), "initial_state": None},
        flashvar.InvalidInputError,
        "initial_state must be given",
    ),
    "a pool of others": (
        lambda x: {
            "state_indices": torch.tensor([0, 1]), "initial_state": x["initial_state"][:, :1]
        },
        flashvar.ShapeError,
        "[pool, 2, 8, 6]",
    ),
    "a pool's dtype": (
        lambda x: {
            "state_indices": torch.tensor([0, 1]), "initial_state": x["initial_state"].half()
        },
        flashvar.DtypeError,
        "found torch.float16",
    ),
    "indices": (
        lambda x: {"state_indices": torch.tensor([0])}, flashvar.ShapeError, "that is (2,)"
    ),
    "indices' dtype": (
        lambda x: {"state_indices": torch.tensor([0.0, 1.0])}, flashvar.DtypeError, "int32"
    ),
    "indices beyond": (
        lambda x: {"state_indices": torch.tensor([0, 2])}, flashvar.ShapeError, "found 2"
    ),
    "indices twice": (
        lambda x: {"state_indices": torch.tensor([1, 1])}, flashvar.InvalidInputError, "1 more"
    ),
    "a pool with a gradient": (
        lambda x: {
            "state_indices": torch.tensor([0, 1]), "q": x["q"].clone().requires_grad_()
        },
        flashvar.InvalidInputError,
        "require no gradient",
    ),
    "no kernels": (
        lambda x: {"backend": "cuda"},
        flashvar.BackendUnavailableError,
        "expected backend 'cuda' to run it, found:\ncuda: no: runs only CUDA tensors",
    ),
    "no device": (
        lambda x: {"backend": "triton"},
        flashvar.BackendUnavailableError,
        "runs only CUDA tensors, found CPU tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(change: Change, kind: type[Exception], words: str) -> None:
    given = made(seqlen=5, dtype=torch.float32)
    with pytest.raises(kind) as found:
        gated_delta_rule(**{**given, **change(given)})
    assert type(found.value) is kind
    message = str(found.value)
    assert words in message
    # What was expected, what was found, what to do.
    assert ", found " in message or ", found:" in message
    assert ": " in message


@pytest.mark.parametrize("offsets", [[0, 3], [1, 5], [0, 4, 2, 5], [0, 6], [-1, 5]], ids=str)
def test_offsets_of_no_sequences(offsets: list[int]) -> None:
    given = made(packed=(5,), dtype=torch.float32, state=False)
    with pytest.raises(flashvar.ShapeError, match="end at the number of rows, 5"):
        gated_delta_rule(**{**given, "cu_seqlens": torch.tensor(offsets)})


@pytest.mark.parametrize("wrong", [torch.tensor([[0, 5]]), torch.tensor(5), torch.tensor([])])
def test_offsets_of_another_kind(wrong: torch.Tensor) -> None:
    given = made(packed=(5,), dtype=torch.float32, state=False)
    with pytest.raises(flashvar.ShapeError, match=r"cu_seqlens must be \[sequences \+ 1\]"):
        gated_delta_rule(**{**given, "cu_seqlens": wrong})
    # Known without a look at the values, which on a GPU nobody takes.
    with pytest.raises(flashvar.ShapeError, match="the 5 rows, found one offset"):
        gated_delta_rule(**{**given, "cu_seqlens": torch.tensor([0])})
    with pytest.raises(flashvar.DtypeError, match="int32 or int64"):
        gated_delta_rule(**{**given, "cu_seqlens": torch.tensor([0.0, 5.0])})
