"""Run the Triton kernels in Triton's interpreter, which replaces its compiler process-wide."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interpreter import patch_once

if TYPE_CHECKING:
    import torch
    from oracle import Call


@dataclass(frozen=True)
class Case:
    head_dim: int
    lengths: tuple[int, int]
    head_dim_v: int | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    bias: tuple[int, int] | None = None  # its batch and heads
    sinks: str | None = None  # their dtype
    alibi: bool = False
    packed: tuple[int, ...] | None = None  # lengths of the queries' sequences
    packed_k: tuple[int, ...] | None = None
    used: tuple[int, ...] | None = None
    grad_lse: bool = False
    layout: str = "bshd"
    dtype: str = "half"
    aligned: bool = True

    def __str__(self) -> str:
        words = [f"d{self.head_dim}", f"{self.lengths[0]}x{self.lengths[1]}"]
        words += [f"v{self.head_dim_v}"] if self.head_dim_v else []
        words += ["causal"] if self.causal else []
        words += [f"window{self.window}"] if self.window != (-1, -1) else []
        words += [f"scale{self.scale}"] if self.scale is not None else []
        words += ["softcap"] if self.softcap else []
        words += ["dropout"] if self.dropout else []
        words += [f"bias{self.bias}"] if self.bias else []
        words += [f"sinks-{self.sinks}"] if self.sinks else []
        words += ["alibi"] if self.alibi else []
        words += [f"packed{self.packed}"] if self.packed else []
        words += [f"used{self.used}"] if self.used else []
        words += [self.layout] if self.layout != "bshd" else []
        words += [self.dtype] if self.dtype != "half" else []
        words += [] if self.aligned else ["odd-strides"]
        return "-".join(words)


CASES = [
    Case(64, (65, 130), causal=True, grad_lse=True),
    Case(64, (130, 65), causal=True, grad_lse=True),
    Case(64, (1, 200)),
    Case(8, (5, 7), heads=(4, 2), batch=2, grad_lse=True),
    Case(16, (64, 64), causal=True, dtype="float"),
    Case(40, (33, 70), causal=True, scale=-0.3),
    Case(72, (65, 40), layout="bhsd"),
    Case(24, (40, 65), layout="bhsd->bshd", causal=True),
    Case(96, (33, 65), scale=0.0),
    Case(112, (20, 129), causal=True, aligned=False),
    Case(160, (17, 34), head_dim_v=64, causal=True),
    Case(256, (17, 50), causal=True, heads=(2, 2)),
    Case(320, (17, 20), head_dim_v=512, causal=True),
    Case(512, (20, 17), window=(9, 0), heads=(2, 2), grad_lse=True),
    Case(32, (70, 90), window=(20, 5)),
    Case(32, (90, 70), window=(-1, 9), batch=2),
    Case(32, (40, 90), window=(0, -1), softcap=3.0),
    Case(32, (20, 33), dropout=0.3, causal=True, heads=(4, 2), batch=2, grad_lse=True),
    Case(16, (33, 47), bias=(1, 2), batch=2, alibi=True, heads=(2, 2)),
    Case(16, (40, 33), bias=(2, 1), batch=2, softcap=2.0, dropout=0.5, causal=True),
    Case(32, (0, 0), packed=(0, 40, 3, 0), packed_k=(5, 70, 0, 0), causal=True, alibi=True),
    Case(24, (0, 0), packed=(33, 70), packed_k=(70, 20), window=(9, 3), used=(50, 0), dropout=0.2),
    Case(16, (0, 60), packed=(1, 30, 0), used=(17, 60, 5), heads=(6, 2)),
    Case(32, (40, 70), sinks="float", causal=True, heads=(4, 2), batch=2, grad_lse=True),
    Case(16, (70, 40), sinks="half", window=(9, 0), dropout=0.3, scale=-0.3, grad_lse=True),
    Case(16, (0, 300), packed=(1, 4, 0), sinks="half", heads=(6, 2), causal=True),
    Case(16, (3, 300), bias=(2, 6), batch=2, heads=(6, 2), softcap=3.0, layout="bhsd"),
    Case(16, (3, 300), sinks="half", batch=2, heads=(6, 2), alibi=True, layout="bhsd"),
    Case(16, (33, 47), sinks="half", bias=(1, 2), softcap=2.0, heads=(2, 2)),
    Case(24, (0, 0), packed=(33, 5), packed_k=(20, 0), sinks="float", causal=True, grad_lse=True),
]


def plant_nan(call: Call, case: Case) -> None:
    """In keys and values that do not count."""
    packed = call.cu_seqlens_k is not None
    for b, length in enumerate(case.used or ()):
        first, stop = call.cu_seqlens_k[b : b + 2] if packed else (0, case.lengths[1])
        for tensor in (call.k, call.v):
            (tensor if packed else tensor[b])[first + length : stop] = float("nan")


def padded(case: Case, sizes: tuple[int, ...], dim: int) -> torch.Tensor:
    """Random values with NaN all around them."""
    import torch

    odd = 0 if case.aligned else 1
    rows, heads = sizes[-2:]
    shape = (*sizes[:-2], rows + 2, heads, dim + 8 + odd)
    whole = torch.full(shape, torch.nan, dtype=getattr(torch, case.dtype))
    view = whole.narrow(-3, 1, rows).narrow(-1, odd, dim)
    return view.copy_(torch.randn(view.shape))


def sizes_of(
    case: Case, length: int, packed: tuple[int, ...] | None, heads: int
) -> tuple[int, ...]:
    """The shape of q, or of k, without its last dimension."""
    batch = case.batch if case.packed is None else len(case.packed)
    return (batch, length, heads) if packed is None else (sum(packed) + 3, heads)


def made(case: Case) -> Call:
    """The tensors and options of a case, in the layout of the oracle."""
    import torch
    from oracle import Call

    def offsets(lengths: tuple[int, ...] | None) -> torch.Tensor | None:
        """Of sequences that begin at row 2; one row after them belongs to none."""
        if lengths is None:
            return None
        return torch.tensor([2, *lengths]).cumsum(0).to(torch.int32)

    sizes_k = sizes_of(case, case.lengths[1], case.packed_k, case.heads[1])
    batch = case.batch if case.packed is None else len(case.packed)
    bias, sinks, slopes, rng, used = None, None, None, None, None
    if case.bias is not None:
        bias = torch.randn(*case.bias, *case.lengths)
    if case.sinks is not None:
        sinks = torch.randn(case.heads[0]).to(getattr(torch, case.sinks)) + 1
        sinks[0] = -torch.inf  # none
        if len(sinks) > 2:
            sinks[1] = 300.0  # hides all keys
    if case.alibi:
        slopes = torch.rand(batch, case.heads[0])
    if case.dropout:
        rng = torch.tensor([-(2**61) + 12345, 2**33 + 7])
    if case.used is not None:
        used = torch.tensor(case.used, dtype=torch.int32)
    return Call(
        padded(case, sizes_of(case, case.lengths[0], case.packed, case.heads[0]), case.head_dim),
        padded(case, sizes_k, case.head_dim),
        padded(case, sizes_k, case.head_dim_v or case.head_dim),
        causal=case.causal,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        bias=bias,
        sinks=sinks,
        alibi_slopes=slopes,
        dropout_p=case.dropout,
        rng_state=rng,
        cu_seqlens_q=offsets(case.packed),
        cu_seqlens_k=offsets(case.packed_k),
        seqused_k=used,
    )


def takes_split_kv(case: Case) -> bool:
    """Whether the split-KV kernels run a case."""
    return case.packed_k is None and not case.dropout


def run_split_kv(case: Case, splits: int) -> str:
    """As `run`, the forward alone, by the kernels for few queries."""
    from flashvar.backends.triton.attention import few_rows, split_kv

    few_rows.serves = lambda problem, machine: few_rows.runs(problem)
    split_kv._splits = lambda *_: splits
    return run(case, backward=False)


def run(case: Case, backward: bool = True) -> str:
    """What is wrong with the kernels' answers; empty when they are right."""
    import torch
    from oracle import assert_gradients_right, assert_right

    from flashvar.backends.triton.attention import prepare_backward, prepare_forward
    from flashvar.ops.attention.problem import Gradients, Inputs, Options
    from flashvar.ops.attention.sinks import gradient
    from flashvar.ops.attention.validate import inspect, inspect_backward
    from flashvar.selection.candidates import CandidateResult

    torch.manual_seed(0)
    result = CandidateResult("triton", "triton", True, "")
    call = made(case)

    def users(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2) if case.layout.startswith("bhsd") else tensor

    def returned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2) if case.layout.endswith("bhsd") else tensor

    inputs = Inputs(
        *(users(tensor) for tensor in (call.q, call.k, call.v)),
        *(call.bias, call.sinks, call.alibi_slopes, call.rng_state),
        *(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k),
    )
    plant_nan(call, case)
    options = Options(
        causal=case.causal,
        scale=case.scale,
        window_left=case.window[0],
        window_right=case.window[1],
        softcap=case.softcap,
        dropout_p=case.dropout,
        layout=case.layout,
    )
    problem = inspect(inputs, options)
    out = torch.full(problem.out_shape, torch.nan, dtype=call.q.dtype)
    lse = torch.full(problem.lse_shape, torch.nan)
    prepare_forward(problem, result)(inputs, out, lse)
    if not backward:
        alone = torch.full_like(out, torch.nan)
        prepare_forward(problem, result)(inputs, alone, None)
        try:
            assert_right(call, returned(out), lse)
            assert torch.equal(alone, out)
        except AssertionError as error:
            return str(error) or "wrong"
        return ""
    grad_out = returned(padded(case, call.q.shape[:-1], case.head_dim_v or case.head_dim))
    grad_lse = torch.randn(lse.shape) if case.grad_lse else None
    of_gradients = inspect_backward(inputs, options, grad_out, call.bias is not None)
    grads = Gradients(
        *(torch.full_like(tensor, torch.nan) for tensor in inputs[:3]),
        None if call.bias is None else torch.zeros(call.bias.shape),
    )
    delta = torch.full_like(lse, torch.nan)
    prepare_backward(of_gradients, result)(inputs, out, lse, grad_out, grad_lse, grads, delta)
    try:
        assert_right(call, returned(out), lse)
        found = {name: users(getattr(grads, name)) for name in "qkv"}
        found["bias"] = grads.bias
        if call.bias is None:
            del found["bias"]
        if call.sinks is not None:
            found["sinks"] = gradient(call.sinks, lse, delta)
        assert_gradients_right(call, found, returned(grad_out), grad_lse)
    except AssertionError as error:
        return str(error) or "wrong"
    return ""


