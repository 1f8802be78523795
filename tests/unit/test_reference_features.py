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
    "alibi": lambda q, k: {"alibi_slopes": torch.rand(4), "causal": True},
    "alibi-of-each": lambda q, k: {"alibi_slopes": torch.rand(2, 4)},
    "dropout": lambda q, k: {"dropout_p": 0.3, "rng_state": RNG},
    "everything": lambda q, k: {
        "causal": True,
        "window": (6, -1),
        "softcap": 1.5,
        "bias": torch.randn(2, 1, q, k),
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
        "alibi_slopes": call.alibi_slopes,
        "dropout_p": call.dropout_p,
        "rng_state": call.rng_state,
        "return_lse": True,
    }


def check(call: Call) -> None:
    leaves = {name: getattr(call, name) for name in ("q", "k", "v", "bias")}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None}
    out, lse = flashvar.attention(
        leaves["q"], leaves["k"], leaves["v"], **{**asked(call), "bias": leaves.get("bias")}
    )
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


@pytest.mark.parametrize("feature", ["plain", "softcap", "bias", "dropout", "everything"])
def test_half_precision(feature: str) -> None:
    check(Call(*make(33, 47, torch.bfloat16), **FEATURES[feature](33, 47)))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_by_differences(feature: str, layout: str) -> None:
    q, k, v = (x.requires_grad_() for x in make(4, 6, torch.float64, 10))
    options = asked(Call(q, k, v, **FEATURES[feature](4, 6)))
    bias = options.pop("bias")
    bias = None if bias is None else bias.double().requires_grad_()

    def call(*leaves: torch.Tensor) -> list[torch.Tensor]:
        given = leaves[:3]
        if layout == "bhsd":
            given = tuple(x.transpose(1, 2) for x in given)
        out, lse = flashvar.attention(
            *given, bias=leaves[3] if len(leaves) > 3 else None, layout=layout, **options
        )
        return [out, lse.masked_fill(lse == -torch.inf, 0.0)]

    leaves = (q, k, v) if bias is None else (q, k, v, bias)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_gradients_of_rows_that_see_nothing_are_zero() -> None:
    q, k, v = (x.requires_grad_() for x in make(9, 4, torch.float32))
    out, lse = flashvar.attention(q, k, v, causal=True, return_lse=True)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :5] == 0).all()


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
