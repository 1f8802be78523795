"""FlashAttention-2's six functions: their signatures, results, gradients, views and refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_call import DEVICE
from features import dense, packed, slopes
from oracle import Call, assert_gradients_right, assert_right

pytestmark = pytest.mark.usefixtures("seed")

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
PACKED_Q_K = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {PACKED_Q_K}, {OPTIONS}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {PACKED_Q_K}, {OPTIONS}",
}
LENGTHS = (70, 0, 130, 33)
# As keywords of theirs and of an oracle's call.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (40, 3), "softmax_scale": 0.2}, {"window": (40, 3), "scale": 0.2}),
    "softcap": ({"softcap": 3.0, "causal": True}, {"softcap": 3.0, "causal": True}),
    "deterministic": ({"deterministic": True, "causal": True}, {"causal": True}),
}


def function(name: str) -> Callable[..., Any]:
    from flashvar import flash_attn

    found: Callable[..., Any] = getattr(flash_attn, name)
    return found


def problem(name: str, **options: Any) -> tuple[list[torch.Tensor], list[Any], Call]:
    """The tensors that a function takes, its arguments after them, and the oracle's call."""
    sizes: dict[str, Any] = {"heads": (4, 4 if "qkvpacked" in name else 2), **options}
    if "varlen" in name:
        call = packed(64, torch.bfloat16, LENGTHS, LENGTHS, **sizes)
        bounds = [call.cu_seqlens_q, call.cu_seqlens_k, max(LENGTHS), max(LENGTHS)]
        after = [call.cu_seqlens_q, max(LENGTHS)] if "qkvpacked" in name else bounds
    else:
        call, after = dense(64, torch.bfloat16, (150, 150), **sizes), []
    tensors = [call.q, call.k, call.v]
    if "qkvpacked" in name:
        tensors = [torch.stack(tensors, dim=-3)]
        q, k, v = tensors[0].unbind(-3)
    elif "kvpacked" in name:
        tensors = [call.q, torch.stack(tensors[1:], dim=-3)]
        q, (k, v) = tensors[0], tensors[1].unbind(-3)
    else:
        q, k, v = tensors
    return tensors, after, Call(**{**vars(call), "q": q, "k": k, "v": v})


def unpacked(name: str, grads: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Gradients by the oracle's names."""
    if "qkvpacked" in name:
        grads = grads[0].unbind(-3)
    elif "kvpacked" in name:
        grads = (grads[0], *grads[1].unbind(-3))
    return dict(zip("qkv", grads, strict=True))


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_theirs(name: str) -> None:
    parameters = inspect.signature(function(name)).parameters.values()
    plain = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ", ".join(plain) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", SIGNATURES)
def test_results_and_gradients(name: str, feature: str) -> None:
    keywords, options = FEATURES[feature]
    tensors, after, call = problem(name, **options)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(name)(*leaves, *after, **keywords)
    assert_right(call, out)
    grad_out = torch.randn_like(out)
    found = unpacked(name, torch.autograd.grad(out, leaves, grad_out))
    assert_gradients_right(call, found, grad_out)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["per-head", "per-batch"])
def test_alibi_and_the_true_log_sum_exp(batch: tuple[int, ...]) -> None:
    tensors, after, call = problem("flash_attn_func", alibi_slopes=slopes(*batch, 4), causal=True)
    out, lse, _ = function("flash_attn_func")(
        *tensors, *after, alibi_slopes=call.alibi_slopes, causal=True, return_attn_probs=True
    )
    assert_right(call, out, lse)


@pytest.mark.parametrize("name", SIGNATURES)
def test_probabilities_on_request(name: str) -> None:
    tensors, after, call = problem(name)
    answer = function(name)(*tensors, *after, return_attn_probs=True)
    assert len(answer) == 3
    assert_right(call, answer[0], answer[1])


@pytest.mark.parametrize("name", SIGNATURES)
def test_dropout_repeats_with_the_generator(name: str) -> None:
    tensors, after, _ = problem(name)
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = function(name)(*leaves, *after, dropout_p=0.3, deterministic=True)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert not torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="counts the CUDA allocator's bytes")
@pytest.mark.parametrize("name", [name for name in SIGNATURES if "packed" in name])
def test_packed_inputs_are_views_and_not_copied(name: str) -> None:
    tensors, after, call = problem(name)
    function(name)(*tensors, *after)  # compiled and planned
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(name)(*tensors, *after)
    peak = torch.cuda.max_memory_allocated() - before
    out = call.out_shape.numel() * 2
    assert out <= peak < out + call.q.numel(), "a copy of q alone is twice its elements"


