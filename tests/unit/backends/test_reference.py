"""The CPU reference against attention written out in float64, with inputs that try to break it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Call, assert_right

import flashvar
from flashvar.backends.reference.attention import forward, scores

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [(1, 1), (1, 9), (9, 1), (5, 5), (7, 33), (33, 7)]


def make(
    seqlen_q: int,
    seqlen_k: int,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 24,
    batch: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, seqlen_q, heads[0], head_dim).to(dtype)
    k, v = (torch.randn(batch, seqlen_k, heads[1], head_dim).to(dtype) for _ in range(2))
    return q, k, v


def check(call: Call) -> None:
    out, lse = flashvar.attention(
        call.q, call.k, call.v, causal=call.causal, scale=call.scale, return_lse=True
    )
    assert out.dtype == call.q.dtype
    assert out.is_contiguous()
    assert_right(call, out, lse)


@pytest.fixture(params=["one-chunk", "many-chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with all query rows at once, and with a few at a time."""
    if request.param == "many-chunks":
        monkeypatch.setattr(scores, "_SCORES_AT_ONCE", 100)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype: torch.dtype, lengths: tuple[int, int], causal: bool) -> None:
    check(Call(*make(*lengths, dtype), causal))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 96, 300])
def test_heads_and_head_dims(heads: tuple[int, int], head_dim: int) -> None:
    check(Call(*make(6, 11, heads=heads, head_dim=head_dim), causal=True))


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0, 1e-30])
def test_scales(scale: float) -> None:
    check(Call(*make(6, 11), causal=True, scale=scale))


@pytest.mark.parametrize("logit", [-120.0, 1e4], ids=["very-negative", "very-positive"])
def test_extreme_logits(logit: float) -> None:
    q, k, v = make(33, 70, head_dim=16)
    q, k = q * 1e-3, k * 1e-3
    q[..., 0], k[..., 0] = 1.0, logit
    check(Call(q, k, v, scale=1.0))
    check(Call(q, k, v, scale=1.0, causal=True))


def test_identical_keys_average_the_values() -> None:
    q, k, v = make(5, 12)
    k = k[:, :1].expand_as(k)
    out = flashvar.attention(q, k, v)
    mean = v.mean(1, keepdim=True).repeat_interleave(2, dim=2).expand_as(out)
    torch.testing.assert_close(out, mean)


@pytest.mark.usefixtures("chunks")
def test_rows_that_see_nothing() -> None:
    q, k, v = make(9, 4)
    out, lse = flashvar.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :5] == 0).all()
    assert (lse[..., :5] == -torch.inf).all()
    assert lse[..., 5:].isfinite().all()


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)]
)
def test_empty(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = (t.requires_grad_() for t in make(seqlen_q, seqlen_k, batch=batch))
    out, lse = flashvar.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    for tensor, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.shape == tensor.shape
        assert (grad == 0).all()


def test_what_lies_between_rows_is_not_read() -> None:
    tensors = make(9, 20, head_dim=8)
    padded = []
    for tensor in tensors:
        batch, length, heads, head_dim = tensor.shape
        room = torch.full((batch + 1, length + 3, heads + 2, head_dim + 5), torch.nan)
        view = room[1:, 2:-1, 1:-1, 3:-2]
        padded.append(view.copy_(tensor))
    check(Call(*padded, causal=True))


def test_heads_first_is_the_same_without_copies() -> None:
    q, k, v = make(9, 20)
    expected, expected_lse = flashvar.attention(q, k, v, causal=True, return_lse=True)
    views = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    out, lse = flashvar.attention(*views, causal=True, return_lse=True, layout="bhsd")
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    turned = flashvar.attention(*views, causal=True, layout="bhsd->bshd")
    assert turned.is_contiguous()
    torch.testing.assert_close(turned, expected, rtol=0, atol=0)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_expanded_dimensions(which: int) -> None:
    tensors = list(make(9, 20))
    tensors[which] = tensors[which][:1, :, :1].expand_as(tensors[which])
    check(Call(*tensors, causal=True))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "bhsd->bshd"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(5, 8), (8, 5)], ids=str)
def test_gradients(lengths: tuple[int, int], causal: bool, layout: str) -> None:
    tensors = [t.requires_grad_() for t in make(*lengths, torch.float64, head_dim=2, batch=1)]

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        if layout.startswith("bhsd"):
            inputs = tuple(tensor.transpose(1, 2) for tensor in inputs)
        out, lse = flashvar.attention(
            *inputs, causal=causal, scale=-0.4, return_lse=True, layout=layout
        )
        return [out, lse.masked_fill(lse == -torch.inf, 0.0)]

    # Along random directions: a wrong entry of a Jacobian shows in nearly all of them.
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


def test_gradients_of_half_precision_are_computed_in_float32() -> None:
    tensors = [tensor.requires_grad_() for tensor in make(17, 30, torch.bfloat16)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    weights = torch.randn(2, 17, 4, 24)
    found = torch.autograd.grad((flashvar.attention(*tensors) * weights).sum(), tensors)
    wanted = torch.autograd.grad((flashvar.attention(*exact) * weights).sum(), exact)
    for grad, expected in zip(found, wanted, strict=True):
        assert grad.dtype == torch.bfloat16
        error = (grad.double() - expected).abs().amax()
        assert error <= 2 * torch.finfo(torch.bfloat16).eps * expected.abs().amax()


def test_gradient_of_one_input_alone() -> None:
    q, k, v = make(5, 8)
    v.requires_grad_()
    (grad,) = torch.autograd.grad(flashvar.attention(q, k, v).sum(), v)
    torch.testing.assert_close(grad.sum(), torch.tensor(2.0 * 5 * 4 * 24))


def test_memory_stays_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    widest: list[int] = []
    compute = forward.scores

    def watched(*arguments: Any) -> scores.Scores:
        result = compute(*arguments)
        widest.append(result.final.numel())
        return result

    monkeypatch.setattr(forward, "scores", watched)
    monkeypatch.setattr(scores, "_SCORES_AT_ONCE", 4096)
    check(Call(*make(200, 100, heads=(2, 1), head_dim=4)))
    assert max(widest) <= 4096
    assert len(widest) > 10