def named_backend() -> None:
    """The public function, as users debug it."""
    import torch

    import flashvar

    q, k, v = (torch.randn(1, 40, 2, 64, dtype=torch.half) for _ in range(3))
    out = flashvar.attention(q, k, v, causal=True, backend="triton")
    expected = flashvar.attention(q, k, v, causal=True, backend="reference")
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)


def hidden_by_value() -> None:
    """Whole blocks of keys, the first ones too, whose every score is -inf."""
    import torch

    import flashvar

    q, k, v = (torch.rand(1, 200, 1, 16, dtype=torch.half) + 0.5 for _ in range(3))
    k[:, :140] = 0.0
    k[:, :140, :, 0] = -torch.inf
    out, lse = flashvar.attention(q, k, v, backend="triton", return_lse=True)
    expected = flashvar.attention(q, k[:, 140:], v[:, 140:], backend="reference", return_lse=True)
    torch.testing.assert_close((out, lse), expected, atol=5e-3, rtol=5e-3)


def hidden_by_finite_numbers() -> None:
    """Masks that add large numbers: blocks of keys, and a row of them alone."""
    import torch

    import flashvar

    q, k, v = (torch.randn(1, 80, 1, 16, dtype=torch.half) for _ in range(3))
    hidden = torch.ones(80, 80, dtype=torch.bool).triu(1)
    hidden[40] = True

    def answers(number: float, backend: str) -> list[torch.Tensor]:
        bias = torch.zeros(1, 1, 80, 80).masked_fill_(hidden, number)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
        *inputs, bias = leaves
        out, lse = flashvar.attention(*inputs, bias=bias, return_lse=True, backend=backend)
        return [out, lse, *torch.autograd.grad(out.sum(), leaves)]

    expected = answers(-torch.inf, "reference")
    assert expected[1][..., 40].isneginf().all()
    for number in (-1e9, torch.finfo(torch.float32).min):
        torch.testing.assert_close(answers(number, "triton"), expected, atol=5e-3, rtol=5e-3)


