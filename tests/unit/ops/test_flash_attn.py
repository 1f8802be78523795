"""The functions of FlashAttention 2: signatures, semantics, and what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flashvar
from flashvar import flash_attn
from flashvar.errors import InvalidInputError, ShapeError

_SHARED = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
_PACKING = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {_SHARED}",
    "flash_attn_qkvpacked_func": f"qkv, {_SHARED}",
    "flash_attn_kvpacked_func": f"q, kv, {_SHARED}",
    "flash_attn_varlen_func": f"q, k, v, {_PACKING}, {_SHARED}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_SHARED}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_PACKING}, {_SHARED}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(seqlen_q: int = 5, seqlen_k: int = 7, head_dim: int = 16) -> list[torch.Tensor]:
    q = torch.randn(2, seqlen_q, 4, head_dim)
    return [q, *(torch.randn(2, seqlen_k, 2, head_dim) for _ in range(2))]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert ", ".join(map(str, bare)) == SIGNATURES[name]
    assert sorted(SIGNATURES) == flash_attn.__all__


# From the documentation of FlashAttention 2: which keys a query sees when lengths differ.
EXAMPLES = {
    (2, 5): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    (5, 2): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
}


@pytest.mark.parametrize("lengths", EXAMPLES, ids=str)
def test_causal_examples(lengths: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    q, k = torch.zeros(1, seqlen_q, 1, 8), torch.zeros(1, seqlen_k, 1, 8)
    v = torch.eye(seqlen_k)[None, :, None]
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    assert (out[0, :, 0] > 0).int().tolist() == EXAMPLES[lengths]


def test_arguments_keep_their_places() -> None:
    q, k, v = make()
    slopes = torch.rand(4)
    found = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 0), 2.0, slopes, True, False)
    expected = flashvar.attention(
        q, k, v, scale=0.3, causal=True, window_size=(3, 0), softcap=2.0, alibi_slopes=slopes
    )
    torch.testing.assert_close(found, expected)


def test_packed_inputs_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashvar.ops.attention import flash_attn as flash_attention

    seen: list[torch.Tensor] = []
    call = flash_attention.call

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        seen.extend((q, k, v))
        return call(q, k, v, *rest)

    monkeypatch.setattr(flash_attention, "call", watched)
    qkv, kv = torch.randn(2, 5, 3, 4, 16), torch.randn(2, 5, 2, 4, 16)
    flash_attn.flash_attn_qkvpacked_func(qkv)
    flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], kv)
    rows, cu = qkv.flatten(0, 1), offsets(0, 5, 10)
    flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu, 5)
    flash_attn.flash_attn_varlen_kvpacked_func(rows[:, 0], kv.flatten(0, 1), cu, cu, 5, 5)
    memory = {x.untyped_storage().data_ptr() for x in (qkv, kv)}
    assert len(seen) == 12
    assert {x.untyped_storage().data_ptr() for x in seen} == memory


def test_packed_functions_give_the_same() -> None:
    qkv = torch.randn(2, 5, 3, 4, 16, requires_grad=True)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    cu = offsets(0, 5, 10)
    kv = torch.stack((k, v), 2)
    rows = qkv.flatten(0, 1)
    answers = [
        flash_attn.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn.flash_attn_kvpacked_func(q, kv, causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(rows, cu, 5, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(
            q.flatten(0, 1), kv.flatten(0, 1), cu, cu, 5, 5, causal=True
        ),
        flash_attn.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 5, 5, causal=True
        ),
    ]
    assert isinstance(expected, torch.Tensor)
    for answer in answers:
        assert isinstance(answer, torch.Tensor)
        torch.testing.assert_close(answer.reshape(expected.shape), expected)
    assert isinstance(answers[0], torch.Tensor)
    (grad,) = torch.autograd.grad(answers[0].square().sum(), qkv)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(grad, torch.stack(wanted, 2))


@pytest.mark.parametrize("window", [(-1, -1), (-7, -2), (100, 100)], ids=str)
def test_windows_that_hide_nothing(window: tuple[int, int]) -> None:
    q, k, v = make()
    found = flash_attn.flash_attn_func(q, k, v, window_size=window)
    torch.testing.assert_close(found, flash_attn.flash_attn_func(q, k, v))


def test_strided_rows_are_copied() -> None:
    q, k, v = make()
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    torch.testing.assert_close(
        flash_attn.flash_attn_func(*strided), flash_attn.flash_attn_func(q, k, v)
    )


def test_probabilities_without_dropout_are_none() -> None:
    q, k, v = make()
    answer = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert isinstance(answer, tuple)
    out, lse, weights = answer
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 5), torch.float32)
    assert (weights.numel(), weights.dtype) == (0, q.dtype)


def blocks_maximum(scores: torch.Tensor, block: int) -> torch.Tensor:
    """The largest score that a loop over blocks of keys, last to first, has seen at each key."""
    seen = torch.full(scores.shape[:-1], -torch.inf)
    maxima = torch.empty_like(scores)
    for start in reversed(range(0, scores.shape[-1], block)):
        part = scores[..., start : start + block]
        seen = torch.maximum(seen, part.amax(-1))
        maxima[..., start : start + block] = seen[..., None]
    return maxima


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dropped_weights(causal: bool) -> None:
    q, k, v = make(40, 150, 64)
    answer = flash_attn.flash_attn_func(q, k, v, 0.3, causal=causal, return_attn_probs=True)
    assert isinstance(answer, tuple)
    out, lse, shown = answer
    assert shown.shape == (2, 4, 128, 256)
    assert not shown[:, :, 40:].any()
    assert not shown[..., 150:].any()
    shown = shown[:, :, :40, :150]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8
    if causal:
        hidden = torch.ones(40, 150, dtype=torch.bool).triu(111)
        scores = scores.masked_fill(hidden, -torch.inf)
    # As the tests of FlashAttention 2 turn them into probabilities: blocks of 64 keys.
    weights = shown.abs() * torch.exp(blocks_maximum(scores, 64) - lse[..., None])
    torch.testing.assert_close(weights, scores.softmax(-1))
    kept = torch.where(shown >= 0, weights, 0) / 0.7
    expected = torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, expected)
    assert abs((shown < 0).float().sum() / (shown != 0).sum() - 0.3) < 0.02


@pytest.mark.skipif(
    torch.__version__.startswith("2.8."),
    reason=f"torch {torch.__version__} traces no methods of named tuples",
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_dropped_weights_in_a_graph(dynamic: bool) -> None:
    def call(q: torch.Tensor, k: torch.Tensor) -> flash_attn.Result:
        return flash_attn.flash_attn_func(q, k, k, 0.3, causal=True, return_attn_probs=True)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    graphs = []
    # A static graph is another one for each length. Torch knows a size of 1, and every size that it
    # does not know takes most of a second.
    for keys in (5, 7, 150) if dynamic else (5,):
        q, k, _ = make(3, keys, 16)
        if dynamic:
            q, k = q[:1, :, :1], k[:1, :, :1]
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(1)
            expected = call(q, k)
            torch.manual_seed(1)
            torch.testing.assert_close(compiled(q, k), expected)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


def test_dropped_weights_of_packed_sequences() -> None:
    q = torch.randn(9, 2, 16)
    cu = offsets(0, 2, 9)
    answer = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, 0.5, return_attn_probs=True)
    assert isinstance(answer, tuple)
    assert answer[1].shape == (2, 9)
    assert answer[2].shape == (2, 2, 128, 128)
    assert not answer[2][0, :, 2:].any()
    assert answer[2][1, :, :7, :7].all()


def test_bounds_in_tensors() -> None:
    q, cu = torch.randn(9, 2, 16), offsets(0, 2, 9)
    bound: Any = torch.tensor(7)
    found = flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, bound, bound)
    torch.testing.assert_close(found, flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 7, 7))


def test_softcap_with_dropout_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"softcap cannot be combined with dropout.*0\.1"):
        flash_attn.flash_attn_func(*make(), 0.1, softcap=3.0)


def test_empty_batches_are_refused() -> None:
    empty = torch.randn(0, 5, 2, 16)
    with pytest.raises(ShapeError, match="at least 1 sequence"):
        flash_attn.flash_attn_func(empty, empty, empty)
    with pytest.raises(ShapeError, match="at least 1 sequence"):
        flash_attn.flash_attn_varlen_qkvpacked_func(torch.randn(0, 3, 2, 16), offsets(0), 0)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=str)
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    leaves = [x.requires_grad_() for x in make(*lengths)]
    out = flash_attn.flash_attn_func(*leaves)
    assert isinstance(out, torch.Tensor)
    assert not out.any()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), leaves))


def test_packed_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match=r"qkv must have shape \(batch, seqlen, 3, heads, head"):
        flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 5, 2, 4, 16))
    with pytest.raises(ShapeError, match=r"kv must have shape \(total, 2, heads, head_dim\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(
            torch.randn(5, 2, 8), torch.randn(5, 2, 8), *[offsets(0, 5)] * 2, 5, 5
        )


def test_compiles() -> None:
    qkv = torch.randn(2, 5, 3, 4, 16, requires_grad=True)
    cu = offsets(0, 4, 10)

    def dense(qkv: torch.Tensor) -> Any:
        return flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(3, 0))

    def packed(qkv: torch.Tensor) -> Any:
        return flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 6, softcap=2.0)

    for call in (dense, packed):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(qkv).square().sum(), qkv)
        torch.testing.assert_close(found, torch.autograd.grad(call(qkv).square().sum(), qkv))
