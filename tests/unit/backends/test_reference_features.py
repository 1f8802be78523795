"""Every feature of the reference, forward and backward, against the oracle and by differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Call, assert_gradients_right, assert_right

import flashvar
from flashvar.backends.reference.attention import scores

Options = dict[str, Any]

RNG = torch.tensor([0x1234_5678_9ABC_DEF0, 7])
# Options that a call takes, as functions of its lengths where they are tensors.
FEATURES: dict[str, Callable[[int, int], Options]] = {
    "plain": lambda q, k: {},
    "causal": lambda q, k: {"causal": True},
    "window": lambda q, k: {"window": (3, 2)},
    "window-left": lambda q, k: {"window": (2, -1)},
    "window-right": lambda q, k: {"window": (-1, 0)},
    "causal-window": lambda q, k: {"causal": True, "window": (4, 3)},
    "window-larger-than-keys": lambda q, k: {"window": (500, 500)},
    "softcap": lambda q, k: {"softcap": 0.7},
    "bias": lambda q, k: {"bias": torch.randn(2, 4, q, k)},
    "shared-bias": lambda q, k: {"bias": torch.randn(1, 1, q, k)},
    "expanded-bias": lambda q, k: {"bias": torch.randn(2, 1, 1, k).expand(-1, -1, q, -1)},
    "sinks": lambda q, k: {"sinks": torch.randn(4) + 1, "causal": True},
    "sinks-window": lambda q, k: {
        "sinks": torch.tensor([0.0, -torch.inf, 9, -9]),
        "window": (1, 0),
    },
    "alibi": lambda q, k: {"alibi_slopes": torch.rand(4), "causal": True},
    "alibi-of-each": lambda q, k: {"alibi_slopes": torch.rand(2, 4)},
    "dropout": lambda q, k: {"dropout_p": 0.3, "rng_state": RNG},
    "everything": lambda q, k: {
        "causal": True,
        "window": (6, -1),
        "softcap": 1.5,
        "bias": torch.randn(2, 1, q, k),
        "sinks": torch.randn(4),
        "alibi_slopes": torch.rand(2, 4),
        "dropout_p": 0.2,
        "rng_state": RNG,
        "scale": -0.3,
    },
}
LENGTHS = [(9, 9), (5, 19), (19, 5), (1, 7)]


def make(seqlen_q: int, seqlen_k: int, dtype: torch.dtype, head_dim_v: int = 16) -> list[Any]:
    q = torch.randn(2, seqlen_q, 4, 16)
    k, v = torch.randn(2, seqlen_k, 2, 16), torch.randn(2, seqlen_k, 2, head_dim_v)
    return [x.to(dtype) for x in (q, k, v)]


def asked(call: Call) -> Options:
    """The options of a call as the public function spells them."""
    return {
        "causal": call.causal,
        "scale": call.scale,
        "window_size": call.window,
        "softcap": call.softcap,
        "bias": call.bias,
        "sinks": call.sinks,
        "alibi_slopes": call.alibi_slopes,
        "dropout_p": call.dropout_p,
        "rng_state": call.rng_state,
        "return_lse": True,
    }


def check(call: Call) -> None:
    leaves = {name: getattr(call, name) for name in ("q", "k", "v", "bias", "sinks")}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None}
    out, lse = flashvar.attention(**{**asked(call), **leaves})
    assert_right(call, out.detach(), lse.detach())
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (grad_out, grad_lse))
    assert_gradients_right(call, dict(zip(leaves, found, strict=True)), grad_out, grad_lse)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, lengths: tuple[int, int]) -> None:
    options = FEATURES[feature](*lengths)
    check(Call(*make(*lengths, torch.float32), **options))


@pytest.mark.parametrize("feature", FEATURES)
def test_features_in_chunks(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_SCORES_AT_ONCE", 200)
    check(Call(*make(13, 21, torch.float32), **FEATURES[feature](13, 21)))


@pytest.mark.parametrize("head_dim_v", [1, 8, 40])
def test_values_of_another_head_dim(head_dim_v: int) -> None:
    check(Call(*make(7, 9, torch.float32, head_dim_v), causal=True))


@pytest.mark.parametrize("feature", ["plain", "softcap", "bias", "sinks", "dropout", "everything"])
def test_half_precision(feature: str) -> None:
    check(Call(*make(33, 47, torch.bfloat16), **FEATURES[feature](33, 47)))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_by_differences(feature: str, layout: str) -> None:
    q, k, v = (x.requires_grad_() for x in make(4, 6, torch.float64, 10))
    options = asked(Call(q, k, v, **FEATURES[feature](4, 6)))
    extras = {name: options.pop(name) for name in ("bias", "sinks")}
    extras = {name: x.double().requires_grad_() for name, x in extras.items() if x is not None}

    def call(*leaves: torch.Tensor) -> list[torch.Tensor]:
        given = leaves[:3]
        if layout == "bhsd":
            given = tuple(x.transpose(1, 2) for x in given)
        more = dict(zip(extras, leaves[3:], strict=True))
        out, lse = flashvar.attention(*given, **more, layout=layout, **options)
        return [out, lse.masked_fill(lse == -torch.inf, 0.0)]

    assert torch.autograd.gradcheck(call, (q, k, v, *extras.values()), fast_mode=True)


def test_gradients_of_rows_that_see_nothing_are_zero() -> None:
    q, k, v = (x.requires_grad_() for x in make(9, 4, torch.float32))
    out, lse = flashvar.attention(q, k, v, causal=True, return_lse=True)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :5] == 0).all()


def test_a_row_that_sees_no_key_has_its_sink() -> None:
    q, k, v = make(9, 4, torch.float32)
    sinks = torch.randn(4, requires_grad=True)
    out, lse = flashvar.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :5] == 0).all()
    torch.testing.assert_close(lse[:, :, :5], sinks[:, None].expand(2, 4, 5))
    (found,) = torch.autograd.grad(lse[:, :, :5].sum(), sinks)
    torch.testing.assert_close(found, torch.full((4,), 10.0))


def test_sinks_of_a_call_without_keys() -> None:
    q, k, v = make(3, 0, torch.float32)
    sinks = torch.randn(4, requires_grad=True)
    out, lse = flashvar.attention(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[:, None].expand(2, 4, 3))
    (found,) = torch.autograd.grad(lse.sum(), sinks)
    torch.testing.assert_close(found, torch.full((4,), 6.0))


def test_a_sink_is_merged_once() -> None:
    q, k, v = make(5, 12, torch.float64)
    sinks = torch.randn(4)
    whole = flashvar.attention(q, k, v, sinks=sinks, return_lse=True)
    parts = [
        flashvar.attention(q, k[:, rows], v[:, rows], sinks=sink, return_lse=True)
        for rows, sink in ((slice(0, 5), sinks), (slice(5, None), None))
    ]
    outs, lses = (list(one) for one in zip(*parts, strict=True))
    torch.testing.assert_close(flashvar.merge_states(outs, lses), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_sinks_have_their_dtype(dtype: torch.dtype) -> None:
    sinks = torch.randn(4).to(dtype).requires_grad_()
    out = flashvar.attention(*make(5, 7, torch.bfloat16), sinks=sinks)
    assert torch.autograd.grad(out.sum(), sinks)[0].dtype == dtype


def test_window_includes_both_ends() -> None:
    q, k, v = torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8), torch.eye(6)[None, :, None]
    out = flashvar.attention(q, k, v, window_size=(2, 1))[0, :, 0]
    for query in range(6):
        assert out[query].nonzero().flatten().tolist() == [
            key for key in range(6) if query - 2 <= key <= query + 1
        ]


def test_alibi_has_the_true_log_sum_exp_under_a_causal_mask() -> None:
    q, k, v = make(5, 8, torch.float64)
    slopes = torch.rand(4)
    _, lse = flashvar.attention(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True)
    distance = (torch.arange(5)[:, None] + 3 - torch.arange(8)).abs()
    bias = (-slopes.double()[:, None, None] * distance)[None]
    _, expected = flashvar.attention(q, k, v, causal=True, bias=bias, return_lse=True)
    torch.testing.assert_close(lse, expected)


def test_infinite_bias_hides_keys() -> None:
    q, k, v = make(5, 8, torch.float32)
    bias = torch.zeros(1, 1, 5, 8)
    bias[..., 6:] = -torch.inf
    out = flashvar.attention(q, k, v, bias=bias)
    torch.testing.assert_close(out, flashvar.attention(q, k[:, :6], v[:, :6]))


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min], ids=str)
def test_a_mask_of_large_finite_numbers_is_one_of_infinite_ones(lowest: float) -> None:
    """Also in a row without other keys: its log-sum-exp could not tell how many there are."""

    def values_and_gradients(number: float) -> list[torch.Tensor]:
        torch.manual_seed(0)
        bias = torch.zeros(1, 1, 5, 8)
        bias[..., 6:] = bias[:, :, 2] = number
        leaves = [x.requires_grad_() for x in (*make(5, 8, torch.float32), bias)]
        out, lse = flashvar.attention(*leaves[:3], bias=bias, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.square().sum(), leaves)]

    found, expected = values_and_gradients(lowest), values_and_gradients(-torch.inf)
    assert expected[1][:, :, 2].isneginf().all()
    torch.testing.assert_close(found, expected, atol=0.0, rtol=0.0)
