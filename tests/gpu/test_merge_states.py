"""merge_states on a device: every backend against float64, hostile rows, layouts, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled, skip_without
from merge_states_parts import Tensors, made

import flashvar
from flashvar.backends import backend as backend_of
from flashvar.ops.merge_states.problem import Parts
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose

pytestmark = pytest.mark.usefixtures("seed")
ON_DEVICE = pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernels or its memory")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Skip what the binary that has to serve does not hold; one that is pointed at is there."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("backend") != "cuda":
        return
    skip_without("merge_states")


NAN, INF = torch.nan, torch.inf


def oracle(
    outs: Tensors, lses: Tensors, grad_out: torch.Tensor, grad_lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Out, lse, stacked gradients of outs and lses, and the weights, in float64."""
    values = torch.stack(lses).double()
    high = values.amax(0)
    base = torch.where(high == -INF, 0, high)
    exps = torch.where(values == -INF, 0, (values - base).exp())
    # Kernels compute in float32: what is 0 there is 0 here.
    exps = torch.where(exps < 2.0**-126, 0, exps)
    total = exps.sum(0)
    weights = torch.where(exps == 0, 0, exps / total)
    lse = torch.where(high == INF, high, base + total.log())
    of_rows = weights.transpose(2, 3).unsqueeze(-1)
    parts = torch.where(of_rows == 0, 0, torch.stack(outs).double())
    out = (of_rows * parts).sum(0)
    grad, grad_of_lse = grad_out.double(), grad_lse.double()
    of_outs = torch.where(of_rows == 0, 0, of_rows * grad)
    products = (grad * (parts - out)).sum(-1).transpose(2, 3) + grad_of_lse
    return out, lse, of_outs, torch.where(weights == 0, 0, weights * products), weights


