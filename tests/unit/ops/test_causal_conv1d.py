"""causal_conv1d on the CPU: values, states, packed sequences, layouts, gradients, transforms."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from causal_conv1d_oracle import packed
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from flashvar.backends.reference.causal_conv1d import formula
from flashvar.ops.causal_conv1d.api import causal_conv1d
from flashvar.ops.causal_conv1d.problem import Convolution
from flashvar.ops.causal_conv1d.torch_library import causal_conv1d_fwd

# Torch compiles formulas of its own for forward mode.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
ENDS = [0, 0, 3, 4, 4, 13, 15, 15]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made(
    batch: int = 2,
    seqlen: int = 9,
    dim: int = 5,
    width: int = 4,
    dtype: torch.dtype = torch.float64,
    columns: int | None = None,
    sequences: int | None = None,
) -> dict[str, torch.Tensor]:
    """All floating-point inputs."""
    columns = width - 1 if columns is None else columns
    shapes = {
        "x": (batch, seqlen, dim),
        "weight": (dim, width),
        "bias": (dim,),
        "residual": (batch, seqlen, dim),
        "initial_state": (sequences or batch, dim, columns),
    }
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype)
            for name, shape in shapes.items()}  # fmt: skip


def expected(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, residual: Any = None,
    initial_state: Any = None, silu: bool = False, columns: int = 0, ends: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The oracle, of a batch or of packed sequences."""
    batch, seqlen, _ = x.shape
    ends = [seqlen * i for i in range(batch + 1)] if ends is None else ends
    rest = None if residual is None else residual.flatten(0, 1)
    y, final = packed(x.flatten(0, 1), weight, bias, rest, initial_state, ends, silu, columns)
    return y.unflatten(0, (batch, seqlen)), final


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("width", [2, 3, 4, 7])
@pytest.mark.parametrize("ends", [None, ENDS], ids=["batch", "packed"])
@pytest.mark.parametrize("wanting", [(), ("bias", "residual"), ("initial_state",)], ids=str)
def test_values(
    wanting: tuple[str, ...], ends: list[int] | None, width: int, silu: bool, dtype: torch.dtype
) -> None:
    sizes = {} if ends is None else {"batch": 1, "seqlen": ends[-1], "sequences": len(ends) - 1}
    given = made(width=width, dtype=dtype, **sizes)
    for name in wanting:
        del given[name]
    y, final = causal_conv1d(
        **given,
        activation="silu" if silu else None,
        return_final_state=True,
        cu_seqlens=None if ends is None else torch.tensor(ends),
    )
    wanted, wanted_final = expected(**given, silu=silu, columns=width - 1, ends=ends)
    assert (y.dtype, final.dtype) == (dtype, dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), wanted, atol=16 * min(eps, 1e-6), rtol=eps)
    assert torch.equal(final.double(), wanted_final)


@pytest.mark.parametrize("seqlen", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("columns", [3, 4, 7])
@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
def test_states_of_any_columns(with_state: bool, columns: int, seqlen: int) -> None:
    given = made(seqlen=seqlen, columns=columns)
    del given["residual"]
    if not with_state:
        del given["initial_state"]
    y, final = causal_conv1d(**given, return_final_state=True, state_len=columns)
    wanted, wanted_final = expected(**given, columns=columns)
    torch.testing.assert_close(y, wanted)
    assert torch.equal(final, wanted_final)


@pytest.mark.parametrize("columns", [3, 4])
def test_states_chain_calls(columns: int) -> None:
    given = made(seqlen=11, columns=columns)
    x, state = given.pop("x"), given.pop("initial_state")
    residual = given.pop("residual")
    whole, last = causal_conv1d(
        x, **given, residual=residual, initial_state=state, activation="swish",
        return_final_state=True,
    )  # fmt: skip
    parts = []
    for a, b in [(0, 1), (1, 3), (3, 3), (3, 10), (10, 11)]:
        y, state = causal_conv1d(
            x[:, a:b], **given, residual=residual[:, a:b], initial_state=state,
            activation="silu", return_final_state=True,
        )  # fmt: skip
        parts.append(y)
    # To the last bit or one off: a CPU's vector code for exp is not its code for what is left over.
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-14, atol=1e-14)
    assert torch.equal(state, last)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rank", [2, 3])
