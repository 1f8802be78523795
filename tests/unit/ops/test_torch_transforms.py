"""What torch does around a call: autocast, checkpoints, transforms, counters, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashvar
from flashvar.backends.reference import attention as reference
from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention import plan as attention_plan
from flashvar.ops.attention.flops import visible_pairs
from flashvar.ops.attention.problem import NO_TENSORS, BackwardProblem, Inputs, Options
from flashvar.ops.attention.torch_library import attention_fwd
from flashvar.ops.plans import Plans

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RNG = torch.tensor([5, 6])
# Torch's own opcheck copies the inputs, and reads .grad of the copies.
OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def make(*lead: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensors:
    q = torch.randn(*lead, 2, 5, 4, 16, dtype=dtype)
    k, v = (torch.randn(*lead, 2, 7, 2, 16, dtype=dtype) for _ in range(2))
    return (q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad))


EXTRAS: dict[str, Any] = {
    "bias": {"bias": torch.randn(2, 1, 5, 7)},
    "sinks": {"sinks": torch.randn(4)},
    "alibi": {"alibi_slopes": torch.rand(4)},
    "dropout": {"rng_state": RNG},
}


@OPCHECK
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_opcheck_of_extras(extra: str, grad: bool) -> None:
    inputs = Inputs(*make(grad=grad), **EXTRAS[extra])
    options = Options(window_left=3, softcap=2.0, dropout_p=0.3 if extra == "dropout" else 0.0)
    # What is traced for training holds what is traced for inference.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    traced = ("test_aot_dispatch_dynamic",) if grad else ()
    torch.library.opcheck(attention_fwd, (*inputs, *options), test_utils=(*checks, *traced))


@OPCHECK
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_opcheck_of_packed_sequences(dtype: torch.dtype) -> None:
    q = torch.randn(9, 2, 8, requires_grad=True)
    offsets = torch.tensor([0, 4, 9], dtype=dtype)
    inputs = Inputs(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    torch.library.opcheck(attention_fwd, (*inputs, *Options(max_seqlen_q=5)))


@pytest.mark.parametrize("extra", ["bias", "sinks"])
def test_opcheck_of_a_backward_with_an_extra_gradient(extra: str) -> None:
    inputs = Inputs(*make(), **EXTRAS[extra])
    out, lse = flashvar.attention(*inputs[:3], **EXTRAS[extra], return_lse=True)
    wanted = (extra == "bias", extra == "sinks")
    arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, *wanted)
    torch.library.opcheck(
        torch.ops.flashvar.attention_bwd.default, (*arguments, *inputs, *Options())
    )


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks"])
def test_gradient_of_one_input_alone(wanted: str) -> None:
    leaves = dict(zip(("q", "k", "v"), make(), strict=True), bias=torch.randn(1, 1, 5, 7))
    leaves["sinks"] = torch.randn(4)
    every = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    expected = torch.autograd.grad(flashvar.attention(**every).square().sum(), every[wanted])
    leaves[wanted].requires_grad_()
    found = torch.autograd.grad(flashvar.attention(**leaves).square().sum(), leaves[wanted])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("outputs", ["lse", "both"])
def test_gradient_through_the_log_sum_exp_alone(outputs: str) -> None:
    q, k, v = make(grad=True)
    out, lse = flashvar.attention(q, k, v, return_lse=True)
    if outputs == "lse":
        (found,) = torch.autograd.grad(lse.sum(), q)
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
        torch.testing.assert_close(found, torch.autograd.grad(scores.logsumexp(-1).sum(), q)[0])
    else:
        assert torch.autograd.grad(lse.sum() + out.sum(), v)[0].shape == v.shape


def test_packed_training_compiles() -> None:
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashvar.attention_varlen(
            q, k, v, cu_seqlens_q=offsets, max_seqlen_q=5, causal=True, softcap=3.0
        )
        return out.square().sum()

    leaves = [torch.randn(9, 2, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(step(*leaves), leaves))


def test_packed_sequences_of_any_total_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return flashvar.attention_varlen(q, q, q, cu_seqlens_q=offsets, causal=True)

    def inputs(total: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(total, 2, 8), torch.tensor([0, 4, total], dtype=torch.int32)

    shapes = ({0: torch.export.Dim("total")}, None)
    program = torch.export.export(Model(), inputs(9), dynamic_shapes=shapes)
    longer = inputs(13)
    torch.testing.assert_close(program.module()(*longer), Model()(*longer))


def test_features_compile() -> None:
    bias, slopes = torch.randn(1, 1, 5, 7, requires_grad=True), torch.rand(4)
    options: dict[str, Any] = {"dropout_p": 0.3, "rng_state": RNG, "window_size": (3, -1)}

    def step(*given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashvar.attention(
            *given[:3], bias=given[3], sinks=given[4], alibi_slopes=slopes, **options
        )
        return out.square().sum()

    leaves = (*make(grad=True), bias, torch.randn(4, requires_grad=True))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(step(*leaves), leaves))


def test_drawn_dropout_compiles() -> None:
    compiled = torch.compile(
        lambda q, k, v: flashvar.attention(q, k, v, dropout_p=0.5),
        fullgraph=True,
        backend="aot_eager",
    )
    assert compiled(*make()).isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointed_dropout(reentrant: bool) -> None:
    leaves = make(grad=True)

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashvar.attention(*inputs, dropout_p=0.4)
        return out

    torch.manual_seed(1)
    expected = torch.autograd.grad(step(*leaves).square().sum(), leaves)
    torch.manual_seed(1)
    out = checkpoint(step, *leaves, use_reentrant=reentrant)
    if reentrant:
        out.square().sum().backward()
        found: tuple[torch.Tensor | None, ...] = tuple(leaf.grad for leaf in leaves)
    else:
        found = torch.autograd.grad(out.square().sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_autocast_casts_as_sdpa_does() -> None:
    leaves = make(grad=True)
    bias = torch.randn(1, 1, 5, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flashvar.attention(*leaves, bias=bias)
        mixed = flashvar.attention(leaves[0].bfloat16(), *leaves[1:])
        wide = flashvar.attention(*(leaf.double() for leaf in leaves))
    assert (out.dtype, mixed.dtype, wide.dtype) == (torch.bfloat16, torch.bfloat16, torch.float64)
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert {grad.dtype for grad in grads} == {torch.float32}


def test_autocast_compiles() -> None:
    compiled = torch.compile(
        lambda q, k, v: flashvar.attention(q, k, v), fullgraph=True, backend="aot_eager"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(*make()).dtype == torch.bfloat16


def test_deterministic_algorithms_reach_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    prepare = reference.prepare_backward

    def watched(problem: BackwardProblem, result: Any) -> Any:
        asked.append(problem.forward.deterministic)
        return prepare(problem, result)

    monkeypatch.setattr(reference, "prepare_backward", watched)
    monkeypatch.setattr(attention_plan, "_backward_plans", Plans())
    q, k, v = make(grad=True)
    for everywhere, here in [(False, False), (True, False), (False, True)]:
        monkeypatch.setattr(attention_plan, "_backward_plans", Plans())
        torch.use_deterministic_algorithms(everywhere)
        try:
            flashvar.attention(q, k, v, deterministic=here).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 2, 0)], ids=str)
def test_vmap_of_gradients(in_dims: tuple[int | None, ...]) -> None:
    bias = torch.randn(1, 4, 5, 7)
    every = make(3)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return flashvar.attention(q, k, v, bias=b, causal=True).square().sum()

    gradients = torch.func.grad(step, argnums=(0, 1, 2, 3))
    one = [x if dim is not None else x[0] for x, dim in zip(every, in_dims, strict=True)]
    moved = [x if not dim else x.movedim(0, dim) for x, dim in zip(one, in_dims, strict=True)]
    found = torch.vmap(gradients, in_dims=(*in_dims, None))(*moved, bias)
    rows = [
        gradients(*(x if dim is None else x[i] for x, dim in zip(one, in_dims, strict=True)), bias)
        for i in range(3)
    ]
    expected = [torch.stack(column) for column in zip(*rows, strict=True)]
    torch.testing.assert_close(list(found), expected)


@pytest.mark.parametrize("mapped", [False, True], ids=["shared", "mapped"])
def test_vmap_of_extras(mapped: bool) -> None:
    q, k, v = make(3)
    bias, slopes = torch.randn(3, 2, 1, 5, 7), torch.rand(3, 4)
    dim = 0 if mapped else None

    def step(*given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashvar.attention(*given[:3], bias=given[3], alibi_slopes=given[4])
        return out

    shared = (bias, slopes) if mapped else (bias[0], slopes[0])
    found = torch.vmap(step, in_dims=(0, 0, 0, dim, dim))(q, k, v, *shared)
    expected = torch.stack(
        [
            step(q[i], k[i], v[i], *((bias[i], slopes[i]) if mapped else (bias[0], slopes[0])))
            for i in range(3)
        ]
    )
    torch.testing.assert_close(found, expected)


def test_packed_sequences_are_not_mapped() -> None:
    q, offsets = torch.randn(3, 9, 2, 8), torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(BackendUnavailableError, match="packed sequences cannot be mapped"):
        torch.vmap(lambda q: flashvar.attention_varlen(q, q, q, cu_seqlens_q=offsets))(q)


@pytest.mark.parametrize("seqlen_q", [0, 1, 4, 6])
@pytest.mark.parametrize("seqlen_k", [0, 1, 4, 6])
def test_visible_pairs(seqlen_q: int, seqlen_k: int) -> None:
    for left in range(-1, 6):
        for right in range(-1, 6):
            expected = sum(
                (left < 0 or i + seqlen_k - seqlen_q - left <= j)
                and (right < 0 or j <= i + seqlen_k - seqlen_q + right)
                for i in range(seqlen_q)
                for j in range(seqlen_k)
            )
            assert visible_pairs(seqlen_q, seqlen_k, left, right) == expected


def test_flops_of_a_causal_step() -> None:
    q, k, v = make(grad=True)
    with FlopCounterMode(display=False) as counter:
        flashvar.attention(q, k, v, causal=True).sum().backward()
    pairs = 2 * 4 * sum(range(3, 8))  # batch, heads, and 3 to 7 keys for the 5 queries
    assert counter.get_total_flops() == 2 * 16 * pairs * (2 + 5)


def test_flops_of_packed_sequences() -> None:
    q = torch.randn(9, 2, 8)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        flashvar.attention_varlen(q, q, q, cu_seqlens_q=offsets)
    assert counter.get_total_flops() == 2 * (16 + 25) * 2 * 16


def of_sinks(q: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The loss of each head."""
    out: torch.Tensor = flashvar.attention(q, q, q, sinks=sinks)
    return out.square().sum((0, 1, 3))