@pytest.mark.parametrize("page", [16, 256])
def test_keys_in_pages(page: int) -> None:
    """As packed ones, which stand in the pages in another order."""
    (q, k, v), after, _ = problem("flash_attn_varlen_func", causal=True)
    columns = -(-max(LENGTHS) // page)
    table = torch.randperm(len(LENGTHS) * columns, device=DEVICE).int().view(-1, columns)
    pages = [x.new_full((table.numel(), page, *x.shape[1:]), torch.nan) for x in (k, v)]
    for paged, packed_rows in zip(pages, (k, v), strict=True):
        for row, rows in zip(table.long(), packed_rows.split(LENGTHS), strict=True):
            for place, part in zip(row, rows.split(page), strict=False):
                paged[place, : len(part)] = part
    wanted = function("flash_attn_varlen_func")(q, k, v, *after, causal=True)
    found = function("flash_attn_varlen_func")(q, *pages, *after, causal=True, block_table=table)
    torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=4e-3)


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_that_gets_new_keys(paged: bool) -> None:
    from flashvar.flash_attn import flash_attn_func, flash_attn_with_kvcache

    sizes, page, columns = (70, 1, 130), 64, 3
    q, new, values = (torch.randn(3, 2, h, 64, device=DEVICE).bfloat16() for h in (4, 2, 2))
    k, v = torch.randn(2, 3, page * columns, 2, 64, device=DEVICE).bfloat16()
    seen = torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    table, caches = None, [k.clone(), v.clone()]
    if paged:
        table = torch.randperm(9, device=DEVICE).int().view(3, columns)
        caches = [torch.empty(9, page, 2, 64, device=DEVICE).bfloat16() for _ in "kv"]
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[table.flatten().long()] = rows.reshape(9, page, 2, 64)
    out = flash_attn_with_kvcache(
        q, *caches, new, values, cache_seqlens=seen, block_table=table, causal=True
    )
    for i, end in enumerate(sizes):
        keys, of_values = (
            torch.cat((x[i : i + 1, :end], y[i : i + 1]), 1) for x, y in ((k, new), (v, values))
        )
        wanted = flash_attn_func(q[i : i + 1], keys, of_values, causal=True)
        # Other kernels round other sums: near 0 that is more than a part of the value.
        torch.testing.assert_close(out[i : i + 1], wanted, rtol=1.6e-2, atol=4e-3)


def test_the_sign_of_probabilities_says_what_was_dropped() -> None:
    p = 0.3
    tensors, after, call = problem("flash_attn_func", causal=True)
    out, _, shown = function("flash_attn_func")(
        *tensors, *after, dropout_p=p, causal=True, return_attn_probs=True
    )
    kept = shown[:, :, :150, :150] >= 0
    visible = ~call.hidden()
    share = kept[..., visible].double().mean()
    assert abs(float(share) - (1 - p)) < 0.02
    weights = call.written_out(torch.float64).scores.softmax(-1) * kept / (1 - p)
    expected = weights @ call.v.transpose(1, 2).double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_the_stand_in_answers_below_autograd() -> None:
    """What other projects call by its private name: context parallelism merges these."""
    from flashvar.compat.flash_attn import flash_attn_interface as stand_in

    call = dense(64, torch.bfloat16, causal=True)
    scale, out_grad = 64**-0.5, torch.randn_like(call.q)
    out, lse, _, rng_state = stand_in._flash_attn_forward(
        *(call.q, call.k, call.v, 0.0, scale, True, -1, -1, 0.0, None, False)
    )
    assert_right(call, out, lse)
    grads = [torch.full_like(tensor, torch.nan) for tensor in (call.q, call.k, call.v)]
    stand_in._flash_attn_backward(
        *(out_grad, call.q, call.k, call.v, out, lse, *grads),
        *(0.0, scale, True, -1, -1, 0.0, None, False, rng_state),
    )
    assert_gradients_right(call, dict(zip("qkv", grads, strict=True)), out_grad)
