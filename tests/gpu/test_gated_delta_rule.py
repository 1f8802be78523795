"""gated_delta_rule on a device: Triton's kernels beside the recurrence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE

from flashvar.backends.reference import gated_delta_rule as reference
from flashvar.backends.reference.gated_delta_rule import recurrence
from flashvar.ops.gated_delta_rule.api import gated_delta_rule

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.kernels_of("triton"),
    pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernels"),
]
# Parameters of tests that no kernel is compiled for: their values run in one process.
SAME_KERNELS = ("seqlen", "heads", "gate", "packed")

# Relative errors, root mean square; float32's are of sums that cancel in part.
LIMITS = {
    **dict.fromkeys(("out", "final"), 5e-3),
    **dict.fromkeys(("q", "k", "v", "initial_state"), 8e-3),
    **dict.fromkeys(("g", "beta", "A_log", "dt_bias"), 2e-2),
}
SMALLER = {torch.bfloat16: 1.0, torch.float16: 0.5, torch.float32: 0.05}
DTYPES = pytest.mark.parametrize("dtype", SMALLER, ids=str)
PACKED = [(0, 100, 1, 0, 640, 65, 0), (3, 0, 2), (1,) * 50, (64, 64), (0, 0)]


@pytest.fixture(autouse=True)
def _by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference goes token by token, whatever the length."""
    monkeypatch.setattr(reference, "_algorithm", lambda terms: recurrence)


def made(
    seqlen: int = 300,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    packed: tuple[int, ...] | None = None,
    batch: int = 2,
    fused: bool = True,
) -> dict[str, Any]:
    """Inputs: raw ones where everything is fused, else keys of length 1 and gates to -1."""
    batch, rows = (batch, seqlen) if packed is None else (1, sum(packed))
    count = batch if packed is None else len(packed)
    few, many = heads
    given: dict[str, Any] = {
        "q": torch.randn(batch, rows, few, dims[0], device=DEVICE).to(dtype),
        "k": torch.randn(batch, rows, few, dims[0], device=DEVICE),
        "v": torch.randn(batch, rows, many, dims[1], device=DEVICE).to(dtype),
        "g": torch.randn(batch, rows, many, device=DEVICE),
        "beta": torch.randn(batch, rows, many, device=DEVICE),
        "initial_state": torch.randn(count, many, *dims, device=DEVICE),
    }
    if fused:
        given.update(qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True)
        given["A_log"] = torch.randn(many, device=DEVICE)
        given["dt_bias"] = torch.randn(many, device=DEVICE)
    else:
        given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
        given["beta"] = 2 * given["beta"].sigmoid()
        given["g"] = -torch.rand_like(given["g"])
    given["k"] = given["k"].to(dtype)
    if packed is not None:
        given["cu_seqlens"] = torch.tensor([0, *packed], device=DEVICE).cumsum(0).int()
    return given


def of_backend(given: dict[str, Any], backend: str, wide: bool) -> dict[str, torch.Tensor]:
    """Results, and the gradients of all inputs for one gradient of the results."""
    leaves = {
        name: (x.double() if wide else x.detach().clone()).requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    out, final = gated_delta_rule(**{**given, **leaves}, return_final_state=True, backend=backend)
    assert final is not None
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(x.shape, device=DEVICE, generator=generator) for x in (out, final)]
    weights[0] = weights[0].to(given["q"].dtype)
    grads = torch.autograd.grad(
        (out, final),
        list(leaves.values()),
        [w.to(x.dtype) for w, x in zip(weights, (out, final), strict=True)],
    )
    return {"out": out.detach(), "final": final.detach(), **dict(zip(leaves, grads, strict=True))}


def compared(given: dict[str, Any], backend: str = "triton", **factors: float) -> None:
    """Every result and every gradient within its limit, times a factor where one is given.

    Gradients of a root mean square below 1e-4, beside others of about 1, are rounding. Those of
    A_log and dt_bias are sums over tokens whose terms may cancel: errors are relative to the terms.
    """
    found = of_backend(given, backend, wide=False)
    expected = of_backend(given, "reference", wide=True)
    errors = {}
    for name, limit in LIMITS.items():
        if name not in expected or not expected[name].numel():
            continue
        one, other = found[name].double(), expected[name]
        assert torch.isfinite(one).all(), f"{name} is not finite"
        size = other.norm().clamp(min=1e-4 * other.numel() ** 0.5)
        if name in ("A_log", "dt_bias"):
            size = size.clamp(min=float(expected["g"].norm()))
        error = float((one - other).norm() / size)
        # Few numbers, or sums of few terms, spread wider. Rows of no sequence are 0 and none.
        numbers = int(other.count_nonzero())
        few = numbers < 512 or given["q"].shape[3] < 32
        wider = 3 if numbers < 64 else 1.5 if few else 1
        if error > limit * SMALLER[given["q"].dtype] * wider * factors.get(name, 1.0):
            errors[name] = error
    assert not errors


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 4)], ids=str)
@pytest.mark.parametrize("seqlen", [1, 15, 63, 64, 65, 127, 1000])
@pytest.mark.parametrize(
    "dims", [(8, 16), (16, 8), (40, 64), (64, 64), (96, 192), (128, 128), (256, 512)], ids=str
)
def test_values(dims: tuple[int, int], seqlen: int, heads: tuple[int, int]) -> None:
    compared(made(seqlen, heads, dims))


@DTYPES
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_dtypes(dims: tuple[int, int], fused: bool, dtype: torch.dtype) -> None:
    compared(made(dims=dims, dtype=dtype, fused=fused))


