"""Packed sequences: what bounds them, what is refused, and lengths that live on the device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from device_call import DEVICE, attend, check, check_gradients, options, require, run
from features import dense, packed
from oracle import Call, assert_gradients_right, assert_right

import flashvar
from flashvar.errors import InvalidInputError

LENGTHS_Q, LENGTHS_K = (70, 130, 1, 64), (90, 40, 200, 64)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("max_seqlen", [130, 200, 8192, 10**6], ids=str)
def test_a_bound_larger_than_the_truth(max_seqlen: int, backend: str) -> None:
    """It may choose other kernels, whose results are right."""
    call = packed(64, torch.bfloat16, LENGTHS_Q, (130, 40, 120, 64), causal=True)
    check(call, backend, max_seqlen=max_seqlen)
    check_gradients(call, backend, max_seqlen=max_seqlen)


def test_the_bounds_may_be_left_out(backend: str) -> None:
    call = packed(64, torch.bfloat16, LENGTHS_Q, LENGTHS_K, causal=True)
    require(call, backend)
    keywords = options(call) | {"max_seqlen_q": None, "max_seqlen_k": None}
    out, lse = flashvar.attention_varlen(
        call.q, call.k, call.v, **keywords, return_lse=True, backend=backend
    )
    assert_right(call, out, lse)


def test_packed_keys_lie_as_the_queries_do_by_default(backend: str) -> None:
    call = packed(64, torch.bfloat16, LENGTHS_Q, LENGTHS_Q, causal=True)
    require(call, backend)
    out, lse = flashvar.attention_varlen(
        *(call.q, call.k, call.v),
        cu_seqlens_q=call.cu_seqlens_q,
        causal=True,
        return_lse=True,
        backend=backend,
    )
    assert_right(call, out, lse)


@pytest.mark.parametrize("place", ["first", "middle", "last", "all-but-one"])
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_sequences_of_no_length(side: str, place: str, backend: str) -> None:
    lengths = {
        "first": (0, 70, 129),
        "middle": (70, 0, 129),
        "last": (70, 129, 0),
        "all-but-one": (0, 0, 129),
    }[place]
    full = (70, 64, 129)
    call = packed(
        *(64, torch.bfloat16),
        lengths if side != "k" else full,
        lengths if side != "q" else full,
        causal=True,
    )
    check(call, backend)
    check_gradients(call, backend, lse_gradient=True)


def test_one_sequence_is_the_dense_call(backend: str) -> None:
    call = packed(64, torch.bfloat16, (150,), (270,), causal=True)
    out, lse = attend(call, backend)
    alone = Call(call.q[None], call.k[None], call.v[None], causal=True)
    dense_out, dense_lse = attend(alone, backend)
    assert torch.equal(out, dense_out[0])
    assert torch.equal(lse, dense_lse[0])


def test_one_giant_among_a_thousand_tiny(backend: str) -> None:
    lengths = (1, 2, 3) * 200 + (1500,) + (5, 0) * 200
    call = packed(64, torch.bfloat16, lengths, lengths, heads=(2, 1), causal=True)
    check(call, backend)
    check_gradients(call, backend)


def test_more_sequences_than_16_bits_count(backend: str) -> None:
    count = 70_000
    call = packed(64, torch.bfloat16, (1,), (1,))
    bounds = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(count, 2, 64, device=DEVICE).bfloat16() for _ in range(3))
    call = Call(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    require(call, backend)
    out, lse = run(call, backend)
    # Each query sees its one key: its value, and its score.
    assert torch.equal(out, v)
    expected = (q.double() * k.double()).sum(-1).T * 64**-0.5
    assert (lse.double() - expected).abs().amax() < 1e-4


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("used", [(0, 17, 128, 200), (200, 200, 200, 200)], ids=str)
def test_a_cache_read_up_to_a_length_on_the_device(
    used: tuple[int, ...], head_dim: int, backend: str
) -> None:
    """Behind the length the cache holds NaN; its gradient there is 0."""
    call = packed(
        *(head_dim, torch.bfloat16, (3, 1, 130, 64), (200,) * 4),
        dense_keys=True,
        used=used,
        causal=True,
    )
    check(call, backend)
    for deterministic in (False, True):
        check_gradients(call, backend, deterministic=deterministic)


def test_a_decode_step_sees_the_whole_cache(backend: str) -> None:
    """One query, causal: the same as without a mask."""
    call = packed(64, torch.bfloat16, (1, 1), (200, 200), dense_keys=True, used=(150, 200))
    causal = Call(**{**vars(call), "causal": True})
    assert torch.equal(attend(call, backend)[0], attend(causal, backend)[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_graph_follows_lengths_that_change(dtype: torch.dtype, backend: str) -> None:
    if DEVICE == "cpu":
        pytest.skip("CUDA graphs need a device")
    call = packed(64, torch.bfloat16, (70, 60, 70), (70, 60, 70), causal=True)
    bounds = ints(0, 70, 130, 200, dtype=dtype)
    call = Call(**{**vars(call), "cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone()})
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]
    captured = Call(*leaves, **{k: v for k, v in vars(call).items() if k not in "qkv"})
    grad_out = torch.randn(call.out_shape, device=DEVICE).bfloat16()

    keywords = options(captured, max_seqlen=200)  # reads the device, which a capture may not
    keywords |= {"return_lse": True, "backend": backend}

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = flashvar.attention_varlen(*leaves, **keywords)
        return out, lse, *torch.autograd.grad(out, leaves, grad_out)

    require(call, backend, "attention_bwd")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *grads = step()
    for ends in ((0, 70, 130, 200), (0, 0, 200, 200), (0, 1, 3, 200), (0, 199, 199, 200)):
        for cu_seqlens in (call.cu_seqlens_q, call.cu_seqlens_k):
            assert cu_seqlens is not None
            cu_seqlens.copy_(ints(*ends))
        for tensor in (out, lse, *grads):
            tensor.fill_(torch.nan)
        graph.replay()
        assert_right(call, out, lse)
        assert_gradients_right(call, dict(zip("qkv", grads, strict=True)), grad_out)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "int16": ({"cu_seqlens_q": ints(0, 70, 200, 201, 265, dtype=torch.int16)}, "int32"),
    "float": ({"cu_seqlens_k": ints(0, 90, 130, 330, 394, dtype=torch.float32)}, "int32"),
    "two-dimensions": ({"cu_seqlens_q": ints(0, 70, 200, 201, 265)[None]}, "cu_seqlens_q"),
    "one-bound": ({"cu_seqlens_q": ints(0)}, "cu_seqlens"),
    "other-length": ({"cu_seqlens_k": ints(0, 90, 394)}, "cu_seqlens_k"),
    "not-contiguous": ({"cu_seqlens_q": ints(*([0, 9] * 5))[::2]}, "contiguous"),
    "used-int16": ({"seqused_k": ints(1, 2, 3, 4, dtype=torch.int16)}, "int32"),
    "used-too-few": ({"seqused_k": ints(1, 2, 3)}, "seqused_k"),
    "negative-bound": ({"max_seqlen_q": -1}, "max_seqlen_q"),
    "alibi-of-other-heads": ({"alibi_slopes": torch.rand(3, device=DEVICE)}, "alibi_slopes"),
    "dropout-of-one": ({"dropout_p": 1.0}, "dropout_p"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_arguments_are_refused_in_words(kind: str, backend: str) -> None:
    wrong, word = BAD[kind]
    call = packed(64, torch.bfloat16, LENGTHS_Q, LENGTHS_K)
    with pytest.raises(InvalidInputError, match=word):
        flashvar.attention_varlen(
            call.q, call.k, call.v, **{**options(call), **wrong}, backend=backend
        )


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_lengths_on_another_device_are_refused(name: str, backend: str) -> None:
    if DEVICE == "cpu":
        pytest.skip("needs a device beside the CPU")
    call = packed(64, torch.bfloat16, LENGTHS_Q, LENGTHS_K, used=LENGTHS_K)
    wrong = {name: options(call)[name].cpu()}
    with pytest.raises(InvalidInputError, match=rf"{name}.*cpu"):
        flashvar.attention_varlen(
            call.q, call.k, call.v, **{**options(call), **wrong}, backend=backend
        )


@pytest.mark.parametrize(
    "bounds", [(0, 130, 70, 201, 265), (0, 70, 200, 201, 9999), (-5, 70, 200, 201, 265)], ids=str
)
def test_bounds_that_lie_do_no_harm(bounds: tuple[int, ...], backend: str) -> None:
    """Decreasing or outside of the tensor: any result, but nothing else is touched, no crash."""
    call = packed(64, torch.bfloat16, LENGTHS_Q, LENGTHS_Q)
    lying = Call(**{**vars(call), "cu_seqlens_q": ints(*bounds), "cu_seqlens_k": ints(*bounds)})
    require(call, backend)
    with suppress(InvalidInputError):  # a backend that reads them may say so
        flashvar.attention_varlen(
            lying.q, lying.k, lying.v, **options(lying, max_seqlen=200), backend=backend
        )
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    check(dense(64, torch.bfloat16, (9, 9)), backend)