def with_dropout(q: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The loss of each head."""
    out: torch.Tensor = flashvar.attention(q, q, q, dropout_p=0.5, rng_state=state)
    return out.square().sum((0, 1, 3))


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BY_ENTRY: dict[str, tuple[Loss, torch.Tensor]] = {
    "sinks": (of_sinks, torch.randn(3, 4)),
    "dropout": (with_dropout, torch.tensor([[5, 6], [5, 7], [8, 6]])),
}


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (4, 1)], ids=str)
@pytest.mark.parametrize("extra", BY_ENTRY)
def test_vmap_of_what_batches_share(extra: str, in_dims: tuple[int | None, ...]) -> None:
    """Sinks are those of a whole batch; a mask of dropout depends on the place in it."""
    loss, others = BY_ENTRY[extra]
    q = make(3)[0]

    def gradients(*given: torch.Tensor) -> Any:
        leaves = tuple(place for place, x in enumerate(given) if x.is_floating_point())
        return torch.func.grad(lambda *x: loss(*x).sum(), leaves)(*given)

    pairs = list(zip((q, others), in_dims, strict=True))
    given = [x[0] if dim is None else x.movedim(0, dim) for x, dim in pairs]
    rows = [gradients(*(x[0 if dim is None else i] for x, dim in pairs)) for i in range(3)]
    expected = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    torch.testing.assert_close(torch.vmap(gradients, in_dims)(*given), expected)


@pytest.mark.parametrize("extra", BY_ENTRY)
def test_vmap_of_no_entries(extra: str) -> None:
    loss, others = BY_ENTRY[extra]
    q = make(0)[0].requires_grad_()
    found = torch.vmap(loss, in_dims=(0, None))(q, others[0])
    assert found.shape == (0, 4)
    assert torch.autograd.grad(found.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("extra", BY_ENTRY)
def test_a_jacobian_is_that_of_the_forward(extra: str) -> None:
    """A mapped backward has the dropout mask of its forward, which was not mapped."""
    loss, others = BY_ENTRY[extra]
    q = make(grad=True)[0]
    rows = [torch.autograd.grad(one, q, retain_graph=True)[0] for one in loss(q, others[0])]
    found = torch.func.jacrev(loss)(q.detach(), others[0])
    torch.testing.assert_close(found, torch.stack(rows))


def test_options_of_the_op_are_those_of_options() -> None:
    names = [one.name for one in attention_fwd._schema.arguments]
    assert names == [*Inputs._fields, *Options._fields]
    assert len(NO_TENSORS) == len(Inputs._fields) - 3
