"""causal_conv1d on a device: each backend against float64, states, packed, large sizes."""

from __future__ import annotations

import warnings

import pytest
import torch
from device_call import DEVICE, skip_without

import flashvar
from flashvar.backends.reference.causal_conv1d import formula
from flashvar.ops.causal_conv1d.problem import Convolution

pytestmark = pytest.mark.usefixtures("seed")
ON_DEVICE = pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernels or its memory")
KERNELS = ["cuda", "triton"]
BACKENDS = ["reference"] if DEVICE == "cpu" else [*KERNELS, "reference"]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
OF_KERNELS = pytest.mark.parametrize("by", KERNELS)
ENDS = [0, 0, 1, 3, 300, 301, 301, 1000, 1003, 1003]


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Skip what the binary that has to serve does not hold; one that is pointed at is there."""
    callspec = getattr(request.node, "callspec", None)
    if DEVICE == "cpu" or callspec is None or callspec.params.get("by") != "cuda":
        return
    skip_without("causal_conv1d")


def made(
    shape: tuple[int, int, int], width: int, columns: int, sequences: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    dim = shape[2]
    shapes = {
        "x": shape,
        "weight": (dim, width),
        "bias": (dim,),
        "residual": shape,
        "initial_state": (sequences, dim, columns),
    }
    return {name: torch.randn(one, device=DEVICE).to(dtype) for name, one in shapes.items()}


def oracle(
    given: dict[str, torch.Tensor], ends: torch.Tensor | None, grads: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """y, the final state and all gradients in float64, by autograd through the formula."""
    leaves = {name: one.detach().double().requires_grad_() for name, one in given.items()}
    conv = Convolution(
        leaves["x"], leaves["weight"], leaves["bias"], leaves["initial_state"], ends, True
    )
    found = formula.forward(conv, leaves["residual"], leaves["initial_state"].shape[-1])
    of_leaves = torch.autograd.grad(found, list(leaves.values()), [one.double() for one in grads])
    return (*(one.detach() for one in found), *of_leaves)


def error(found: torch.Tensor, wanted: torch.Tensor, least: float = 1e-30) -> float:
    """Root mean square, relative to that of the expected, which counts as `least` at least."""
    if not wanted.numel():
        return 0.0
    difference = (found.double() - wanted).square().mean().sqrt()
    return float(difference / wanted.square().mean().sqrt().clamp_min(least))


@DTYPES
@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize("layout", ["btd", "bdt"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("dim", "width", "columns"), [(256, 4, 4), (100, 3, 2), (7, 2, 5), (1, 4, 3)]
)
def test_values(
    dim: int, width: int, columns: int, packed: bool, layout: str, by: str, dtype: torch.dtype
) -> None:
    shape = (1, ENDS[-1], dim) if packed else (3, 517, dim)
    sequences = len(ENDS) - 1 if packed else 3
    given = made(shape, width, columns, sequences, dtype)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE) if packed else None
    turned = dict(given)
    if layout == "bdt":
        for name in ("x", "residual"):
            turned[name] = given[name].transpose(1, 2).contiguous()
    leaves = {name: one.requires_grad_() for name, one in turned.items()}
    y, final = flashvar.causal_conv1d(
        **leaves, activation="silu", return_final_state=True, cu_seqlens=ends, layout=layout,
        backend=by,
    )  # fmt: skip
    weights = torch.randn_like(y), torch.randn_like(final)
    grads = torch.autograd.grad((y, final), list(leaves.values()), weights)
    found = dict(zip(["y", "final", *leaves], [y.detach(), final.detach(), *grads], strict=True))
    of_y = weights[0]
    if layout == "bdt":
        of_y = of_y.transpose(1, 2)
        found |= {name: found[name].transpose(1, 2) for name in ("y", "x", "residual")}
    wanted = oracle(given, ends, (of_y, weights[1]))
    limit = 4 * torch.finfo(dtype).eps
    # Sums over rows round in proportion to what they pass through, and may end near 0: n terms
    # of about 1 end at the root of n.
    least = dict.fromkeys(("weight", "bias"), (shape[0] * shape[1]) ** 0.5)
    for (name, one), expected in zip(found.items(), wanted, strict=True):
        assert error(one, expected, least.get(name, 1e-30)) <= limit, name


@DTYPES
@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize("order", ["tokens", "expanded", "wide"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_gradient_in_another_order(packed: bool, order: str, by: str, dtype: torch.dtype) -> None:
    """As models make it that transpose or split y: the gradient alone has other strides than y."""
    batch, rows, dim = (1, 2060, 520) if packed else (2, 1030, 520)
    given = made((batch, rows, dim), 4, 3, 3 if packed else batch, dtype)
    ends = torch.tensor([0, 700, 701, rows], device=DEVICE) if packed else None
    leaves = {name: one.requires_grad_() for name, one in given.items()}
    y, final = flashvar.causal_conv1d(
        **leaves, activation="silu", return_final_state=True, cu_seqlens=ends, backend=by
    )
    of_y = torch.randn(batch, dim, rows, device=DEVICE).to(dtype).transpose(1, 2)
    if order == "expanded":
        of_y = of_y[:, :, :1].expand_as(y)
    elif order == "wide":  # neither tokens nor channels are contiguous
        of_y = torch.stack((of_y, of_y), -1)[..., 1]
    weights = of_y, torch.randn_like(final)
    found = torch.autograd.grad((y, final), list(leaves.values()), weights)
    wanted = oracle(given, ends, weights)[2:]
    limit = 4 * torch.finfo(dtype).eps
    least = dict.fromkeys(("weight", "bias"), (batch * rows) ** 0.5)
    for name, one, expected in zip(leaves, found, wanted, strict=True):
        assert error(one, expected, least.get(name, 1e-30)) <= limit, name


@DTYPES
@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_slices_of_a_projection(layout: str, by: str, dtype: torch.dtype) -> None:
    """Views that are not aligned, parameters of other dtypes, and gradients that are expanded."""
    wide = torch.randn(2, 300, 200, device=DEVICE).to(dtype)
    if layout == "bdt":
        wide = wide.transpose(1, 2).contiguous().transpose(1, 2)
    for first, dim in ((0, 64), (64, 65), (129, 71)):
        x = wide[..., first : first + dim].detach().requires_grad_()
        weight = torch.randn(dim, 4, device=DEVICE, requires_grad=True)
        bias = torch.randn(dim, device=DEVICE).half().requires_grad_()
        turned = x.transpose(1, 2) if layout == "bdt" else x
        y = flashvar.causal_conv1d(turned, weight, bias, layout=layout, backend=by)
        grads = torch.autograd.grad(y.sum(), (x, weight, bias))
        conv = Convolution(*(one.detach().double() for one in (x, weight, bias)), None, None, False)
        wanted, _ = formula.forward(conv, None, 0)
        of_x, of_weight, of_bias, _ = formula.backward(conv, torch.ones_like(wanted), None)
        found = y.detach().transpose(1, 2) if layout == "bdt" else y.detach()
        limit = 4 * torch.finfo(dtype).eps
        assert error(found, wanted) <= limit
        for one, other in zip(grads, (of_x, of_weight, of_bias), strict=True):
            assert error(one, other, 600**0.5) <= max(limit, 4 * torch.finfo(one.dtype).eps)


@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_no_sequence_sees_anothers_nan(layout: str, by: str) -> None:
    given = made((1, 1003, 64), 4, 3, len(ENDS) - 1, torch.bfloat16)
    given["x"][:, 3:300] = torch.nan
    given["initial_state"][5] = torch.inf
    if layout == "bdt":
        given |= {n: given[n].transpose(1, 2).contiguous() for n in ("x", "residual")}
    ends = torch.tensor(ENDS, device=DEVICE)
    leaves = [one.requires_grad_() for one in given.values()]
    y, final = flashvar.causal_conv1d(
        **given, cu_seqlens=ends, return_final_state=True, layout=layout, backend=by
    )
    of_x, *_, of_state = torch.autograd.grad((y, final), leaves, (y.detach(), final.detach()))
    if layout == "bdt":
        y, of_x = y.transpose(1, 2), of_x.transpose(1, 2)
    assert y[0, 3:300].isnan().all()
    assert y[0, 0:3].isfinite().all()
    assert y[0, 304:].isfinite().all()
    assert of_x[0, 0:3].isfinite().all()
    assert of_x[0, 304:].isfinite().all()
    assert of_state[:3].isfinite().all()


@ON_DEVICE
@OF_KERNELS
def test_the_same_bits_again(by: str) -> None:
    given = made((4, 3000, 512), 4, 3, 4, torch.bfloat16)
    leaves = [one.requires_grad_() for one in given.values()]
    runs = []
    for _ in range(2):
        y = flashvar.causal_conv1d(**given, activation="silu", backend=by)
        runs.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@ON_DEVICE
@pytest.mark.large
@OF_KERNELS
@pytest.mark.parametrize(
    "shape",
    [(70000, 3, 8), (1, 2**21 + 5, 1030), (2, 3, 2**20)],
    ids=["batches", "elements", "channels"],
)
def test_large(shape: tuple[int, int, int], by: str) -> None:
    """More sequences than an axis of a grid has; more than 2^31 elements."""
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(shape[2], 4, device=DEVICE, dtype=torch.bfloat16)
    x.requires_grad_()
    y, final = flashvar.causal_conv1d(x, weight, return_final_state=True, backend=by)
    (of_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
    tail = x[-1:, -9:].detach()
    state = None if shape[1] <= 9 else x[-1:, -12:-9].detach().transpose(1, 2)
    wanted, last = flashvar.causal_conv1d(
        tail, weight, initial_state=state, return_final_state=True, backend="reference"
    )
    torch.testing.assert_close(y[-1:, -9:], wanted)
    torch.testing.assert_close(final[-1:], last)
    torch.testing.assert_close(of_x[-1, -1], weight[:, 3])
    if shape[1] > 3:
        torch.testing.assert_close(
            of_x[-1, -4], weight.float().sum(1).bfloat16(), atol=2e-2, rtol=2e-2
        )


@DTYPES
@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize(("seqlen", "columns"), [(1, 3), (1, 4), (5, 3), (3, 9)])
def test_update(seqlen: int, columns: int, by: str, dtype: torch.dtype) -> None:
    given = made((300, seqlen, 384), 4, columns, 500, dtype)
    pool = given.pop("initial_state")
    slots = torch.randperm(500, device=DEVICE)[:300].int()
    slots[::7] = -1
    used = slots >= 0
    before = pool.clone()
    y = flashvar.causal_conv1d_update(
        **given, state=pool, activation="silu", state_indices=slots, backend=by
    )
    state = before[slots[used]].double()
    conv = Convolution(
        given["x"][used].double(), given["weight"].double(), given["bias"].double(), state, None,
        True,
    )  # fmt: skip
    wanted, final = formula.forward(conv, given["residual"][used].double(), columns)
    assert error(y[used], wanted) <= 4 * torch.finfo(dtype).eps
    assert (y[~used] == 0).all()
    before[slots[used]] = final.to(dtype)
    assert torch.equal(pool, before)


@DTYPES
@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize(("seqlen", "columns"), [(1, 3), (5, 4), (3, 9)])
def test_circular_states(seqlen: int, columns: int, by: str, dtype: torch.dtype) -> None:
    """As states whose newest token is the last, in another order of the columns."""
    given = made((300, seqlen, 384), 4, columns, 300, dtype)
    state = given.pop("initial_state")
    seen = torch.randint(0, 2**20, (300,), device=DEVICE)
    places = (torch.arange(columns, device=DEVICE) + seen[:, None]) % columns
    circular = torch.empty_like(state)
    circular.scatter_(2, places[:, None].expand(state.shape), state)
    options = {"activation": "silu", "backend": by}
    wanted = flashvar.causal_conv1d_update(**given, state=state, **options)
    found = flashvar.causal_conv1d_update(**given, state=circular, state_positions=seen, **options)
    assert torch.equal(found, wanted)
    places = (places + seqlen) % columns
    assert torch.equal(circular.gather(2, places[:, None].expand(state.shape)), state)


@pytest.mark.parametrize("by", BACKENDS)
def test_sequences_by_name(by: str) -> None:
    given = made((2, 70, 40), 4, 0, 0, torch.float32)
    given.pop("initial_state", None)
    names = torch.arange(70, device=DEVICE).div(9, rounding_mode="floor").repeat(2, 1).int()
    found = flashvar.causal_conv1d(**given, seq_idx=names, backend=by)
    parts = [
        flashvar.causal_conv1d(
            **(given | {n: given[n][:, a : a + 9] for n in ("x", "residual")}), backend=by
        )
        for a in range(0, 70, 9)
    ]
    assert torch.equal(found, torch.cat(parts, 1))


@ON_DEVICE
@OF_KERNELS
def test_nothing_is_read_on_the_host_or_out_of_bounds(by: str) -> None:
    given = made((1, 1003, 64), 4, 3, 3, torch.bfloat16)
    ends = torch.tensor([0, 500, 700, 1003], device=DEVICE)
    wrong = torch.tensor([-7, 10**9, 5, 2**40], device=DEVICE)
    leaves = [one.requires_grad_() for one in given.values()]
    call = {"activation": "silu", "return_final_state": True, "backend": by}
    mode = torch.cuda.get_sync_debug_mode()
    flashvar.causal_conv1d(**given, cu_seqlens=ends, **call)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        plain = {name: x for name, x in given.items() if name != "initial_state"}
        names = (torch.arange(1003, device=DEVICE) // 40)[None]
        flashvar.causal_conv1d(**plain, seq_idx=names, backend=by)
        for one in (ends, wrong):
            found = flashvar.causal_conv1d(**given, cu_seqlens=one, **call)
            torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()


@ON_DEVICE
@OF_KERNELS
def test_an_index_beyond_the_pool_gives_nan(by: str) -> None:
    x, pool = torch.randn(3, 40, device=DEVICE), torch.randn(2, 40, 3, device=DEVICE)
    before = pool.clone()
    slots = torch.tensor([2, -1, 0], device=DEVICE)
    y = flashvar.causal_conv1d_update(
        x, pool, torch.randn(40, 4, device=DEVICE), state_indices=slots, backend=by
    )
    assert y[0].isnan().all()
    assert (y[1] == 0).all()
    assert y[2].isfinite().all()
    assert torch.equal(pool[1], before[1])
    assert not torch.equal(pool[0], before[0])


@ON_DEVICE
@OF_KERNELS
def test_a_graph_is_replayed(by: str) -> None:
    x, pool = torch.randn(4, 64, device=DEVICE), torch.zeros(4, 64, 3, device=DEVICE)
    weight = torch.randn(64, 4, device=DEVICE)
    slots = torch.arange(4, device=DEVICE)

    def step() -> torch.Tensor:
        return flashvar.causal_conv1d_update(
            x, pool, weight, activation="silu", state_indices=slots, backend=by
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    pool.zero_()
    tokens = torch.randn(4, 6, 64, device=DEVICE)
    replayed = []
    for t in range(6):
        x.copy_(tokens[:, t])
        graph.replay()
        replayed.append(y.clone())
    wanted = flashvar.causal_conv1d(tokens, weight, activation="silu", backend="reference")
    torch.testing.assert_close(torch.stack(replayed, 1), wanted)


@ON_DEVICE
@OF_KERNELS
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_training(by: str) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = flashvar.causal_conv1d(x * 2, weight, activation="silu", backend=by)
        return y.float().square().sum()

    given = made((2, 100, 64), 4, 3, 2, torch.float32)
    leaves = [given[name].requires_grad_() for name in ("x", "weight")]
    results = [
        torch.autograd.grad(one(*leaves), leaves)
        for one in (torch.compile(step, fullgraph=True), step)
    ]
    torch.testing.assert_close(*results)
