"""gated_delta_rule's compiled backward on a device: beside the recurrence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled
from gated_delta_rule_compared import GATES, PACKED, compared, made, of_backend, with_small_betas

from flashvar.backends.reference import gated_delta_rule as reference
from flashvar.backends.reference.gated_delta_rule import recurrence
from flashvar.ops.gated_delta_rule.api import gated_delta_rule

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.kernels_of("cuda"),
    pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernels"),
]

DIMS = [
    *((8, 16), (16, 8), (40, 64), (64, 64), (96, 192), (128, 128), (128, 512)),
    *((136, 24), (192, 384), (256, 64), (256, 512)),
]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries serve, and the reference goes token by token, whatever the length."""
    skip_unless_compiled("cuda", torch.bfloat16, 64, "gated_delta_rule_bwd")
    monkeypatch.setattr(reference, "_algorithm", lambda terms: recurrence)


def with_equal_keys(given: dict[str, Any], beta: float) -> dict[str, Any]:
    keys = torch.nn.functional.normalize(given["k"][:, :1].float(), dim=-1).bfloat16()
    given["k"] = keys.expand_as(given["q"]).contiguous()
    given["beta"].fill_(beta)
    return given


@pytest.mark.parametrize("heads", [(2, 2), (1, 4), (3, 6)], ids=str)
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 500])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values(dims: tuple[int, int], seqlen: int, heads: tuple[int, int]) -> None:
    # The gradient of a gate is a sum that may cancel: of few tokens, many sequences average.
    compared(made(seqlen, heads, dims, batch=16 if seqlen == 1 else 2), "cuda")


@pytest.mark.parametrize("group", [3, 5, 8, 9])
@pytest.mark.parametrize("dims", [(64, 64), (256, 64)], ids=str)
def test_groups(dims: tuple[int, int], group: int) -> None:
    compared(made(130, (2, 2 * group), dims), "cuda")


@pytest.mark.parametrize("packed", [*PACKED, (0,), (700, 3)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 192)], ids=str)
def test_packed(dims: tuple[int, int], packed: tuple[int, ...]) -> None:
    compared(made(0, (2, 4), dims, packed=packed), "cuda")


