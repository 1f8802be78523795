"""The CUDA kernels of merge_states, run on the host, beside the reference."""

from __future__ import annotations

import host_program
import pytest
import torch
from host_merge_states import CHOSEN, HostLibrary

from flashvar.backends.cuda import merge_states as cuda
from flashvar.backends.reference.merge_states import formula
from flashvar.ops.merge_states.problem import Parts, Wanted

pytestmark = host_program.needs_compiler
NAN, INF = torch.nan, torch.inf
SHAPE = (1, 5, 3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    return HostLibrary(tmp_path_factory.mktemp("merge_states"))


@pytest.fixture(autouse=True)
def _on_the_host(library: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    library.install(monkeypatch)


def made(parts: int, head_dim: int, stacked: bool = False) -> Parts:
    batch, seqlen, heads = SHAPE
    outs = torch.randn(parts, batch, seqlen, heads, head_dim)
    lses = 4 * torch.randn(parts, batch, heads, seqlen)
    if stacked:
        return Parts((outs,), (lses,), True)
    return Parts(tuple(outs.unbind()), tuple(lses.unbind()), False)


def forward(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    first = parts.outs[0][0] if parts.stacked else parts.outs[0]
    out = torch.full(first.shape, NAN)
    lse = torch.full((first.shape[0], first.shape[2], first.shape[1]), NAN)
    cuda.prepare_forward(CHOSEN, parts, out, lse)(parts, out, lse)
    return out, lse


@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize(("parts", "head_dim"), [(1, 8), (3, 16), (9, 7), (2, 1), (300, 8)])
def test_values(parts: int, head_dim: int, stacked: bool) -> None:
    given = made(parts, head_dim, stacked)
    torch.testing.assert_close(forward(given), formula.forward(given))


# Lower than the highest by so much, and whether the part counts: e^-103.97 is no longer 0 in fp32.
BELOW = {80.0: True, 89.0: True, 100.0: True, 103.96: True, 103.98: False, 104.5: False, INF: False}


@pytest.mark.parametrize(("below", "counts"), BELOW.items())
def test_a_part_counts_as_long_as_its_exponential_is_not_zero(below: float, counts: bool) -> None:
    """NaN in a part that counts reaches the row; in one that does not it counts for nothing."""
    given = made(2, 8)
    given.lses[0].zero_()
    given.lses[1].copy_(given.lses[0] - below)
    given.outs[1].fill_(NAN)
    for out, lse in (forward(given), formula.forward(given)):
        assert bool(out.isnan().all()) is counts
        assert bool(out.isnan().any()) is counts
        assert (lse == 0).all()
    if not counts:
        assert torch.equal(forward(given)[0], given.outs[0])


def backward(
    parts: Parts, grads: tuple[torch.Tensor, torch.Tensor | None], wanted: Wanted
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of outs and lses, None where they are not wanted."""
    grad_out, grad_lse = grads
    grad_outs = torch.full((wanted.outs, *grad_out.shape), NAN) if wanted.outs else None
    batch, seqlen, heads, _ = grad_out.shape
    of_lses = torch.full((parts.count, batch, heads, seqlen), NAN) if wanted.lses else None
    given = parts, grad_out, grad_lse, grad_outs, of_lses
    cuda.prepare_backward(CHOSEN, *given, wanted.skipped)(*given)
    return grad_outs, of_lses


WANTED = {
    "all": [True] * 6,
    "outs": [True, True, True, False, False, False],
    "lses": [False, False, False, True, False, False],
    "some": [False, True, False, True, True, True],
    "one out": [True, False, False, False, False, False],
    "the last": [False, False, True, False, False, True],
}


@pytest.mark.parametrize("with_lse", [False, True], ids=["", "grad_lse"])
@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_gradients(wanted: list[bool], stacked: bool, with_lse: bool) -> None:
    """Those that are wanted, and no part of the others; outs that need not be read are not."""
    given = made(3, 16, stacked)
    grads = torch.randn(*SHAPE, 16), torch.randn(1, 3, 5) if with_lse else None
    flags = [any(wanted[:3]), any(wanted[3:])] if stacked else wanted
    written = Wanted.of(flags, 3, stacked)
    of_outs, of_lses = formula.backward(given, *grads)
    kept = [part for part in range(3) if written.writes(part)]
    if not written.lses:
        for out in given.outs:
            out.fill_(NAN)
    found, found_lses = backward(given, grads, written)
    assert (found is None) == (not any(wanted[:3]))
    if found is not None:
        torch.testing.assert_close(found, of_outs[kept])
    if found_lses is not None:
        torch.testing.assert_close(found_lses, of_lses)


@pytest.mark.parametrize(("below", "counts"), BELOW.items())
def test_gradients_of_a_part_that_hardly_counts(below: float, counts: bool) -> None:
    given = made(2, 8)
    given.lses[0].zero_()
    given.lses[1].copy_(given.lses[0] - below)
    given.outs[1].fill_(NAN)
    grads = torch.randn(*SHAPE, 8), torch.randn(1, 3, 5)
    for _, of_lses in (
        backward(given, grads, Wanted.of((), 2, False)),
        formula.backward(given, *grads),
    ):
        assert bool(of_lses.isnan().all()) is counts
        assert bool(of_lses.isnan().any()) is counts
