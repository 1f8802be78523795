"""Bad options and bad tensors beside q, k and v end in words: expected, found, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashvar
from flashvar.errors import DeviceError, DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.attention import plan as attention_plan
from flashvar.ops.attention import run
from flashvar.ops.attention.problem import Inputs, Options, pack_tensors
from flashvar.ops.attention.validate import inspect
from flashvar.ops.plans import Plans

Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
PACKED = torch.randn(9, 2, 8)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "window of one side": (
        {"window_size": (3,)},
        r"\(left, right\), each.*found \(3,\)",
    ),
    "window is no pair": ({"window_size": 3}, r"two integers \(left, right\), each.*found 3: pass"),
    "window below -1": ({"window_size": (-2, 0)}, r"-1 \(unbounded\) or more, found \(-2, 0\)"),
    "window of floats": ({"window_size": (1.0, 0)}, r"two integers.*found \(1\.0, 0\)"),
    "softcap negative": ({"softcap": -1.0}, r"softcap must be a finite number.*found -1\.0"),
    "softcap nan": ({"softcap": float("nan")}, "softcap must be a finite number.*found nan"),
    "softcap is a word": ({"softcap": "1"}, "softcap must be a finite number.*found '1'"),
    "dropout of all": ({"dropout_p": 1.0}, r"a number from 0 to below 1 .*found 1\.0"),
    "dropout negative": ({"dropout_p": -0.1}, r"a number from 0 to below 1 .*found -0\.1"),
    "deterministic is a number": ({"deterministic": 1}, "deterministic must be True or False"),
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        flashvar.attention(Q, K, K, **options)


BAD_TENSORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "bias dtype": ({"bias": torch.zeros(1, 1, 5, 7).half()}, DtypeError, "dtype of q or float32"),
    "bias is a mask": (
        {"bias": torch.ones(1, 1, 5, 7, dtype=torch.bool)},
        DtypeError,
        "-inf where the mask is False",
    ),
    "bias rank": (
        {"bias": torch.zeros(5, 7)},
        ShapeError,
        r"bias must have shape .*found \(5, 7\)",
    ),
    "bias heads": (
        {"bias": torch.zeros(1, 2, 5, 7)},
        ShapeError,
        r"\[2 \(or 1\), 4 \(or 1\), 5, 7\], found \(1, 2, 5, 7\)",
    ),
    "bias of one query": ({"bias": torch.zeros(1, 1, 1, 7)}, ShapeError, r"expand\(\) the query"),
    "bias keys strided": (
        {"bias": torch.zeros(1, 1, 5, 14)[..., ::2]},
        LayoutError,
        "contiguous in the keys",
    ),
    "bias is a list": (
        {"bias": [0.0]},
        InvalidInputError,
        "bias must be a torch.Tensor, found list",
    ),
    "bias elsewhere": (
        {"bias": torch.zeros(1, 1, 5, 7, device="meta")},
        DeviceError,
        "bias must be on the device of q",
    ),
    "sinks dtype": ({"sinks": torch.zeros(4).double()}, DtypeError, "float32, bfloat16 or float16"),
    "sinks shape": ({"sinks": torch.zeros(2)}, ShapeError, r"shape \(4,\), found \(2,\)"),
    "sinks strided": ({"sinks": torch.zeros(8)[::2]}, LayoutError, "sinks must be contiguous"),
    "sinks elsewhere": (
        {"sinks": torch.zeros(4, device="meta")},
        DeviceError,
        "sinks must be on the device of q",
    ),
    "sinks are numbers": (
        {"sinks": [0.0] * 4},
        InvalidInputError,
        "sinks must be a torch.Tensor, found list",
    ),
    "slopes dtype": ({"alibi_slopes": torch.zeros(4).half()}, DtypeError, "must be torch.float32"),
    "slopes shape": (
        {"alibi_slopes": torch.zeros(2)},
        ShapeError,
        r"shape \(4,\) or \(2, 4\), found \(2,\)",
    ),
    "slopes strided": (
        {"alibi_slopes": torch.zeros(8)[::2]},
        LayoutError,
        "contiguous in the heads",
    ),
    "slopes with a gradient": (
        {"alibi_slopes": torch.zeros(4, requires_grad=True)},
        InvalidInputError,
        r"alibi_slopes must not require a gradient.*detach\(\)",
    ),
    "state dtype": (
        {"dropout_p": 0.5, "rng_state": torch.zeros(2)},
        DtypeError,
        "rng_state must be torch.int64",
    ),
    "state shape": (
        {"dropout_p": 0.5, "rng_state": torch.zeros(3, dtype=torch.int64)},
        ShapeError,
        r"two contiguous numbers, found shape \(3,\)",
    ),
}


@pytest.mark.parametrize(("options", "error", "words"), BAD_TENSORS.values(), ids=list(BAD_TENSORS))
def test_bad_tensors(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flashvar.attention(Q, K, K, **options)


BAD_PACKING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "int16": (
        {"cu_seqlens_q": offsets(0, 9).short()},
        DtypeError,
        r"must be int32 or int64, found torch.int16: cast it with .to\(torch.int32\)",
    ),
    "elsewhere": ({"cu_seqlens_q": offsets(0, 9).to("meta")}, DeviceError, r"found meta: move it"),
    "strided": ({"cu_seqlens_q": offsets(0, 1, 9, 2)[::2]}, LayoutError, "must be contiguous"),
    "rank": ({"cu_seqlens_q": offsets(0, 9)[None]}, ShapeError, r"shape \(batch \+ 1,\)"),
    "nothing": ({"cu_seqlens_q": offsets()}, ShapeError, r"shape \(batch \+ 1,\), found \(0,\)"),
    "decreasing": (
        {"cu_seqlens_q": offsets(0, 6, 3, 9)},
        ShapeError,
        r"cu_seqlens_q must start at 0 or later, not decrease, and .*found \[0, 6, 3, 9\]: pass 0",
    ),
    "beyond the rows": (
        {"cu_seqlens_q": offsets(0, 10)},
        ShapeError,
        r"not exceed the 9 rows, found \[0, 10\]",
    ),
    "before the rows": ({"cu_seqlens_q": offsets(-1, 9)}, ShapeError, r"found \[-1, 9\]"),
    "of another batch": (
        {"cu_seqlens_q": offsets(0, 9), "cu_seqlens_k": offsets(0, 4, 9)},
        ShapeError,
        r"cu_seqlens_k must have shape \(2,\), found \(3,\)",
    ),
    "bound below the truth": (
        {"cu_seqlens_q": offsets(0, 9), "max_seqlen_q": 8},
        ShapeError,
        "max_seqlen_q must be at least the longest sequence, found 8 and a sequence of 9",
    ),
    "bound negative": (
        {"cu_seqlens_q": offsets(0, 9), "max_seqlen_q": -1},
        InvalidInputError,
        "max_seqlen_q must be a whole number",
    ),
    "used of another batch": (
        {"cu_seqlens_q": offsets(0, 9), "seqused_k": offsets(1, 2)},
        ShapeError,
        r"seqused_k must have shape \(1,\)",
    ),
    "used beyond a sequence": (
        {"cu_seqlens_q": offsets(0, 4, 9), "seqused_k": offsets(4, 6)},
        ShapeError,
        "found 6 in sequence 1 of 5 keys",
    ),
    "used negative": (
        {"cu_seqlens_q": offsets(0, 9), "seqused_k": offsets(-1)},
        ShapeError,
        "seqused_k must be from 0 to the keys of each sequence, found -1",
    ),
    "absent": ({"cu_seqlens_q": None}, InvalidInputError, "needs cu_seqlens_q, found None"),
}


@pytest.mark.parametrize(("options", "error", "words"), BAD_PACKING.values(), ids=list(BAD_PACKING))
def test_bad_packing(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flashvar.attention_varlen(PACKED, PACKED, PACKED, **options)


def test_a_generous_bound_is_no_more_than_all_rows() -> None:
    """Else a kernel would be started for rows that no sequence can have."""
    options = Options(max_seqlen_q=2**40, max_seqlen_k=2**40, window_left=2**35)
    packing = offsets(0, 9)
    given = Inputs(PACKED, PACKED, PACKED, cu_seqlens_q=packing, cu_seqlens_k=packing)
    problem = inspect(given, options)
    assert (problem.seqlen_q, problem.seqlen_k, problem.window_left) == (9, 9, -1)


def test_rows_that_are_not_packed() -> None:
    dense = torch.randn(1, 9, 2, 8)
    with pytest.raises(ShapeError, match=r"packed q must have 3 dimensions.*flatten\(0, 1\)"):
        flashvar.attention_varlen(dense, dense, dense, cu_seqlens_q=offsets(0, 9))


def test_bad_values_are_found_in_every_call() -> None:
    """A plan is kept by shapes; values are of each call."""
    packing = offsets(0, 4, 9)
    flashvar.attention_varlen(PACKED, PACKED, PACKED, cu_seqlens_q=packing)
    packing[1] = 20
    with pytest.raises(ShapeError, match="not decrease"):
        flashvar.attention_varlen(PACKED, PACKED, PACKED, cu_seqlens_q=packing)


@pytest.mark.parametrize("packed_keys", [True, False], ids=["packed", "cache"])
def test_offsets_of_int64_are_those_of_int32(packed_keys: bool) -> None:
    rows = PACKED.clone().requires_grad_()
    keys = rows if packed_keys else torch.randn(2, 6, 2, 8)
    numbers = {"cu_seqlens_q": offsets(0, 4, 8), "seqused_k": offsets(3, 2)}

    def step(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        cast = {name: one.to(dtype) for name, one in numbers.items()}
        out, lse = flashvar.attention_varlen(rows, keys, keys, **cast, return_lse=True)
        return out, lse, *torch.autograd.grad(out.square().sum(), [rows])

    for one, other in zip(step(torch.int32), step(torch.int64), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "bhsd->bshd"])
def test_used_keys_of_dense_sequences_in_any_layout(layout: str) -> None:
    """The public functions have them for packed queries alone; the op has them for all."""
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 6, 2, 8)
    if layout != "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)

    def step(used: torch.Tensor) -> torch.Tensor:
        optional = pack_tensors(seqused_k=used)
        return run.forward(q, k, k, *optional, *Options(layout=layout))[0]

    assert step(offsets(6, 3)).isfinite().all()
    with pytest.raises(ShapeError, match="found 7 in sequence 1 of 6 keys"):
        step(offsets(6, 7))


def test_rows_of_no_sequence_are_padding() -> None:
    """Before the first sequence, and behind the last."""
    out, lse = flashvar.attention_varlen(
        PACKED, PACKED, PACKED, cu_seqlens_q=offsets(2, 5, 7), return_lse=True
    )
    of_none = torch.tensor([True] * 2 + [False] * 5 + [True] * 2)
    assert (out == 0).all((1, 2)).equal(of_none)
    assert (lse == -torch.inf).all(0).equal(of_none)


def test_values_are_not_read_where_that_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device: the kernels clamp; here the reference does."""
    monkeypatch.setattr(attention_plan, "_plans", Plans())
    monkeypatch.setattr(attention_plan, "check_values", lambda *_: None)
    out = flashvar.attention_varlen(PACKED, PACKED, PACKED, cu_seqlens_q=offsets(0, 6, 3, 40))
    assert out.isfinite().all()


def test_a_repeated_call_of_packed_tensors_is_known_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offsets of q that are those of k too are one tensor in two places, q, k and v in three."""
    for name in ("_plans", "_backward_plans"):
        monkeypatch.setattr(attention_plan, name, Plans())
    rows, packing = PACKED.clone().requires_grad_(), offsets(0, 6, len(PACKED))

    def step() -> tuple[torch.Tensor, ...]:
        out = flashvar.attention_varlen(rows, rows, rows, cu_seqlens_q=packing)
        return out, *torch.autograd.grad(out.square().sum(), [rows])

    before = step()
    for name in ("plan", "backward_plan"):
        monkeypatch.delattr(attention_plan, name)
    monkeypatch.setattr("flashvar.ops.attention.call.plan", None)
    for one, again in zip(before, step(), strict=True):
        assert one.equal(again)


def test_an_empty_batch_is_served() -> None:
    empty = torch.randn(0, 5, 2, 8)
    assert flashvar.attention(empty, empty, empty).shape == empty.shape
    rows = torch.randn(0, 2, 8)
    assert flashvar.attention_varlen(rows, rows, rows, cu_seqlens_q=offsets(0)).shape == rows.shape