@pytest.mark.parametrize("gate", [*GATES, "mixed"], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (256, 64)], ids=str)
def test_gates(dims: tuple[int, int], gate: float | str) -> None:
    given = made(dims=dims, fused=False)
    if gate == "mixed":
        kinds = torch.tensor(GATES, device=DEVICE)
        given["g"] = kinds[torch.randint(len(GATES), given["g"].shape, device=DEVICE)]
    else:
        given["g"].fill_(gate)
    compared(given, "cuda")


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("gate", [0.0, -1e-3])
@pytest.mark.parametrize("dims", [(128, 128), (192, 64), (256, 192)], ids=str)
def test_equal_keys(dims: tuple[int, int], gate: float, beta: float) -> None:
    """Chunks are plain, careful (beta 1.5), or go token by token (from 1.9 on)."""
    given = with_equal_keys(made(300, (2, 4), dims, fused=False), beta)
    given["g"].fill_(gate)
    # The gradients of v and beta are what sums of a hundred times their size leave; between 1 and 2
    # updates grow and cancel, and the forward's chunk does not yet go token by token.
    of_forward = 2.0 if beta > 1 else 1.0
    compared(given, "cuda", v=2.0, beta=2.0, out=of_forward, final=of_forward)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("share", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("dims", [(16, 64), (64, 64), (128, 128), (256, 64)], ids=str)
def test_keys_with_a_common_part(dims: tuple[int, int], share: float, beta: float) -> None:
    """Rows whose absolute values sum up to more than the growth of a careful chunk, or do not."""
    given = made(300, (2, 4), dims, fused=False)
    common = torch.nn.functional.normalize(given["k"][:, :1].float(), dim=-1)
    mixed = share * common + (1 - share) * given["k"].float()
    given["k"] = torch.nn.functional.normalize(mixed, dim=-1).bfloat16()
    given["beta"].mul_(beta / 2)
    given["g"].mul_(1e-3)
    compared(given, "cuda")


@pytest.mark.parametrize("dims", [(128, 128), (256, 64)], ids=str)
def test_chunks_of_every_kind_side_by_side(dims: tuple[int, int]) -> None:
    """Heads that share q and k, each with chunks of another growth."""
    given = with_equal_keys(made(500, (1, 4), dims, fused=False), 0.5)
    given["g"].fill_(-1e-3)
    for head, beta in enumerate((0.5, 1.5, 1.9)):
        given["beta"][:, 64 * head : 64 * head + 192, head] = beta
    compared(given, "cuda", v=2.0, beta=2.0, out=2.0, final=2.0)


@pytest.mark.parametrize("small", [0.0, 1e-6])
@pytest.mark.parametrize("dims", [(64, 64), (256, 64)], ids=str)
def test_a_small_beta_has_a_gradient(dims: tuple[int, int], small: float) -> None:
    compared(with_small_betas(made(200, (1, 2), dims, fused=False), small), "cuda")


@pytest.mark.parametrize("length", [0.1, 1.2, 20.0])
def test_keys_of_any_length(length: float) -> None:
    """beta |k|^2 is at most 2, beyond which states grow without bound."""
    given = made(300, (1, 2), (64, 128), fused=False)
    given["k"] = (given["k"].float() * length).bfloat16()
    given["beta"].mul_(1 / max(length, 1) ** 2)
    compared(given, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_of_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    given = made(200, (2, 4), (64, 64))
    for name in ("g", "beta"):
        wide = given[name][..., None].expand(*given[name].shape, 3).contiguous().to(dtype)
        given[name] = wide[..., 1]
    for name in ("A_log", "dt_bias"):
        given[name] = given[name].to(dtype)
    compared(given, "cuda")


def test_without_gates_and_states() -> None:
    given = made(200, (2, 4), (64, 64), fused=False)
    given["g"] = None
    given.pop("initial_state")
    compared(given, "cuda")


def test_views_of_one_projection() -> None:
    """q, k and v as slices of one tensor: rows are not contiguous."""
    qkv = torch.randn(2, 150, 4, 64, device=DEVICE).bfloat16()
    given = made(150, (1, 2), (64, 64))
    given["q"], given["k"], given["v"] = qkv[:, :, :1], qkv[:, :, 1:2], qkv[:, :, 2:]
    compared(given, "cuda")


def test_gradients_of_any_strides() -> None:
    """A gradient of out that is expanded, as that of a sum, or starts anywhere."""
    given = made(100, (1, 2), (64, 64))
    leaves = {
        name: x.requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    out, _ = gradients_out(given)
    ones = torch.ones_like(out)
    shifted = torch.ones(out.numel() + 1, device=DEVICE, dtype=out.dtype)[1:].view_as(out)
    for grad in (ones[:1, :1, :1, :1].expand_as(out), shifted):
        for one, other in zip(
            torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True),
            torch.autograd.grad(out, list(leaves.values()), ones, retain_graph=True),
            strict=True,
        ):
            assert torch.equal(one, other)


def gradients_out(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return gated_delta_rule(**given, backend="cuda")


def divided(seqlen: int = 3000, heads: tuple[int, int] = (1, 2), **more: Any) -> dict[str, Any]:
    """Inputs of a call whose sequences are long for its heads: segments of some 600 tokens."""
    return made(seqlen, heads, more.pop("dims", (128, 128)), batch=1, **more)


@pytest.mark.parametrize(
    "dims",
    [
        *((128, 128), (64, 64), (96, 192), (40, 24), (72, 136), (128, 64), (16, 256), (128, 512)),
        *((192, 64), (256, 512)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seqlen", [2048, 3000])
def test_segments(seqlen: int, dims: tuple[int, int]) -> None:
    compared(divided(seqlen, dims=dims), "cuda")


def test_segments_of_heads_that_share_keys() -> None:
    compared(divided(4096, (2, 8)), "cuda")


@pytest.mark.parametrize("gate", [0.0, -1e-4, -1e-2, "mixed"])
def test_states_of_segments(gate: float | str) -> None:
    """States and gradients that decay slowly reach through all segments; -inf clears some."""
    given = divided(fused=False)
    if gate == "mixed":
        given["g"] *= 1e-3
        given["g"][:, ::701] = -torch.inf
    else:
        given["g"].fill_(gate)
    compared(given, "cuda")


@pytest.mark.parametrize("gate", [0.0, -1e-4])
def test_transitions_of_segments(gate: float) -> None:
    """Updates so small that transitions are near the identity: all of a state reaches through."""
    given = divided(fused=False)
    given["beta"] *= 0.05
    given["g"].fill_(gate)
    compared(given, "cuda")


@pytest.mark.parametrize(
    "packed",
    [
        (0, 1500, 1, 0, 900, 63, 0, 700),
        (1, 3000),
        (3000, 1, 0),
        (640,) * 5,
        (1281, 639, 641, 500),
        (1200, *(1,) * 50, 1800),
    ],
    ids=str,
)
def test_segments_of_packed(packed: tuple[int, ...]) -> None:
    compared(made(0, (1, 2), (128, 128), packed=packed), "cuda")


@pytest.mark.parametrize("beta", [1.5, 2.0])
@pytest.mark.parametrize("first", [0, 500, 640, 1270])
def test_equal_keys_in_segments(first: int, beta: float) -> None:
    """Chunks that are careful or go token by token, for chains and for transitions."""
    given = divided(fused=False)
    rows = slice(first, first + 300)
    given["k"][:, rows] = given["k"][:, first : first + 1]
    given["beta"][:, rows] = beta
    given["g"][:, rows] = 0.0
    # With 1.5 the rows cancel within 16-bit chunks: of 24 draws the widest out is at 2.8 limits.
    compared(given, "cuda", v=2.0, beta=2.0, out=4.0 if beta < 2 else 2.0, final=2.0)


def test_segments_without_states() -> None:
    given = divided()
    given.pop("initial_state")
    compared(given, "cuda")


@pytest.mark.parametrize(
    ("seqlen", "packed"), [(1000, None), (3000, None), (0, (1500, 1, 1500))], ids=str
)
@pytest.mark.parametrize("dims", [(128, 128), (256, 128)], ids=str)
def test_the_same_bits_again(
    dims: tuple[int, int], seqlen: int, packed: tuple[int, ...] | None
) -> None:
    given = made(seqlen, (1, 2), dims, batch=1, packed=packed)
    first, second = (of_backend(given, "cuda", wide=False) for _ in range(2))
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


def test_auto_takes_the_binary() -> None:
    given = made(300, (2, 4), (128, 128))
    first, second = (of_backend(given, backend, wide=False) for backend in ("auto", "cuda"))
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
        out, _ = gradients_out({**given, **leaves})
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


@pytest.mark.parametrize("before", [3, 64, 700])
@pytest.mark.parametrize("packed", [(100, 28), (70, 1500, 200), (70, 2500, 200)], ids=str)
def test_rows_before_the_first_sequence(packed: tuple[int, ...], before: int) -> None:
    given = made(0, (1, 2), (64, 64), packed=(before, *packed))
    given["cu_seqlens"] = given["cu_seqlens"][1:].clone()
    given["initial_state"] = given["initial_state"][1:].clone()
    compared(given, "cuda")


@pytest.mark.parametrize("offsets", [(-7, 100, 10**6, 50), (150, 0, 192, 192)], ids=str)
def test_offsets_outside_the_tensor(offsets: tuple[int, ...]) -> None:
    """Inconsistent offsets give no access outside of tensors."""
    given = made(0, packed=(100, 28, 64), dims=(64, 64))
    given["cu_seqlens"] = torch.tensor(offsets, device=DEVICE)
    of_backend(given, "cuda", wide=False)
    torch.cuda.synchronize()


@pytest.mark.large
@pytest.mark.parametrize(
    ("seqlen", "heads", "dims", "batch"),
    [(33, (6, 6), (8, 8), 10923), (40, (16386, 65544), (8, 8), 1), (16448, (1, 256), (16, 512), 1)],
    ids=["batches", "heads", "elements"],
)
def test_large(seqlen: int, heads: tuple[int, int], dims: tuple[int, int], batch: int) -> None:
    """The last head's gradients are those of the head alone.

    Those of v to the bit. In a group with a careful head those of gates are another kernel's.
    """
    given = made(seqlen, heads, dims, batch=batch)
    given.pop("initial_state")
    last = {
        name: x
        if not isinstance(x, torch.Tensor)
        else x[-1:]
        if name in ("A_log", "dt_bias")
        else x[-1:, :, -1:].contiguous()
        for name, x in given.items()
    }
    results = []
    for call in (given, last):
        leaves = [call[name].requires_grad_() for name in ("v", "g", "beta")]
        out, _ = gradients_out(call)
        weight = torch.ones(1, device=DEVICE, dtype=out.dtype).expand_as(out).contiguous()
        grads = torch.autograd.grad(out, leaves, weight)
        results.append([x[-1:, :, -1:].clone() for x in grads])
        del out, grads, leaves, weight
    values, *gates = zip(*results, strict=True)
    assert torch.equal(*values)
    for one, other in gates:
        assert float((one - other).norm()) <= 1e-4 * float(other.norm())