def test_packed_is_each_sequence_alone(rank: int, index: torch.dtype) -> None:
    """In gradients too; what is NaN in one sequence is not in another."""
    given = made(1, ENDS[-1], sequences=len(ENDS) - 1)
    x = given.pop("x")
    x[0, 4:13] = torch.nan
    state = given.pop("initial_state")
    residual = given.pop("residual")
    leaves = [one.requires_grad_() for one in (x, residual, state)]
    first = (lambda one: one) if rank == 3 else (lambda one: one[0])
    y, final = causal_conv1d(
        first(x), **given, residual=first(residual), initial_state=state, activation="silu",
        return_final_state=True, cu_seqlens=torch.tensor(ENDS, dtype=index),
    )  # fmt: skip
    y = y if rank == 3 else y[None]
    alone = [
        causal_conv1d(
            x[:, a:b], **given, residual=residual[:, a:b], initial_state=state[i : i + 1],
            activation="silu", return_final_state=True,
        )
        for i, (a, b) in enumerate(pairwise(ENDS))
    ]  # fmt: skip
    others = torch.cat([one for one, _ in alone], 1), torch.cat([one for _, one in alone])
    torch.testing.assert_close((y, final), others, equal_nan=True, rtol=0, atol=0)
    assert y[0, :4].isfinite().all()
    assert y[0, 13:].isfinite().all()
    weights = torch.randn_like(y), torch.randn_like(final)
    found = torch.autograd.grad((y, final), leaves, weights)
    wanted = torch.autograd.grad(others, leaves, weights)
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("view", ["contiguous", "channels last", "sliced", "expanded"])
@pytest.mark.parametrize("ends", [None, ENDS], ids=["batch", "packed"])
def test_layout_bdt(ends: list[int] | None, view: str) -> None:
    sizes = {} if ends is None else {"batch": 1, "seqlen": ends[-1], "sequences": len(ends) - 1}
    given = made(**sizes)
    x, residual = given.pop("x"), given.pop("residual")
    if view == "expanded":
        x = x[:, :1].expand_as(x)
    options = {
        **given,
        "activation": "silu",
        "return_final_state": True,
        "cu_seqlens": None if ends is None else torch.tensor(ends),
    }
    wanted, wanted_final = causal_conv1d(x, residual=residual, **options)
    turned = x.transpose(1, 2)
    if view == "contiguous":
        turned = turned.contiguous()
    elif view == "sliced":
        turned = torch.cat((turned, turned), 1)[:, : x.shape[2]]
    turned.requires_grad_()
    y, final = causal_conv1d(
        turned, residual=residual.transpose(1, 2), layout="bdt", **options
    )  # fmt: skip
    torch.testing.assert_close((y.transpose(1, 2), final), (wanted, wanted_final), rtol=0, atol=0)
    if view == "contiguous":
        assert y.is_contiguous()
    elif view == "channels last":
        assert y.transpose(1, 2).is_contiguous()
    assert torch.autograd.grad(y.sum(), turned)[0].shape == turned.shape
    if ends is not None:
        flat, _ = causal_conv1d(
            turned[0], residual=residual.transpose(1, 2)[0], layout="bdt", **options
        )
        assert torch.equal(flat, y[0])


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_empty(shape: tuple[int, int, int]) -> None:
    given = made(*shape)
    leaves = [one.requires_grad_() for one in given.values()]
    y, final = causal_conv1d(**given, return_final_state=True)
    assert y.shape == shape
    assert final.shape == (shape[0], shape[2], 3)
    if shape[1] == 0:
        assert torch.equal(final, given["initial_state"])
    grads = torch.autograd.grad(y.sum() + final.sum(), leaves)
    assert all(torch.isfinite(one).all() for one in grads)
    none, states = causal_conv1d(
        torch.randn(0, 3), torch.randn(3, 2), cu_seqlens=torch.tensor([0]), return_final_state=True
    )
    assert (none.shape, states.shape) == ((0, 3), (0, 3, 1))