def with_small_betas(given: dict[str, Any], small: float) -> dict[str, Any]:
    """Half of the betas are small; the gradient of a beta does not depend on it."""
    large = torch.randint(2, given["beta"].shape, device=DEVICE).bool()
    given["beta"] = torch.where(large, given["beta"], small)
    return given


@DTYPES
@pytest.mark.parametrize("small", [0.0, 1e-6])  # the smallest of fp16 is 6e-8
def test_a_small_beta_has_a_gradient(small: float, dtype: torch.dtype) -> None:
    compared(with_small_betas(made(200, (1, 2), dtype=dtype, fused=False), small))


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_packed(packed: tuple[int, ...]) -> None:
    compared(made(0, dims=(128, 128), packed=packed))


GATES = (0.0, -1e-4, -2.5, -20.0, -torch.inf)


@pytest.mark.parametrize("gate", [*GATES, "mixed"], ids=str)
def test_gates(gate: float | str) -> None:
    given = made(fused=False)
    if gate == "mixed":
        kinds = torch.tensor(GATES, device=DEVICE)
        given["g"] = kinds[torch.randint(len(GATES), given["g"].shape, device=DEVICE)]
    else:
        given["g"].fill_(gate)
    compared(given)


@pytest.mark.parametrize("gate", [0.0, -1e-3])
def test_equal_keys_with_beta_2(gate: float) -> None:
    given = made(1000, fused=False)
    given["k"] = torch.eye(64, device=DEVICE, dtype=torch.bfloat16)[:1].expand_as(given["k"])
    given["beta"].fill_(2.0)
    given["g"].fill_(gate)
    # Nothing decays: the sums of all tokens that cancel are those of g.
    compared(given, g=4.0)


def test_equal_keys_that_are_normalised() -> None:
    given = made(1000)
    given["k"] = given["k"][:, :1].expand_as(given["k"])
    given["beta"].fill_(20.0)
    given["g"].fill_(-20.0)
    # sigmoid(20) is 1 in float32, so that beta's gradients, of some 1e-6, are 0.
    compared(given, beta=4.0)


@pytest.mark.large
@pytest.mark.parametrize("seqlen", [1, 33])
def test_more_programs_than_an_axis_of_the_grid_has(seqlen: int) -> None:
    compared(made(seqlen, (6, 6), (8, 8), batch=10923))


@pytest.mark.large
def test_more_heads_than_an_axis_of_the_grid_has() -> None:
    compared(made(40, (16386, 65544), (8, 8), batch=1))


@pytest.mark.large
def test_more_than_2_to_the_31_elements() -> None:
    """The last head's results are those of the head alone."""
    seqlen, heads = 16448, 256
    given = made(seqlen, (1, heads), (16, 512), batch=1, fused=False)
    assert given["v"].numel() > 2**31
    given.pop("initial_state")
    last = {
        name: x if x.shape[2] == 1 else x[:, :, -1:].contiguous()
        for name, x in given.items()
        if isinstance(x, torch.Tensor)
    }
    results = []
    for call in (given, last):
        leaves = {name: x.requires_grad_() for name, x in call.items()}
        out, _ = gated_delta_rule(**leaves, backend="triton")
        weight = torch.ones(512, device=DEVICE, dtype=out.dtype).expand_as(out)
        names = ["v", "g", "beta"]
        grads = torch.autograd.grad(out, [leaves[name] for name in names], weight)
        results.append([x[:, :, -1].clone() for x in (out.detach(), *grads)])
        del out, grads, leaves
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


def test_the_same_bits_again() -> None:
    given = made(dims=(128, 128))
    first, second = (of_backend(given, "triton", wide=False) for _ in range(2))
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


def test_training_in_a_graph() -> None:
    """Nothing waits for the device: other lengths and values come with a replay."""
    given = made(0, packed=(100, 28), dims=(64, 64))
    leaves = {
        name: x.requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    weight = torch.randn_like(given["v"])

    def step() -> tuple[torch.Tensor, ...]:
        out, _ = gated_delta_rule(**{**given, **leaves}, backend="triton")
        return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), weight))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    given["cu_seqlens"].copy_(torch.tensor([0, 3, 128]))
    with torch.no_grad():
        given["v"].normal_()
    graph.replay()
    for one, other in zip(found, step(), strict=True):
        assert torch.equal(one, other)


def test_decoding_in_a_graph() -> None:
    """The pool is updated by each replay, at the indices that are there then."""
    given = made(1, (2, 4), (128, 128))
    pool = torch.randn(5, 4, 128, 128, device=DEVICE)
    given["initial_state"], expected = pool, pool.clone()
    indices = torch.tensor([4, 1], device=DEVICE)
    gated_delta_rule(**{**given, "initial_state": pool.clone()}, state_indices=indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = gated_delta_rule(**given, state_indices=indices)
    indices.copy_(torch.tensor([2, -1]))
    graph.replay()
    other, _ = gated_delta_rule(
        **{**given, "initial_state": expected}, state_indices=indices, backend="reference"
    )
    torch.testing.assert_close(out, other, atol=0.02, rtol=0.02)
    torch.testing.assert_close(pool, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # in torch
def test_compiled_training() -> None:
    torch._dynamo.reset()
    given = made(100, dims=(64, 64))
    leaves = {
        name: x.requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }

    def step(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        out, _ = gated_delta_rule(**{**given, **leaves})
        return out.float().square().mean()

    grads = [
        torch.autograd.grad(call(leaves), list(leaves.values()))
        for call in (step, torch.compile(step, fullgraph=True))
    ]
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-2)