def few_queries_of_used_keys() -> None:
    """By the split-KV kernels, which read no other keys; more used keys than there are are all."""
    import torch

    from flashvar.backends.triton.attention import few_rows, split_kv
    from flashvar.ops.attention import run
    from flashvar.ops.attention.problem import Inputs, Options, pack_tensors
    from flashvar.ops.attention.validate import inspect

    q, (k, v) = torch.randn(4, 3, 6, 16).half(), torch.randn(2, 4, 600, 2, 16).half()
    used = torch.tensor([600, 0, 417, 70], dtype=torch.int32)
    for number, length in enumerate(used.tolist()):
        k[number, length:] = v[number, length:] = torch.nan
    sinks, slopes = torch.randn(6), torch.rand(4, 6)
    sinks[0] = -torch.inf
    optional = pack_tensors(None, sinks, slopes, None, None, None, used)
    for options in (Options(), Options(causal=True, softcap=3.0), Options(window_left=90)):
        expected = run.forward(q, k, v, *optional, *options._replace(backend="reference"))
        found = run.forward(q, k, v, *optional, *options._replace(backend="triton"))
        torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)
        problem = inspect(Inputs(q, k, v, *optional), options)
        assert few_rows.is_faster(problem, split_kv.NO_DEVICE)
        # On a GPU nobody checks lengths.
        wrong = used + torch.tensor([7, -2, 0, 0], dtype=torch.int32)
        again = [torch.full_like(x, torch.nan) for x in found]
        launch = few_rows.forward(problem, split_kv.NO_DEVICE)
        launch(Inputs(q, k, v, *optional[:-1], wrong), *again)
        torch.testing.assert_close(again, list(found), rtol=0, atol=0)


CALLS = {
    call.__name__: call
    for call in (
        named_backend,
        hidden_by_value,
        hidden_by_finite_numbers,
        few_queries_of_used_keys,
    )
}


def said(call: Callable[[], None]) -> str:
    """What is wrong with a call of the public function."""
    try:
        call()
    except Exception as error:
        return repr(error)
    return ""


if __name__ == "__main__":
    patch_once()
    found = {name: said(call) for name, call in CALLS.items()}
    found |= {str(case): run(case) for case in CASES}
    for case in filter(takes_split_kv, CASES):
        found |= {f"{splits} splits {case}": run_split_kv(case, splits) for splits in (1, 3)}
    json.dump(found, sys.stdout)