def call(
    outs: Any, lses: Any, grads: tuple[torch.Tensor, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, ...]:
    """Out, lse and the stacked gradients."""
    stacked = isinstance(outs, torch.Tensor)
    lists = ([outs], [lses]) if stacked else (outs, lses)
    given = [[one.detach().requires_grad_() for one in x] for x in lists]
    arguments = [x[0] for x in given] if stacked else given
    out, lse = flashvar.merge_states(*arguments, **options)
    leaves = [*given[0], *given[1]]
    found = torch.autograd.grad((out, lse), leaves, grads)
    if stacked:
        return out.detach(), lse.detach(), *found
    half = len(outs)
    return out.detach(), lse.detach(), torch.stack(found[:half]), torch.stack(found[half:])


def compare(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Half a step of the dtype, and what float32 sums lose."""
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        eps = torch.finfo(one.dtype).eps
        scale = float(torch.nan_to_num(other, 0, 0, 0).abs().max()) if other.numel() else 0.0
        floor = 3e-6 * min(max(scale, 1.0), 100.0) * (8 if place == 3 else 1)
        torch.testing.assert_close(
            one.double(), other, rtol=0.6 * eps + 1e-6, atol=floor + 0.02 * eps, equal_nan=True
        )


def grads_like(outs: Tensors, lses: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn_like(outs[0]), torch.randn_like(lses[0])


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 80, 256, 512, 8, 7, 100, 1])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 300])
def test_values_and_gradients(parts: int, head_dim: int, dtype: torch.dtype, backend: str) -> None:
    outs, lses = made(parts, (2, 37, 3), head_dim, dtype)
    grads = grads_like(outs, lses)
    expected = oracle(outs, lses, *grads)
    compare(call(outs, lses, grads, backend=backend), expected)
    stacked = call(torch.stack(outs), torch.stack(lses), grads, backend=backend)
    compare(stacked, expected)


@DTYPES
def test_hostile_rows(dtype: torch.dtype, backend: str) -> None:
    """Parts without weight hold NaN; gradients of them are 0."""
    columns = {
        "absent": [-INF, 1.0, 2.0],
        "all absent": [-INF, -INF, -INF],
        "far below": [-1e4, 1e4, 0.0],
        "large": [1e30, -1e30, 1e30],
        "infinite": [INF, 1.0, -INF],
        "infinite twice": [INF, INF, 0.0],
        "nan": [NAN, 1.0, -INF],
        "nan and infinite": [NAN, INF, 0.0],
    }
    outs, lses = made(3, (2, 20, 3), 72, dtype)
    for place, values in enumerate(columns.values()):
        high = max(values) if all(value == value for value in values) else NAN
        for part, value in enumerate(values):
            lses[part][1, 2, 2 * place] = value
            if value == -INF or value < high - 200:
                outs[part][1, 2 * place, 2] = NAN
    grads = grads_like(outs, lses)
    expected = oracle(outs, lses, *grads)
    found = call(outs, lses, grads, backend=backend)
    compare(found, expected)
    weights = expected[4]
    assert (found[2].transpose(2, 3)[weights == 0] == 0).all()
    assert (found[3][weights == 0] == 0).all()
    assert (found[0][1, 2, 2] == 0).all()
    assert found[1][1, 2, 2] == -INF


@pytest.mark.parametrize(
    "form", ["bhsd", "bhsd->bshd", "packed", "sliced", "odd", "every second", "mixed", "expanded"]
)
def test_layouts(form: str, backend: str) -> None:
    outs, lses = made(3, (2, 37, 3), 64, torch.bfloat16)
    if form == "packed":
        outs, lses = made(3, (1, 130, 3), 64, torch.bfloat16)
    if form == "expanded":
        outs = [x[:1].expand(2, -1, -1, -1) for x in outs]
    grads = grads_like(outs, lses)
    expected = oracle(outs, lses, *grads)
    given, options = outs, {"backend": backend}
    of_lses, grad_out = lses, grads[0]
    if form.startswith("bhsd"):
        given = [x.transpose(1, 2).contiguous() for x in outs]
        options["layout"] = form
        grad_out = grad_out if form == "bhsd->bshd" else grad_out.transpose(1, 2)
    elif form == "packed":
        given, of_lses = [x[0] for x in outs], [x[0] for x in lses]
        grad_out = grad_out[0]
    elif form == "sliced":
        given = [torch.cat((x, x), -1)[..., :64] for x in outs]
    elif form == "odd":
        given = [torch.cat((x, x), -1)[..., :67][..., 3:].clone() for x in outs]
        given = [torch.nn.functional.pad(x, (1, 2))[..., 1:65] for x in outs]
    elif form == "every second":
        given = [x.repeat_interleave(2, -1)[..., ::2] for x in outs]
    elif form == "mixed":
        given = [outs[0], outs[1].transpose(1, 2).contiguous().transpose(1, 2), outs[2]]
        of_lses = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in lses]
    found = list(
        call(given, of_lses, (grad_out, grads[1][0] if form == "packed" else grads[1]), **options)
    )
    if form == "packed":
        found = [found[0][None], found[1][None], found[2][:, None], found[3][:, None]]
    elif form.startswith("bhsd"):
        found[2] = found[2].transpose(2, 3)
        if form == "bhsd":
            found[0] = found[0].transpose(1, 2)
    compare(tuple(found), expected)


def test_the_same_bits_again(backend: str) -> None:
    outs, lses = made(9, (2, 300, 4), 128, torch.bfloat16)
    grads = grads_like(outs, lses)
    first, *others = (call(outs, lses, grads, backend=backend) for _ in range(5))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    if DEVICE == "cpu":  # where torch's exponential of a vector's end has other bits
        return
    # A row's bits do not depend on the rows beside it.
    alone = call([x[1:, 7:9].clone() for x in outs], [x[1:, :, 7:9].clone() for x in lses],
                 (grads[0][1:, 7:9], grads[1][1:, :, 7:9]), backend=backend)  # fmt: skip
    assert torch.equal(alone[0], first[0][1:, 7:9])
    assert torch.equal(alone[2], first[2][:, 1:, 7:9])


@ON_DEVICE
def test_nothing_around_is_written_to(backend: str) -> None:
    """A part of more memory, as the kernels write it through the op."""
    outs, lses = made(3, (2, 37, 3), 40, torch.bfloat16)
    whole = torch.full((2, 39, 5, 56), NAN, device=DEVICE, dtype=torch.bfloat16)
    out = whole[:, 1:-1, 1:-1, 8:-8]
    lse = torch.empty_like(lses[0])
    chosen = choose(Request.of("merge_states_fwd", "bf16", outs[0].device.index), backend)
    module = backend_of(backend, "merge_states")
    given = Parts(tuple(outs), tuple(lses), False), out, lse
    module.prepare_forward(chosen, *given)(*given)
    expected = oracle(outs, lses, *grads_like(outs, lses))
    compare((out, lse), expected)
    out.fill_(NAN)
    assert whole.isnan().all()


def test_attentions_over_parts_of_the_keys(backend: str) -> None:
    skip_unless_compiled(backend, torch.bfloat16, 64)
    q, k, v = (torch.randn(2, 200, 4, 64, device=DEVICE).to(torch.bfloat16) for _ in range(3))
    cuts = [(0, 64), (64, 65), (65, 200)]
    parts = [
        flashvar.attention(q, k[:, a:b], v[:, a:b], return_lse=True, backend=backend)
        for a, b in cuts
    ]
    out, lse = flashvar.merge_states(*zip(*parts, strict=True), backend=backend)
    whole, whole_lse = flashvar.attention(q, k, v, return_lse=True, backend=backend)
    torch.testing.assert_close(out, whole, atol=0.01, rtol=0.02)
    torch.testing.assert_close(lse, whole_lse, atol=1e-3, rtol=1e-4)


@ON_DEVICE
@pytest.mark.large
@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
def test_more_than_2_to_31_elements(stacked: bool, backend: str) -> None:
    """A part of 2^31 + elements, and strides that pass 2^31 between parts; the last rows count."""
    head_dim, heads, seqlen = 128, 16, 2**20 + 128
    shape = (1, seqlen, heads, head_dim)
    free, _ = torch.cuda.mem_get_info()
    if free < 30 * 2**30:
        pytest.skip(f"needs 30 GiB of free memory, found {free / 2**30:.0f}")
    outs = torch.empty(2, *shape, device=DEVICE, dtype=torch.bfloat16)
    outs[0].fill_(1)
    outs[1].fill_(3)
    lses = torch.zeros(2, 1, heads, seqlen, device=DEVICE)
    outs[:, :, -1] = torch.randn(2, 1, heads, head_dim, device=DEVICE)
    lses[:, :, :, -1] = torch.randn(2, 1, heads, device=DEVICE)
    given = (outs, lses) if stacked else (list(outs), list(lses))
    out, lse = flashvar.merge_states(*given, backend=backend)
    assert int((out[:, :-1] != 2).sum()) == 0
    ends = [list(outs[:, :, -1:]), list(lses[..., -1:])]
    expected = oracle(*ends, out[:, -1:], lse[..., -1:])
    compare((out[:, -1:], lse[..., -1:]), expected)
    del out, lse
    if stacked:
        grad_out = torch.ones(shape, device=DEVICE, dtype=torch.bfloat16)
        of_outs, of_lses = torch.ops.flashvar.merge_states_bwd.default(
            grad_out, None, [outs], [lses], True, "bshd", backend
        )
        assert int((of_outs[:, :, :-1] != 0.5).sum()) == 0
        assert torch.equal(of_lses[1, ..., :-1], torch.full_like(of_lses[1, ..., :-1], 64.0))
        assert torch.allclose(of_lses[0], -of_lses[1], atol=1e-3)


@pytest.mark.large
@ON_DEVICE
def test_more_rows_than_2_to_31(backend: str) -> None:
    """One element each."""
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of free memory, found {free / 2**30:.0f}")
    seqlen = 2**28 + 8
    outs = torch.ones(1, 1, seqlen, 8, 1, device=DEVICE, dtype=torch.bfloat16)
    lses = torch.zeros(1, 1, 8, seqlen, device=DEVICE)
    outs[:, :, -1], lses[..., -1] = 5, 7
    out, lse = flashvar.merge_states(outs, lses, backend=backend)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


@ON_DEVICE
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled() -> None:
    torch._dynamo.reset()

    def step(outs: Tensors, lses: Tensors) -> torch.Tensor:
        out, lse = flashvar.merge_states([x * 1 for x in outs], lses)
        return out.float().square().sum() + lse.sum()

    outs, lses = made(3, (2, 37, 3), 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    found, expected = (
        torch.autograd.grad(one(outs, lses), leaves)
        for one in (torch.compile(step, fullgraph=True), step)
    )
    torch.testing.assert_close(found, expected)


@ON_DEVICE
def test_a_graph_is_replayed(backend: str) -> None:
    outs, lses = made(5, (2, 1, 8), 128, torch.bfloat16)
    flashvar.merge_states(outs, lses, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashvar.merge_states(outs, lses, backend=backend)
    for one in (*outs, *lses):
        one.copy_(torch.randn_like(one))
    graph.replay()
    compare((out, lse), oracle(outs, lses, *grads_like(outs, lses)))


@ON_DEVICE
def test_the_binary_says_how_rows_are_read(backend: str) -> None:
    if backend != "cuda":
        pytest.skip("needs a compiled binary")
    from flashvar.backends.cuda import merge_states as cuda

    outs, lses = made(2, (1, 4, 2), 64, torch.bfloat16)
    chosen = choose(Request.of("merge_states_fwd", "bf16", outs[0].device.index), backend)
    result = torch.empty_like(outs[0]), torch.empty_like(lses[0])

    def explained(outs: Tensors) -> str:
        return cuda.explain_forward(chosen, Parts(tuple(outs), tuple(lses), False), *result)

    assert explained(outs) == "simt: rows are read 16 bytes at a time"
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:65] for x in outs]
    assert "an address of outs is no multiple of 16 bytes" in explained(odd)


@ON_DEVICE
def test_the_reference_serves_a_device_when_named() -> None:
    outs, lses = made(3, (2, 37, 3), 40, torch.bfloat16)
    grads = grads_like(outs, lses)
    compare(call(outs, lses, grads, backend="reference"), oracle(outs, lses, *grads))


@ON_DEVICE
def test_float64_is_the_references() -> None:
    outs, lses = made(2, (1, 4, 2), 16, torch.float64)
    with pytest.raises(flashvar.BackendUnavailableError, match="fp64"):
        flashvar.merge_states(outs, lses)
    out, _ = flashvar.merge_states(outs, lses, backend="reference")
    assert out.dtype == torch.float64
