"""flashvar.merge_states on the CPU: values, hostile rows, layouts, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from merge_states_calls import Tensors, made, rows
from merge_states_oracle import gradients, merged
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import flashvar
from flashvar.backends.reference.merge_states import formula
from flashvar.ops.merge_states.problem import Parts
from flashvar.ops.merge_states.torch_library import merge_states_fwd

NAN, INF = torch.nan, torch.inf
# Torch compiles formulas of its own for forward mode.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 7, 1])
@pytest.mark.parametrize("parts", [1, 2, 3, 17, 300])
def test_values(parts: int, head_dim: int, dtype: torch.dtype) -> None:
    outs, lses = made(parts, head_dim, dtype)
    out, lse = flashvar.merge_states(outs, lses)
    expected, expected_lse, _ = merged(outs, rows(lses))
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert lse.dtype == lses[0].dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, atol=16 * eps, rtol=eps)
    limit = 1e-6 if lse.dtype == torch.float32 else 1e-14
    torch.testing.assert_close(lse.double().transpose(1, 2), expected_lse, atol=limit, rtol=limit)
    stacked = flashvar.merge_states(torch.stack(outs), torch.stack(lses))
    assert torch.equal(out, stacked[0])
    assert torch.equal(lse, stacked[1])


def test_attentions_over_parts_of_the_keys() -> None:
    q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
    whole, whole_lse = flashvar.attention(q, k, v, return_lse=True)
    cuts = [(0, 2), (2, 3), (3, 9)]
    parts = [
        flashvar.attention(q, k[:, a:b].contiguous(), v[:, a:b].contiguous(), return_lse=True)
        for a, b in cuts
    ]
    out, lse = flashvar.merge_states(*zip(*parts, strict=True))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


HOSTILE = {
    "absent": [-INF, 1.0, 2.0],
    "all absent": [-INF, -INF, -INF],
    "far below": [-1e4, 1e4, 0.0],
    "large": [1e30, -1e30, 1e30],
    "infinite": [INF, 1.0, -INF],
    "infinite twice": [INF, INF, 0.0],
    "nan": [NAN, 1.0, -INF],
    "nan and infinite": [NAN, INF, 0.0],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE)
def test_hostile_rows(values: list[float], dtype: torch.dtype) -> None:
    """Parts without weight hold NaN; the rows beside hold what they held."""
    outs, lses = made(dtype=dtype)
    high = max(values) if all(value == value for value in values) else NAN
    for out, lse, value in zip(outs, lses, values, strict=True):
        lse[1, 2, 3] = value
        if value == -INF or value < high - 200:
            out[1, 3, 2] = NAN
    for one in (*outs, *lses):
        one.requires_grad_()
    out, lse = flashvar.merge_states(outs, lses)
    expected, expected_lse, weights = merged([x.detach() for x in outs], rows(lses))
    close = {"equal_nan": True, "check_dtype": False, "atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(out.detach().double(), expected, **close)
    torch.testing.assert_close(lse.detach().transpose(1, 2), expected_lse, **close)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), [*outs, *lses], (grad_out, grad_lse))
    of_outs, of_lses = gradients(
        [x.detach() for x in outs], rows([x.detach() for x in lses]), grad_out,
        grad_lse.transpose(1, 2),
    )  # fmt: skip
    for i, weight in enumerate(weights):
        torch.testing.assert_close(found[i].double(), of_outs[i], **close)
        torch.testing.assert_close(found[3 + i].transpose(1, 2), of_lses[i], **close)
        assert (found[i][weight == 0] == 0).all()
        assert (found[3 + i].transpose(1, 2)[weight == 0] == 0).all()


@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize("layout", ["bhsd", "bhsd->bshd", "packed"])
def test_layouts(layout: str, stacked: bool) -> None:
    outs, lses = made(grad=True)
    expected = flashvar.merge_states(outs, lses)
    weights = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, [*outs, *lses], weights)
    options = {} if layout == "packed" else {"layout": layout}
    if layout == "packed":
        given = [x.flatten(0, 1) for x in outs], [x.transpose(0, 1).flatten(1) for x in lses]
    else:
        given = [x.transpose(1, 2).contiguous() for x in outs], lses
    if stacked:
        given = tuple(torch.stack(x) for x in given)
    out, lse = flashvar.merge_states(*given, **options)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    if layout == "packed":
        out, lse = out.unflatten(0, (2, 5)), lse.unflatten(1, (2, 5)).transpose(0, 1)
    elif layout == "bhsd":
        out = out.transpose(1, 2)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
    found = torch.autograd.grad((out, lse), [*outs, *lses], weights)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("view", ["sliced", "every second", "expanded", "one differs", "lses"])
def test_strides(view: str) -> None:
    outs, lses = made(head_dim=8)
    expected = flashvar.merge_states([x.clone() for x in outs], lses)
    if view == "sliced":
        outs = [torch.cat((x, x), -1)[..., :8] for x in outs]
    elif view == "every second":
        outs = [x.repeat_interleave(2, -1)[..., ::2] for x in outs]
    elif view == "expanded":
        outs = [x[:1].expand(2, -1, -1, -1) for x in outs]
        expected = flashvar.merge_states([x.contiguous() for x in outs], lses)
    elif view == "one differs":
        outs[1] = outs[1].transpose(1, 2).contiguous().transpose(1, 2)
    else:
        lses = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in lses]
    found = flashvar.merge_states(outs, lses)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "shape", [(0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8), (0, 4, 8), (2, 5, 4, 0)], ids=str
)
def test_empty(shape: tuple[int, ...]) -> None:
    outs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    *batch, seqlen, heads, _ = shape
    lses = [torch.randn(*batch, heads, seqlen, requires_grad=True) for _ in range(2)]
    out, lse = flashvar.merge_states(outs, lses)
    assert out.shape == shape
    torch.testing.assert_close(lse, torch.logaddexp(*lses))
    grads = torch.autograd.grad((out.sum(), lse.sum()), [*outs, *lses])
    assert all(torch.isfinite(one).all() for one in grads)


def test_lists_and_stacked_tensors_mix() -> None:
    outs, lses = made()
    expected = flashvar.merge_states(outs, lses)
    torch.testing.assert_close(flashvar.merge_states(torch.stack(outs), lses), expected)
    torch.testing.assert_close(flashvar.merge_states(tuple(outs), torch.stack(lses)), expected)


def test_the_same_bits_again() -> None:
    outs, lses = made(17, 64, torch.bfloat16)
    first, second = (flashvar.merge_states(outs, lses) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_autocast_casts_nothing() -> None:
    outs, lses = made(dtype=torch.float32)
    expected = flashvar.merge_states(outs, lses)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flashvar.merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)


@FORWARD_MODE
@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
def test_gradcheck(stacked: bool) -> None:
    outs = [torch.randn(1, 2, 2, 3, dtype=torch.float64) for _ in range(3)]
    lses = [torch.randn(1, 2, 2, dtype=torch.float64) for _ in range(3)]
    lses[0][0, 1, 1] = -INF

    def call(*tensors: torch.Tensor) -> Any:
        half = len(tensors) // 2
        given = tensors if stacked else (tensors[:half], tensors[half:])
        return flashvar.merge_states(*given)

    given = [torch.stack(outs), torch.stack(lses)] if stacked else [*outs, *lses]
    # Finite differences of -inf are none: that part's lse stays.
    leaves = [x.requires_grad_(bool(torch.isfinite(x).all())) for x in given]
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("wanted", ["out", "lse"])
def test_gradient_through_one_result(wanted: str) -> None:
    outs, lses = made(grad=True)
    out, lse = flashvar.merge_states(outs, lses)
    other = formula.forward(Parts(tuple(outs), tuple(lses), False))
    place = 0 if wanted == "out" else 1
    found, expected = (
        torch.autograd.grad(x[place].sin().sum(), [*outs, *lses], allow_unused=True,
                            materialize_grads=True)
        for x in ((out, lse), other)
    )  # fmt: skip
    torch.testing.assert_close(found, expected)


def _loss(merge: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def loss(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        out, lse = merge(outs, lses)
        return out.sin().sum() + (lse * out.mean()).cos().sum()

    return loss


CHAINS: dict[str, Callable[..., Any]] = {
    "grad": lambda f: grad(f, (0, 1)),
    "jacfwd": lambda f: jacfwd(f, (0, 1)),
    "hessian": lambda f: hessian(f, (0, 1)),
    "jacrev of grad": lambda f: jacrev(grad(f, (0, 1)), (0, 1)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jvp": lambda f: lambda o, s: jvp(f, (o, s), (o.cos(), s.sin())),
}


@FORWARD_MODE
@pytest.mark.parametrize("mapped", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_transforms(chain: Callable[..., Any], mapped: bool) -> None:
    front = (3,) if mapped else ()
    outs = torch.randn(*front, 2, 1, 2, 2, 3, dtype=torch.float64)
    lses = torch.randn(*front, 2, 1, 2, 2, dtype=torch.float64)
    ours = chain(_loss(flashvar.merge_states))
    torchs = chain(_loss(lambda o, s: formula.forward(Parts((o,), (s,), True))))
    if mapped:
        ours, torchs = vmap(ours), vmap(torchs)
    torch.testing.assert_close(ours(outs, lses), torchs(outs, lses))


@FORWARD_MODE
def test_compiled_forward_mode() -> None:
    outs = torch.randn(2, 1, 2, 2, 3, dtype=torch.float64)
    lses = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    torch._dynamo.reset()
    chain = CHAINS["jvp"](_loss(flashvar.merge_states))
    ours = torch.compile(chain, fullgraph=True, backend="aot_eager")
    torchs = CHAINS["jvp"](_loss(lambda o, s: formula.forward(Parts((o,), (s,), True))))
    torch.testing.assert_close(ours(outs, lses), torchs(outs, lses))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 2), (3, 0)], ids=str)
def test_vmap(in_dims: tuple[int | None, ...], packed: bool) -> None:
    """Of gradients, with the parts listed: some are mapped, at some dimension."""
    shape, lse_shape = ((7, 4, 8), (4, 7)) if packed else ((2, 5, 4, 8), (2, 4, 5))
    of_outs, of_lse = in_dims
    outs = torch.randn(3, *shape)
    lse, other = torch.randn(3, *lse_shape), torch.randn(lse_shape)
    constant = torch.randn(shape)

    def call(out: torch.Tensor, one: torch.Tensor) -> Any:
        def loss(out: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
            merged, lse = flashvar.merge_states([out, constant], [one, other])
            return merged.sin().sum() + lse.cos().sum()

        return grad(loss, (0, 1))(out, one)

    each = [
        call(
            outs[0] if of_outs is None else outs[i],
            lse[0] if of_lse is None else lse[i],
        )
        for i in range(3)
    ]
    found = vmap(call, in_dims)(
        outs[0] if of_outs is None else outs.movedim(0, of_outs),
        lse[0] if of_lse is None else lse.movedim(0, of_lse),
    )
    for place in (0, 1):
        torch.testing.assert_close(found[place], torch.stack([one[place] for one in each]))


def test_batched_gradients() -> None:
    outs, lses = made(grad=True)
    out, _ = flashvar.merge_states(outs, lses)
    weights = torch.randn(3, *out.shape, dtype=out.dtype)
    leaves = [*outs, *lses]
    batched = torch.autograd.grad(out, leaves, weights, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in weights]
    for place, found in enumerate(batched):
        torch.testing.assert_close(found, torch.stack([one[place] for one in each]))


@OPCHECK
@pytest.mark.parametrize(
    ("layout", "training"),
    [("bshd", True), ("bhsd->bshd", False), ("packed", False), ("stacked", True)],
)
def test_opcheck(layout: str, training: bool) -> None:
    outs, lses = made(dtype=torch.float32)
    if layout.startswith("bhsd"):
        outs = [x.transpose(1, 2) for x in outs]
    elif layout == "packed":
        outs, lses = [x[0] for x in outs], [x[0] for x in lses]
    elif layout == "stacked":
        outs, lses = [torch.stack(outs)], [torch.stack(lses)]
    for one in (*outs, *lses):
        one.requires_grad_(training)
    options = (layout == "stacked", layout if layout.startswith("bhsd") else "bshd", "auto")
    # What is traced for training holds what is traced for inference, and the backward.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    traced = ("test_aot_dispatch_dynamic",) if training else ()
    torch.library.opcheck(merge_states_fwd, (outs, lses, *options), test_utils=(*checks, *traced))
    out, lse = (x.detach() for x in merge_states_fwd(outs, lses, *options))
    outs, lses = ([x.detach() for x in one] for one in (outs, lses))
    backward = torch.ops.flashvar.merge_states_bwd.default
    for grads in ((out, lse), (None, lse))[: 1 + training]:
        torch.library.opcheck(backward, (*grads, outs, lses, *options), test_utils=checks)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training(dynamic: bool) -> None:
    torch._dynamo.reset()

    def step(outs: Tensors, lses: Tensors) -> torch.Tensor:
        out, lse = flashvar.merge_states([x * 1 for x in outs], lses)
        return (out.float() * 2).square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    outs, lses = made(dtype=torch.float32, grad=True)
    found, expected = (
        torch.autograd.grad(call(outs, lses), [*outs, *lses]) for call in (compiled, step)
    )
    torch.testing.assert_close(found, expected)


def test_exports_as_one_op() -> None:
    class Merge(torch.nn.Module):
        def forward(self, out: torch.Tensor, lse: torch.Tensor) -> Any:
            return flashvar.merge_states([out, out * 2], [lse, lse + 1])

    (out, *_), (lse, *_) = made(dtype=torch.float32)
    program = torch.export.export(Merge(), (out, lse))
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("flashvar.merge_states_fwd.default") == 1
    torch.testing.assert_close(program.module()(out, lse), Merge()(out, lse))


def test_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    outs, lses = made(grad=True)
    found, expected = (
        torch.autograd.grad(one, [*outs, *lses])
        for one in (
            checkpoint(
                lambda *x: flashvar.merge_states(x[:3], x[3:])[0].sin().sum(),
                *(*outs, *lses),
                use_reentrant=False,
            ),
            flashvar.merge_states(outs, lses)[0].sin().sum(),
        )
    )
    torch.testing.assert_close(found, expected)


def test_meta_and_fake_tensors() -> None:
    outs, lses = made(dtype=torch.bfloat16)
    out, lse = flashvar.merge_states([x.to("meta") for x in outs], [x.to("meta") for x in lses])
    assert (out.shape, out.dtype, lse.shape) == ((2, 5, 4, 8), torch.bfloat16, (2, 4, 5))
    assert out.is_meta


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_timed_moves_the_bytes_that_are_counted(direction: str) -> None:
    from flashvar.ops.merge_states import speed

    cell = speed._cell(direction, 3, 4)
    parts = 3 * 4 * speed.HEADS * (2 * speed.HEAD_DIM + 4)
    assert cell.work == parts + parts / 3 + (parts if direction == "backward" else 0)
    for contender in ("flashvar", *speed.PEERS):
        result = speed.call(cell, contender, torch.device("cpu"))()
        if contender == "copy":
            assert 2 * result.nbytes == cell.work
        else:
            assert len(result) == (2 if direction == "forward" else 6)


def test_warmup_kinds() -> None:
    import argparse

    from flashvar.ops.merge_states import warmup

    parser = argparse.ArgumentParser()
    warmup.add_options(parser)
    found = warmup.kinds(parser.parse_args(["--parts", "2,4", "--head-dim", "64", "--backward"]))
    assert [str(one) for one in found] == [
        "forward bf16 head dim 64, 2 parts",
        "forward and backward bf16 head dim 64, 2 parts",
        "forward bf16 head dim 64, 4 parts",
        "forward and backward bf16 head dim 64, 4 parts",
    ]
    assert [one.function for one in found[1].requests(0)] == [
        "merge_states_fwd",
        "merge_states_bwd",
    ]
    with pytest.raises(flashvar.ConfigurationError, match="--parts: expected 1 or more, found 0"):
        warmup.kinds(parser.parse_args(["--parts", "0"]))