def test_dtypes_mix() -> None:
    """Weights of training under autocast, states of a float32 pool."""
    given = made(dtype=torch.bfloat16)
    for name in ("weight", "bias", "initial_state"):
        given[name] = given[name].float().requires_grad_()
    given["x"].requires_grad_()
    y, final = causal_conv1d(**given, return_final_state=True)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    wanted, _ = expected(**{name: one.detach() for name, one in given.items()})
    torch.testing.assert_close(y.double(), wanted, atol=1e-6, rtol=2**-8)
    leaves = [one for one in given.values() if one.requires_grad]
    grads = torch.autograd.grad(y.float().sum() + final.sum(), leaves)
    assert [one.dtype for one in grads] == [one.dtype for one in leaves]


def test_autocast_casts_nothing() -> None:
    given = made(dtype=torch.float32)
    wanted = causal_conv1d(**given)
    with torch.autocast("cpu", torch.bfloat16):
        y = causal_conv1d(**given)
    assert torch.equal(y, wanted)


@FORWARD_MODE
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("ends", [None, [0, 0, 2, 6]], ids=["batch", "packed"])
@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
def test_gradcheck(silu: bool, ends: list[int] | None, width: int) -> None:
    sizes = {"batch": 2, "seqlen": 3} if ends is None else {"batch": 1, "seqlen": 6, "sequences": 3}
    given = made(dim=2, width=width, columns=width, **sizes)
    cu_seqlens = None if ends is None else torch.tensor(ends)

    def call(*tensors: torch.Tensor) -> Any:
        return causal_conv1d(
            **dict(zip(given, tensors, strict=True)),
            activation="silu" if silu else None,
            return_final_state=True,
            cu_seqlens=cu_seqlens,
        )

    leaves = [one.requires_grad_() for one in given.values()]
    # Fast: along random directions, which any wrong entry of a Jacobian shows in.
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("wanted", ["y", "final"])
@pytest.mark.parametrize("leaf", ["x", "weight", "bias", "residual", "initial_state"])
def test_one_gradient(leaf: str, wanted: str) -> None:
    given = made()
    one = given[leaf].requires_grad_()
    found = causal_conv1d(**given, activation="silu", return_final_state=True)
    other = formula.forward(_convolution(**given), given["residual"], 3)
    place = 0 if wanted == "y" else 1
    grads = [
        torch.autograd.grad(
            results[place].sin().sum() + 0 * one.sum(), one, allow_unused=True
        )[0]
        for results in (found, other)
    ]  # fmt: skip
    torch.testing.assert_close(*grads)


def _convolution(x: Any, weight: Any, bias: Any, initial_state: Any, **_: Any) -> Convolution:
    return Convolution(x, weight, bias, initial_state, None, True)


