"""Dropout: exactly the weights of the definition, the same in both directions and every backend."""

from __future__ import annotations

import pytest
import torch
from device_call import DEVICE, OPS, require, run
from features import dense, packed
from oracle import Call
from torch.utils.checkpoint import checkpoint

import flashvar

P = 0.3
HEAD_DIM = 64


def state(seed: int, offset: int) -> torch.Tensor:
    return torch.tensor([seed, offset], device=DEVICE)


def read_mask(call: Call, backend: str) -> torch.Tensor:
    """[batch, heads, seqlen_q, seqlen_k] of a dense call, read off outputs 64 keys at a time.

    Equal scores and unit vectors as values: an output is 0 exactly where its key was dropped.
    """
    columns = []
    for first in range(0, call.k.shape[1], HEAD_DIM):
        v = torch.zeros_like(call.k)
        keys = torch.arange(first, min(first + HEAD_DIM, call.k.shape[1]), device=DEVICE)
        v[:, keys, :, keys - first] = 1.0
        blank = Call(**{**vars(call), "q": torch.zeros_like(call.q), "v": v})
        out, _ = run(blank, backend)
        columns.append(out.transpose(1, 2)[..., : len(keys)] != 0)
    return torch.cat(columns, -1)


def read_mask_of_backward(call: Call, backend: str) -> torch.Tensor:
    """The same of heads that share no keys, read off dV = P^T dO with unit vectors as dO."""
    rows = []
    for first in range(0, call.q.shape[1], HEAD_DIM):
        grad_out = torch.zeros_like(call.q)
        queries = torch.arange(first, min(first + HEAD_DIM, call.q.shape[1]), device=DEVICE)
        grad_out[:, queries, :, queries - first] = 1.0
        v = call.v.detach().requires_grad_()
        blank = Call(**{**vars(call), "q": torch.zeros_like(call.q), "v": v})
        out, _ = run(blank, backend)
        (grad,) = torch.autograd.grad(out, v, grad_out)
        rows.append(grad.transpose(1, 2)[..., : len(queries)].mT != 0)
    return torch.cat(rows, 2)


@pytest.mark.parametrize(
    "seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)], ids=lambda s: f"seed{s}"
)
@pytest.mark.parametrize("offset", [0, 5, 2**32 + 3], ids=lambda o: f"offset{o}")
def test_the_mask_is_that_of_the_definition(offset: int, seed: int, backend: str) -> None:
    call = dense(HEAD_DIM, torch.bfloat16, (150, 200), dropout_p=P, rng_state=state(seed, offset))
    require(call, backend)
    assert torch.equal(read_mask(call, backend), call.kept())


@pytest.mark.parametrize("dropout_p", [1e-6, 0.1, 0.5, 0.9, 0.999], ids=str)
def test_the_backward_drops_the_same(dropout_p: float, backend: str) -> None:
    call = dense(
        *(HEAD_DIM, torch.bfloat16, (150, 200)),
        heads=(3, 3),
        dropout_p=dropout_p,
        rng_state=state(77, 3),
    )
    for op in OPS:
        require(call, backend, op)
    assert torch.equal(read_mask(call, backend), call.kept())
    assert torch.equal(read_mask_of_backward(call, backend), call.kept())


def test_packed_sequences_have_masks_of_their_own(backend: str) -> None:
    call = packed(
        *(HEAD_DIM, torch.bfloat16, (70, 0, 64, 33), (64, 20, 40, 64)),
        heads=(2, 1),
        dropout_p=P,
        rng_state=state(5, 6),
    )
    require(call, backend)
    k, v = torch.zeros_like(call.k), torch.zeros_like(call.v)
    for part in call.parts():
        length = part.rows_k.stop - part.rows_k.start
        v[part.rows_k, :, :length] = torch.eye(length, device=DEVICE, dtype=v.dtype)[:, None]
    out, _ = run(Call(**{**vars(call), "k": k, "v": v}), backend)
    for part in call.parts():
        found = out[part.rows_q].transpose(0, 1)[..., : part.rows_k.stop - part.rows_k.start] != 0
        assert torch.equal(found, part.call.kept()[0])


def test_the_kept_share_is_what_was_asked_for(backend: str) -> None:
    """Over 21 million weights of one call: within 5 standard deviations, per head too."""
    count, p = 20 * 1024 * 1024, 0.1
    call = dense(
        *(HEAD_DIM, torch.bfloat16, (1024, 1024)),
        heads=(10, 10),
        dropout_p=p,
        rng_state=state(torch.randint(2**62, ()).item(), 0),
    )
    require(call, backend)
    mask = read_mask(call, backend).double()
    for share, number in ((mask.mean(), count), (mask.mean((2, 3)), 1024 * 1024)):
        limit = 5 * (p * (1 - p) / number) ** 0.5
        assert (share - (1 - p)).abs().amax() < limit


def test_a_state_is_drawn_where_none_is_given(backend: str) -> None:
    call = dense(HEAD_DIM, torch.bfloat16, dropout_p=P)
    require(call, backend)
    torch.manual_seed(11)
    first, _ = run(call, backend)
    second, _ = run(call, backend)
    torch.manual_seed(11)
    again, _ = run(call, backend)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_no_dropout_is_no_dropout(backend: str) -> None:
    call = dense(HEAD_DIM, torch.bfloat16, causal=True)
    require(call, backend)
    none, _ = run(call, backend)
    zero, _ = run(Call(**{**vars(call), "rng_state": state(1, 2)}), backend)
    assert torch.equal(none, zero)


def test_a_checkpoint_drops_the_same_again(backend: str) -> None:
    call = dense(HEAD_DIM, torch.bfloat16, dropout_p=P, causal=True)
    for op in OPS:
        require(call, backend, op)
    leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    grad_out = torch.randn_like(call.q)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return flashvar.attention(*tensors, causal=True, dropout_p=P, backend=backend)

    results = []
    for through in (layer, lambda *tensors: checkpoint(layer, *tensors, use_reentrant=False)):
        torch.manual_seed(3)
        out = through(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(plain, again)
    assert torch.equal(results[0][0], results[1][0])


def test_replays_of_a_graph_differ(backend: str) -> None:
    if DEVICE == "cpu":
        pytest.skip("CUDA graphs need a device")
    call = dense(HEAD_DIM, torch.bfloat16, heads=(3, 3), dropout_p=P)
    for op in OPS:
        require(call, backend, op)
    v = call.v.detach().requires_grad_()
    captured = Call(**{**vars(call), "q": torch.zeros_like(call.q), "v": v})
    grad_out = torch.zeros_like(call.q)
    grad_out[:, torch.arange(64), :, torch.arange(64)] = 1.0

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out, _ = run(captured, backend)
        return out, torch.autograd.grad(out, v, grad_out)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad = step()
    seen = []
    for _ in range(3):
        graph.replay()
        mask = (grad.transpose(1, 2) != 0).mT  # [batch, heads, first 64 queries, keys]
        # The forward of this replay dropped the same: out = mask v / (keys (1 - p)).
        expected = mask.double() @ call.v.transpose(1, 2).double() / (270 * (1 - P))
        found = out.transpose(1, 2)[:, :, :64].double()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
        seen.append(mask.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
