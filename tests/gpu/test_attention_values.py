"""Values that break softmax: logits too large, infinite or equal, rows without keys, nothing."""

from __future__ import annotations

import pytest
import torch
from device_call import DEVICE, attend, check, check_gradients, differentiate, run
from features import bias, dense, packed, slopes
from oracle import Call, assert_lse_right, assert_right
from random_cases import with_nan_around

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def with_logits(logit: float, lengths: tuple[int, int], dtype: torch.dtype, causal: bool) -> Call:
    """Scores all near one value; keys and values end where their memory turns to NaN."""
    call = dense(64, dtype, lengths)
    q, k = call.q * 0.01, call.k * 0.01
    q[..., 0], k[..., 0] = 1.0, logit
    return Call(q, with_nan_around(k), with_nan_around(call.v), causal, scale=1.0)


@pytest.mark.parametrize("scale", [0.0, -0.2, 1.7, 1e-6])
@MASKS
def test_scales(scale: float, causal: bool, backend: str) -> None:
    call = dense(64, torch.bfloat16, causal=causal, scale=scale)
    check(call, backend)
    check_gradients(call, backend)


@DTYPES
@pytest.mark.parametrize("logit", [-120.0, 120.0, 1e4], ids=str)
@pytest.mark.parametrize("seqlen_k", [65, 200, 256])
@MASKS
def test_extreme_logits(
    causal: bool, seqlen_k: int, logit: float, dtype: torch.dtype, backend: str
) -> None:
    call = with_logits(logit, (150, seqlen_k), dtype, causal)
    check(call, backend)
    check_gradients(call, backend, lse_gradient=True)


@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.parametrize("logit", [-1e4, 1e4], ids=str)
def test_a_saturated_softcap_has_no_gradient(logit: float, softcap: float, backend: str) -> None:
    base = with_logits(logit, (150, 200), torch.bfloat16, False)
    call = Call(**{**vars(base), "softcap": softcap})
    check(call, backend)
    grads = differentiate(call, backend, torch.randn_like(call.q))
    assert (grads["q"] == 0).all()
    assert (grads["k"] == 0).all()


def test_logits_beyond_float16(backend: str) -> None:
    """Scores overflow the inputs' dtype, not float32: one key wins, and no NaN appears."""
    call = dense(64, torch.half, (70, 130))
    q, k = call.q * 200, call.k * 200
    large = Call(q, k, call.v, scale=1.0)
    out, lse = attend(large, backend)
    expected = large.written_out(torch.float64)
    assert float(expected.scores.abs().amax()) > 2**17
    assert_lse_right(lse, expected.lse, expected.scores)
    best = expected.scores.topk(2, dim=-1).values
    clear = (best[..., 0] - best[..., 1] > 20).transpose(1, 2)  # no tie that float32 cannot tell
    assert (out.double() - expected.out)[clear].abs().amax() <= 2e-2
    assert all(g.isfinite().all() for g in differentiate(large, backend, call.q).values())


def test_identical_rows(backend: str) -> None:
    call = dense(64, torch.bfloat16)
    same = Call(call.q[:, :1].expand_as(call.q), call.k[:, :1].expand_as(call.k), call.v)
    check(same, backend)
    check_gradients(same, backend)