def _loss(convolve: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def loss(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y, final = convolve(x, weight, state)
        return y.sin().sum() + (final * y.mean()).cos().sum()

    return loss


def _ours(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> Any:
    return causal_conv1d(
        x, weight, initial_state=state, activation="silu", return_final_state=True
    )  # fmt: skip


def _torchs(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> Any:
    return formula.forward(Convolution(x, weight, None, state, None, True), None, 3)


CHAINS: dict[str, Callable[..., Any]] = {
    "grad": lambda f: grad(f, (0, 1, 2)),
    "jacfwd": lambda f: jacfwd(f, (0, 1)),
    "hessian": lambda f: hessian(f, (0, 1)),
    "jacrev of grad": lambda f: jacrev(grad(f, (0, 1)), (0, 1)),
    "jvp": lambda f: lambda x, w, s: jvp(f, (x, w, s), (x.cos(), w.sin(), s.cos())),
}


@FORWARD_MODE
@pytest.mark.parametrize("mapped", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_transforms(chain: Callable[..., Any], mapped: bool) -> None:
    front = (3,) if mapped else ()
    x = torch.randn(*front, 2, 3, 2, dtype=torch.float64)
    weight = torch.randn(*front, 2, 4, dtype=torch.float64)
    state = torch.randn(*front, 2, 2, 3, dtype=torch.float64)
    ours, torchs = chain(_loss(_ours)), chain(_loss(_torchs))
    if mapped:
        ours, torchs = vmap(ours), vmap(torchs)
    torch.testing.assert_close(ours(x, weight, state), torchs(x, weight, state))


@FORWARD_MODE
def test_compiled_forward_mode() -> None:
    given = [torch.randn(size, dtype=torch.float64) for size in ((2, 3, 2), (2, 4), (2, 2, 3))]
    torch._dynamo.reset()
    ours = torch.compile(CHAINS["jvp"](_loss(_ours)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(ours(*given), CHAINS["jvp"](_loss(_torchs))(*given))


@pytest.mark.parametrize("layout", ["btd", "bdt"])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 2), (None, 1, None), (3, None, None)])
def test_vmap(in_dims: tuple[int | None, ...], layout: str) -> None:
    plain = made(1, 15, sequences=7)
    shapes = [plain[name].shape for name in ("x", "weight", "initial_state")]
    tensors = [
        torch.randn(shape if dim is None else (*shape[:dim], 3, *shape[dim:]), dtype=torch.float64)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    cu_seqlens = torch.tensor(ENDS)

    def call(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> Any:
        def loss(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            y, final = causal_conv1d(
                x if layout == "btd" else x.transpose(1, 2),
                weight, initial_state=state, activation="silu", return_final_state=True,
                cu_seqlens=cu_seqlens, layout=layout,
            )  # fmt: skip
            return y.sin().sum() + final.cos().sum()

        return grad(loss, (0, 1, 2))(x, weight, state)

    each = [
        call(*(x if dim is None else x.select(dim, i)
               for x, dim in zip(tensors, in_dims, strict=True)))
        for i in range(3)
    ]  # fmt: skip
    found = vmap(call, in_dims)(*tensors)
    for place in range(3):
        torch.testing.assert_close(found[place], torch.stack([one[place] for one in each]))


@pytest.mark.parametrize("layout", ["btd", "bdt"])
def test_vmap_of_no_entries(layout: str) -> None:
    given = made()
    rows = given["x"] if layout == "btd" else given["x"].transpose(1, 2)
    weight = given["weight"]

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, final = causal_conv1d(x, weight, return_final_state=True, layout=layout)
        return y.sum() + final.sum()

    none = rows.new_zeros(*rows.shape[:1], 0, *rows.shape[1:])
    of_rows, of_weight = vmap(grad(loss, (0, 1)), (1, None))(none, weight)
    assert of_rows.shape == (0, *rows.shape)
    assert of_weight.shape == (0, *weight.shape)


def test_batched_gradients() -> None:
    given = made()
    leaves = [one.requires_grad_() for one in given.values()]
    y = causal_conv1d(**given, activation="silu")
    weights = torch.randn(3, *y.shape, dtype=y.dtype)
    batched = torch.autograd.grad(y, leaves, weights, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in weights]
    for place, found in enumerate(batched):
        torch.testing.assert_close(found, torch.stack([one[place] for one in each]))


of_layouts = pytest.mark.parametrize("layout", ["btd", "bdt"])
of_batches = pytest.mark.parametrize("ends", [None, ENDS], ids=["batch", "packed"])


def given_to_op(ends: list[int] | None, layout: str) -> list[Any]:
    """The tensors of causal_conv1d_fwd, in order."""
    sizes = {} if ends is None else {"batch": 1, "seqlen": ends[-1], "sequences": len(ends) - 1}
    given = list(made(dtype=torch.float32, **sizes).values())
    if layout == "bdt":
        given[0], given[3] = (given[i].transpose(1, 2) for i in (0, 3))
    return [*given, None if ends is None else torch.tensor(ends)]


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@OPCHECK
@of_layouts
@of_batches
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_opcheck(training: bool, ends: list[int] | None, layout: str) -> None:
    *floats, cu_seqlens = given_to_op(ends, layout)
    for one in floats:
        one.requires_grad_(training)
    # What is traced for training holds what is traced for inference, and the backward.
    traced = ("test_aot_dispatch_dynamic",) if training else ()
    arguments = (*floats, cu_seqlens, True, 3, layout, "auto")
    torch.library.opcheck(causal_conv1d_fwd, arguments, test_utils=(*CHECKS, *traced))


@OPCHECK
@of_layouts
@of_batches
def test_opcheck_of_the_backward(ends: list[int] | None, layout: str) -> None:
    given = given_to_op(ends, layout)
    y, final = causal_conv1d_fwd(*given, True, 3, layout, "auto")
    x, weight, bias, _, state, cu_seqlens = given
    backward = torch.ops.flashvar.causal_conv1d_bwd.default
    for optional in ((y, final, x, weight, bias, state), (None, final, x, weight, None, None)):
        arguments = (*optional, cu_seqlens, True, layout, "auto")
        torch.library.opcheck(backward, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training(dynamic: bool) -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y, final = causal_conv1d(
            x * 1, weight, initial_state=state, activation="silu", return_final_state=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return (y * 2).square().sum() + final.sum()

    cu_seqlens = torch.tensor(ENDS)
    given = made(1, ENDS[-1], sequences=len(ENDS) - 1, dtype=torch.float32)
    leaves = [given[name].requires_grad_() for name in ("x", "weight", "initial_state")]
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found, wanted = (torch.autograd.grad(call(*leaves), leaves) for call in (compiled, step))
    torch.testing.assert_close(found, wanted)


def test_exports_as_one_op() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
            return causal_conv1d(x, weight, activation="silu", return_final_state=True)

    given = made(dtype=torch.float32)
    arguments = (given["x"], given["weight"])
    program = torch.export.export(Layer(), arguments)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("flashvar.causal_conv1d_fwd.default") == 1
    torch.testing.assert_close(program.module()(*arguments), Layer()(*arguments))


def test_exports_states_of_any_columns() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> Any:
            return causal_conv1d(x, weight, initial_state=state, return_final_state=True)

    shapes = (None, None, {2: torch.export.Dim("columns", min=4, max=64)})
    given, other = (made(columns=columns) for columns in (5, 9))
    names = ("x", "weight", "initial_state")
    arguments = tuple(given[name] for name in names)
    program = torch.export.export(Layer(), arguments, dynamic_shapes=shapes, strict=False)
    arguments = tuple(other[name] for name in names)
    torch.testing.assert_close(program.module()(*arguments), Layer()(*arguments))


def test_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    given = made()
    x, weight = (given[name].requires_grad_() for name in ("x", "weight"))

    def call(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return causal_conv1d(x, weight, activation="silu").sin().sum()

    losses = checkpoint(call, x, weight, use_reentrant=False), call(x, weight)
    found, wanted = (torch.autograd.grad(loss, (x, weight)) for loss in losses)
    torch.testing.assert_close(found, wanted)


def test_meta_tensors() -> None:
    given = {name: one.to("meta") for name, one in made(dtype=torch.bfloat16).items()}
    y, final = causal_conv1d(**given, return_final_state=True)
    assert (y.shape, y.dtype, final.shape) == ((2, 9, 5), torch.bfloat16, (2, 5, 3))
    assert y.is_meta
