"""gated_delta_rule on a device: Triton's kernels beside the recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from device_call import DEVICE
from gated_delta_rule_compared import (
    GATES,
    PACKED,
    SMALLER,
    compared,
    made,
    of_backend,
    with_small_betas,
)

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

DTYPES = pytest.mark.parametrize("dtype", SMALLER, ids=str)


@pytest.fixture(autouse=True)
def _by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference goes token by token, whatever the length."""
    monkeypatch.setattr(reference, "_algorithm", lambda terms: recurrence)


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


@DTYPES
@pytest.mark.parametrize("small", [0.0, 1e-6])  # the smallest of fp16 is 6e-8
def test_a_small_beta_has_a_gradient(small: float, dtype: torch.dtype) -> None:
    compared(with_small_betas(made(200, (1, 2), dtype=dtype, fused=False), small))


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_packed(packed: tuple[int, ...]) -> None:
    compared(made(0, dims=(128, 128), packed=packed))


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
