"""Is the oracle what the semantics say, and does its budget tell right kernels from wrong ones?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Call, assert_gradients_right, assert_right
from philox import dropped, kept, philox
from simulated_kernel import Mistakes, run, truncated

RNG = torch.tensor([2**40 + 12345, 7])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "softcap": {"softcap": 3.0},
    "dropout": {"dropout_p": 0.3, "rng_state": RNG},
}


def make(lengths: tuple[int, int], dtype: torch.dtype, head_dim: int = 32, **options: Any) -> Call:
    shapes = ((lengths[0], 4), (lengths[1], 2), (lengths[1], 2))
    tensors = (torch.randn(2, length, heads, head_dim).to(dtype) for length, heads in shapes)
    return Call(*tensors, **options)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([2**32 - 1] * 4, (2**32 - 1, 2**32 - 1), "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(
    counter: list[int], key: tuple[int, int], words: str
) -> None:
    found = philox(np.array(counter, dtype=np.uint64), key)
    assert [f"{word:08x}" for word in found] == words.split()


def test_kept_weights_are_those_of_the_definition() -> None:
    mask = kept((2, 3, 40, 37), 0.25, seed=-5, offset=2**32 + 9, first_place=6)
    draw = np.random.default_rng(0)
    for _ in range(50):
        b, h, i, j = (int(draw.integers(size)) for size in mask.shape)
        counter = (i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2, 6 + b * 3 + h, 9)
        words = philox(np.array(counter, dtype=np.uint64), (2**32 - 5, 2**32 - 1))
        word = int(words[2 * (i // 8 % 2) + j % 2])
        half = word >> 16 if j // 8 % 2 else word % 2**16
        assert mask[b, h, i, j] == (half >= 2**14)


def by_hand(call: Call, b: int, h: int, i: int) -> tuple[list[float], float]:
    """One row of out and its log-sum-exp, key by key, as the semantics are written."""
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    diagonal, kv = i + seqlen_k - seqlen_q, h // (call.q.shape[2] // call.k.shape[2])
    left, right = call.window[0], 0 if call.causal else call.window[1]
    scores = {}
    for j in range(seqlen_k):
        if (left >= 0 and j < diagonal - left) or (right >= 0 and j > diagonal + right):
            continue
        s = call.factor * float(call.q[b, i, h] @ call.k[b, j, kv])
        s = call.softcap * math.tanh(s / call.softcap) if call.softcap else s
        if call.bias is not None:
            s += float(call.bias.expand(2, 4, -1, -1)[b, h, i, j])
        if call.alibi_slopes is not None:
            s -= float(call.alibi_slopes.expand(2, 4)[b, h]) * abs(diagonal - j)
        if s > -math.inf:
            scores[j] = s
    if call.sinks is not None:
        scores[-1] = float(call.sinks[h])
    total = sum(math.exp(s) for s in scores.values())
    out = torch.zeros(call.v.shape[-1], dtype=torch.float64)
    mask = (
        call.kept().double() / (1 - dropped(call.dropout_p) / 2**16)
        if call.dropout_p
        else torch.ones(2, 4, 99, 99)
    )
    for j, s in scores.items():
        if j >= 0:
            out += math.exp(s) / total * float(mask[b, h, i, j]) * call.v[b, j, kv]
    return out.tolist(), math.log(total) if total else -math.inf


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "scale": 0.3},
        {"window": (2, 1), "softcap": 2.0, "alibi_slopes": torch.rand(4)},
        {"window": (0, -1), "bias": torch.randn(1, 4, 6, 9), "alibi_slopes": torch.rand(2, 4)},
        {"bias": torch.randn(2, 1, 6, 9).masked_fill(torch.rand(2, 1, 6, 9) < 0.2, -torch.inf)},
        {"causal": True, "window": (3, 2), "dropout_p": 0.25, "rng_state": RNG},
        {"causal": True, "window": (1, 0), "sinks": torch.tensor([0.5, -1, 2, -torch.inf])},
    ],
    ids=["causal", "softcap-alibi", "bias-alibi", "bias-batch", "dropout", "sinks"],
)
@pytest.mark.parametrize("lengths", [(6, 9), (6, 2)], ids=str)
def test_every_row_is_what_the_semantics_say(
    lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    if "bias" in options:
        options = {**options, "bias": options["bias"][..., : lengths[1]]}
    call = make(lengths, torch.float64, 8, **options)
    out, lse, _ = call.written_out(torch.float64)
    for b, h, i in np.ndindex(2, 4, lengths[0]):
        expected, expected_lse = by_hand(call, b, h, i)
        assert out[b, i, h].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert float(lse[b, h, i]) == pytest.approx(expected_lse, rel=1e-9)


def test_packed_sequences_are_dense_ones_side_by_side() -> None:
    q, k, v = torch.randn(20, 4, 8), torch.randn(24, 2, 8), torch.randn(24, 2, 8)
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.2, "rng_state": RNG}
    packed = Call(
        *(q, k, v),
        **options,
        cu_seqlens_q=torch.tensor([2, 2, 9, 20]),
        cu_seqlens_k=torch.tensor([1, 8, 8, 24]),
        seqused_k=torch.tensor([7, 0, 13]),
    )
    out, lse, _ = packed.written_out(torch.float64)
    assert (out[:9] == 0).all()
    assert (lse[:, :9] == -torch.inf).all()
    alone = Call(q[None, 9:], k[None, 8:21], v[None, 8:21], **options, first_batch=2)
    torch.testing.assert_close(out[9:], alone.written_out(torch.float64).out[0])
    grads = packed.gradients(torch.float64, torch.ones(20, 4, 8))
    assert grads["k"].shape == k.shape
    assert (grads["k"][21:] == 0).all()


@DTYPES
@pytest.mark.parametrize("feature", RIGHT)
@pytest.mark.parametrize("lengths", [(150, 200), (1, 7), (130, 1), (60, 33)], ids=str)
def test_a_right_kernel_is_within_the_budget(
    lengths: tuple[int, int], feature: str, dtype: torch.dtype
) -> None:
    call = make(lengths, dtype, **RIGHT[feature])
    grad_out, grad_lse = torch.randn_like(call.q), torch.randn(2, 4, lengths[0])
    out, lse, gradients = run(call, grad_out, grad_lse, Mistakes())
    assert_right(call, out, lse)
    assert_gradients_right(call, gradients, grad_out, grad_lse)


@DTYPES
@pytest.mark.parametrize(
    ("feature", "mistakes"),
    [
        ("plain", Mistakes(round_results=truncated)),
        ("causal", Mistakes(round_weights=truncated)),
        ("causal", Mistakes(top_left=True)),
        ("window", Mistakes(wider=1)),
        ("dropout", Mistakes(drops_transposed=True)),
    ],
    ids=["truncates-results", "truncates-weights", "top-left", "wider-window", "other-dropout"],
)
def test_a_wrong_output_is_not(feature: str, mistakes: Mistakes, dtype: torch.dtype) -> None:
    lengths = (300, 300) if mistakes.drops_transposed else (300, 400)
    call = make(lengths, dtype, **RIGHT[feature])
    out, _, _ = run(call, torch.randn_like(call.q), torch.zeros(2, 4, 300), mistakes)
    with pytest.raises(AssertionError, match=r"error|lean"):
        assert_right(call, out)


@DTYPES
@pytest.mark.parametrize(
    ("feature", "mistakes", "which"),
    [
        ("softcap", Mistakes(forgets_softcap_gradient=True), "q"),
        ("plain", Mistakes(forgets_lse_gradient=True), "k"),
        ("plain", Mistakes(round_weights=truncated), "q"),
        ("plain", Mistakes(round_weights=truncated), "v"),
        ("causal", Mistakes(round_results=truncated), "k"),
    ],
    ids=["softcap", "lse", "truncates-dS", "truncates-P", "truncates-results"],
)
def test_a_wrong_gradient_is_not(
    feature: str, mistakes: Mistakes, which: str, dtype: torch.dtype
) -> None:
    # Enough rows for a lean to stand out from chance, whatever the random numbers are.
    lengths = (400, 500) if truncated in vars(mistakes).values() else (60, 70)
    call = make(lengths, dtype, **RIGHT[feature])
    grad_out, grad_lse = torch.randn_like(call.q), torch.randn(2, 4, lengths[0])
    _, _, gradients = run(call, grad_out, grad_lse, mistakes)
    with pytest.raises(AssertionError, match=rf"d{which}: .*(error|lean)"):
        assert_gradients_right(call, {which: gradients[which]}, grad_out, grad_lse)