@pytest.mark.parametrize("hidden", [slice(0, 5), slice(0, 140), slice(130, 270)], ids=str)
def test_keys_at_minus_infinity_weigh_nothing(hidden: slice, backend: str) -> None:
    call = dense(64, torch.bfloat16)
    k = call.k.clone()
    q = call.q.abs()
    k[:, hidden] = 0.0
    k[:, hidden, :, 0] = -torch.inf
    q[..., 0] += 1.0
    out, lse = attend(Call(q, k, call.v), backend)
    rest = torch.ones(270, dtype=torch.bool, device=DEVICE)
    rest[hidden] = False
    assert_right(Call(q, k[:, rest], call.v[:, rest]), out, lse)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_bad_query_stays_alone(value: float, backend: str) -> None:
    call = dense(64, torch.bfloat16, causal=True)
    clean, clean_lse = attend(call, backend)
    q = call.q.clone()
    q[1, 70, 2, 5] = value
    out, lse = attend(Call(q, call.k, call.v, causal=True), backend)
    bad = torch.zeros(2, 150, 4, dtype=torch.bool, device=DEVICE)
    bad[1, 70, 2] = True
    assert out[bad].isnan().all()
    assert not lse.transpose(1, 2)[bad].isfinite().any()
    # Rows of its warp may be rounded relative to another maximum: one step of bf16 apart.
    torch.testing.assert_close(out[~bad], clean[~bad], rtol=2**-7, atol=2**-12)
    lse_of_others, clean_of_others = (x.transpose(1, 2)[~bad] for x in (lse, clean_lse))
    torch.testing.assert_close(lse_of_others, clean_of_others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_bad_key_stays_in_its_head(which: str, backend: str) -> None:
    call = dense(64, torch.bfloat16)
    clean, _ = attend(call, backend)
    tensor = getattr(call, which).clone()
    tensor[1, 70, 1, 5] = torch.nan
    out, _ = attend(Call(**{**vars(call), which: tensor}), backend)
    bad = torch.zeros(2, 4, dtype=torch.bool, device=DEVICE)
    bad[1, 2:] = True  # query heads 2 and 3 read key head 1
    by_head, clean_by_head = out.transpose(1, 2), clean.transpose(1, 2)
    assert by_head[bad].isnan().any(-1).all()
    assert torch.equal(by_head[~bad], clean_by_head[~bad])


BLIND = {
    "causal": lambda: (dense(64, torch.bfloat16, (300, 100), causal=True), 200),
    "causal-one-key": lambda: (dense(64, torch.bfloat16, (200, 1), causal=True), 199),
    "causal-dropout": lambda: (
        dense(
            *(64, torch.bfloat16, (300, 100)),
            causal=True,
            dropout_p=0.3,
            rng_state=torch.tensor([1, 2], device=DEVICE),
        ),
        200,
    ),
    "alibi": lambda: (dense(64, torch.half, (300, 100), causal=True, alibi_slopes=slopes(4)), 200),
    "softcap": lambda: (dense(128, torch.half, (300, 100), causal=True, softcap=4.0), 200),
    "window": lambda: (dense(64, torch.bfloat16, (300, 100), window=(-1, 0)), 200),
    "window-before-all": lambda: (dense(64, torch.bfloat16, (150, 40), window=(0, 0)), 110),
    "bias": lambda: (
        dense(
            64, torch.bfloat16, bias=bias(1, 1, torch.float32).index_fill(2, _blind(), -torch.inf)
        ),
        90,
    ),
}


def _blind() -> torch.Tensor:
    return torch.arange(90, device=DEVICE)


@pytest.mark.parametrize("kind", BLIND)
def test_rows_that_see_nothing(kind: str, backend: str) -> None:
    call, blind = BLIND[kind]()
    out, lse = attend(call, backend)
    assert (out[:, :blind] == 0).all()
    assert (lse[..., :blind] == -torch.inf).all()
    assert lse[..., blind:].isfinite().all()
    grad_lse = torch.randn(lse.shape, device=DEVICE)
    grads = differentiate(call, backend, torch.randn_like(out), grad_lse)
    assert (grads["q"][:, :blind] == 0).all()
    assert all(grad.isfinite().all() for grad in grads.values())
    check_gradients(call, backend, lse_gradient=True)


@pytest.mark.parametrize("used", [(0, 0), (0, 50), (90, 0)], ids=str)
def test_sequences_without_keys(used: tuple[int, int], backend: str) -> None:
    call = packed(64, torch.bfloat16, (70, 33), (90, 64), used=used, causal=True)
    out, lse = attend(call, backend)
    for rows, keys in ((slice(0, 70), used[0]), (slice(70, None), used[1])):
        if keys == 0:
            assert (out[rows] == 0).all()
            assert (lse[:, rows] == -torch.inf).all()
    check_gradients(call, backend, lse_gradient=True)


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]
)
def test_empty(batch: int, seqlen_q: int, seqlen_k: int, backend: str) -> None:
    call = dense(64, torch.bfloat16, (seqlen_q, seqlen_k), batch=batch)
    out, lse = attend(call, backend)
    assert out.shape == call.q.shape
    assert lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    grads = differentiate(call, backend, torch.ones_like(out))
    for name, grad in grads.items():
        assert grad.shape == getattr(call, name).shape
        assert (grad == 0).all()


@pytest.mark.parametrize("lengths", [((0, 0), (5, 9)), ((5, 9), (0, 0)), ((0, 0), (0, 0))], ids=str)
def test_empty_packed(lengths: tuple[tuple[int, int], tuple[int, int]], backend: str) -> None:
    call = packed(64, torch.bfloat16, *lengths)
    out, lse = run(call, backend)
    assert out.shape == call.q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    grads = differentiate(call, backend, torch.ones_like(out))
    assert all((grad == 0).all() for grad in grads.values())
