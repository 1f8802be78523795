"""Tools of torch around every op: counters, traces, hooks, exported programs, other tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.masked import masked_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flashvar
from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.errors import DeviceError, InvalidInputError, LayoutError
from flashvar.flash_attn import flash_attn_with_kvcache
from flashvar.integrations.documents import Documents
from flashvar.integrations.torch import attribute

Call = tuple[Callable[..., Any], list[torch.Tensor]]


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def attention() -> Call:
    return flashvar.attention, [made(1, 4, 2, 8) for _ in range(3)]


def merge_states() -> Call:
    tensors = [made(1, 4, 2, 8), made(1, 4, 2, 8), made(1, 2, 4), made(1, 2, 4)]
    return lambda a, b, c, d: flashvar.merge_states([a, b], [c, d])[0], tensors


def causal_conv1d() -> Call:
    return flashvar.causal_conv1d, [made(1, 4, 6), made(6, 3)]


def named_sequences() -> Call:
    names = torch.tensor([[0, 0, 1, 1]])
    return lambda x, w: flashvar.causal_conv1d(x, w, seq_idx=names), [made(1, 4, 6), made(6, 3)]


def gated_delta_rule() -> Call:
    tensors = [*(made(1, 4, 2, 8) for _ in range(3)), made(1, 4, 2).sigmoid()]
    return lambda q, k, v, b: flashvar.gated_delta_rule(q, k, v, None, b)[0], tensors


OPS = [attention, merge_states, causal_conv1d, named_sequences, gated_delta_rule]

COUNTED = """
import torch, flashvar
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

leaf = torch.randn(1, 4, 2, 8, requires_grad=True)
x = torch.randn(1, 4, 6, requires_grad=True)
calls = [
    flashvar.attention(leaf, leaf, leaf),
    flashvar.gated_delta_rule(leaf, leaf, leaf, None, leaf[..., 0].sigmoid())[0],
    flashvar.causal_conv1d(x, torch.randn(6, 3)),
]
for out in calls:
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    print(counter.get_total_flops())
"""


class _Seen(TorchDispatchMode):  # type: ignore[misc]
    """A mode that changes nothing."""

    def __torch_dispatch__(
        self, op: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        return op(*arguments, **(options or {}))


def test_flops_of_a_backward_alone(python_with_models: str) -> None:
    """As the first call in a process that any counter sees."""
    finished = subprocess.run(
        [python_with_models, "-c", COUNTED],
        env={**os.environ, "PYTHONPATH": str(Path(flashvar.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    products = (4 * 2 * 8) * (4 * 5), (4 * 2 * 8) * (8 * 7), (4 * 6) * (3 * 2)
    assert finished.stdout.split() == [str(2 * count) for count in products]


def test_flops_of_convolutions() -> None:
    x, weight, state = made(2, 5, 6), made(6, 3), made(2, 6, 3)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        flashvar.causal_conv1d(x, weight)
        flashvar.causal_conv1d_update(x, state, weight)
    assert counter.get_total_flops() == 2 * (2 * 2 * 5 * 6 * 3)


def test_flops_of_real_offsets_beside_fake_tensors() -> None:
    documents = Documents.of_lengths([2, 2])
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        q = torch.empty(4, 1, 8)
        documents.attention(q, q, q)
    assert counter.get_total_flops() == 2 * (2 * 2 * 2) * 16


def test_flops_of_no_fake_sequences() -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, offsets = torch.empty(0, 1, 8), torch.empty(1, dtype=torch.int32)
        flashvar.attention_varlen(q, q, q, cu_seqlens_q=offsets)
    assert counter.get_total_flops() == 0


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize("columns", [None, 4])
def test_final_states_are_traced(columns: int | None) -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return flashvar.causal_conv1d(x, weight, return_final_state=True, state_len=columns)

    inputs = made(1, 5, 6), made(6, 3)
    traced = torch.jit.trace(call, inputs, check_trace=False)
    torch.testing.assert_close(traced(*inputs), call(*inputs))


def test_tables_of_an_exported_rotation_have_gradients() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any, cos: Any, sin: Any) -> torch.Tensor:
            return apply_rotary_emb(x, cos, sin)

    inputs = made(1, 4, 2, 8), made(4, 3), made(4, 3)
    exported = torch.export.export(Model(), inputs).module()
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = torch.autograd.grad(exported(*leaves).square().sum(), leaves)
    expected = torch.autograd.grad(Model()(*leaves).square().sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_tables_that_hooks_moved_away_are_refused() -> None:
    x, tables = made(1, 4, 2, 8).requires_grad_(), (made(4, 3), made(4, 3))
    with saved_tensors_hooks(lambda kept: kept.to("meta"), lambda kept: kept):
        out = apply_rotary_emb(x, *tables)
    with pytest.raises(DeviceError, match="cos must be on the device of x"):
        out.sum().backward()


def test_results_that_hooks_changed_are_refused() -> None:
    q = made(1, 4, 2, 8).requires_grad_()
    # The log-sum-exp alone, which kernels read by its address.
    with saved_tensors_hooks(lambda kept: kept.float() if kept.dim() == 3 else kept, lambda x: x):
        out = flashvar.attention(q, q, q)
    with pytest.raises(InvalidInputError, match=r"out and lse must be .* in the backward"):
        out.sum().backward()


def attention_with_all_options() -> Call:
    slopes, state = torch.rand(1, 2), torch.tensor([3, 4])
    options = {"alibi_slopes": slopes, "dropout_p": 0.3, "rng_state": state, "layout": "bhsd"}

    def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> torch.Tensor:
        return flashvar.attention(q, k, v, bias=bias, sinks=sinks, **options)

    return call, [*(made(1, 2, 4, 8) for _ in range(3)), made(1, 2, 4, 4), made(2)]


def attention_of_packed_sequences() -> Call:
    ends, used = torch.tensor([0, 3, 7]), torch.tensor([2, 4])

    def call(q: Any, k: Any, v: Any) -> torch.Tensor:
        options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "seqused_k": used}
        return flashvar.attention_varlen(q, k, v, **options)

    return call, [made(7, 2, 8) for _ in range(3)]


def last_dimension_strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which no dimension is contiguous, as after a transposition elsewhere."""
    return torch.stack([tensor, tensor], -1).movedim(-2, 0).contiguous().movedim(0, -2)[..., 0]


@pytest.mark.parametrize("mode", [nullcontext, partial(FlopCounterMode, display=False)])
@pytest.mark.parametrize(
    "op",
    [*OPS, attention_with_all_options, attention_of_packed_sequences],
    ids=lambda op: op.__name__,
)
def test_hooks_may_change_the_order_of_memory(op: Callable[[], Call], mode: Any) -> None:
    call, leaves = op()
    leaves = [x.requires_grad_() for x in leaves]
    expected = torch.autograd.grad(call(*leaves).sin().sum(), leaves)
    for _ in range(2):
        with mode(), saved_tensors_hooks(last_dimension_strided, lambda kept: kept):
            found = torch.autograd.grad(call(*leaves).sin().sum(), leaves)
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's derivatives
@pytest.mark.parametrize("outer", ["reverse-mode", "forward-mode"])
@pytest.mark.parametrize("op", [merge_states, causal_conv1d, named_sequences])
def test_hessians_of_autograd_functional(op: Callable[[], Call], outer: str) -> None:
    call, (x, *others) = op()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return call(x, *others).sin().sum()

    ask = torch.autograd.functional.hessian
    found = ask(loss, x, vectorize=True, outer_jacobian_strategy=outer)
    torch.testing.assert_close(found, ask(loss, x))


@pytest.mark.filterwarnings("ignore:.*MaskedTensor:UserWarning")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_subclasses_without_the_op_are_refused(op: Callable[[], Call]) -> None:
    call, tensors = op()
    masked = [masked_tensor(x, torch.ones_like(x, dtype=torch.bool)) for x in tensors]
    with pytest.raises(InvalidInputError, match=r"types that implement flashvar's ops.*Masked"):
        call(*masked)


@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning")
@pytest.mark.parametrize("name", ["weight", "initial_state"])
def test_nested_tensors_beside_a_final_state_are_refused(name: str) -> None:
    given = {"x": made(2, 4, 6), "weight": made(6, 3), "initial_state": made(2, 6, 2)}
    given[name] = torch.nested.nested_tensor(list(given[name]))
    with pytest.raises(LayoutError, match=f"{name} must be a strided tensor, found a nested"):
        flashvar.causal_conv1d(**given, return_final_state=True)


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad], ids=["", "of gradients"])
def test_mapped_names_of_sequences_are_refused(transform: Callable[..., Any]) -> None:
    weight = made(6, 3)

    def call(x: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        return flashvar.causal_conv1d(x, weight, seq_idx=names).sum()

    with pytest.raises(InvalidInputError, match="seq_idx must be the same for all"):
        torch.vmap(transform(call))(made(2, 1, 4, 6), torch.zeros(2, 1, 4, dtype=torch.int64))


def test_pages_beside_another_default_device() -> None:
    q, keys, table = made(2, 1, 2, 8), made(4, 8, 2, 8), torch.tensor([[2, 0], [1, 3]])
    lengths = torch.tensor([11, 5], dtype=torch.int32)
    with torch.device("meta"):
        found = flash_attn_with_kvcache(q, keys, keys, cache_seqlens=lengths, block_table=table)
    rows = keys[table].flatten(1, 2)
    wanted = [
        flashvar.attention(q[i : i + 1], *[rows[i : i + 1, :n]] * 2) for i, n in ((0, 11), (1, 5))
    ]
    torch.testing.assert_close(found, torch.cat(wanted))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["torch.distributed.tensor", "torch.utils.flop_counter"])
def test_modules_that_another_thread_is_importing(
    op: Callable[[], Call], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, tensors = op()
    with _Seen():
        wanted = call(*tensors)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # its first lines have run
        assert torch.equal(call(*tensors), wanted)


def test_a_replaced_function_while_dtensor_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("tensor"))
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *_: None)
    assert not attribute.splits_sequences()


FILTERS = made(8, 3)


def causal_attention(q: torch.Tensor, flag: bool) -> Any:
    return flashvar.attention(q, q, q, causal=flag, deterministic=flag, return_lse=flag)


def convolution_with_state(q: torch.Tensor, flag: bool) -> Any:
    return flashvar.causal_conv1d(q[:, :, 0], FILTERS, return_final_state=flag)


def rule_with_norms(q: torch.Tensor, flag: bool) -> Any:
    flags = dict.fromkeys(
        ("qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "return_final_state"), flag
    )
    return flashvar.gated_delta_rule(q, q, q, None, q[..., 0].sigmoid(), **flags)


@pytest.mark.parametrize(
    "call", [causal_attention, convolution_with_state, rule_with_norms], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("tool", ["compile", "export"])
def test_flags_that_compare_sizes(call: Callable[..., Any], tool: str) -> None:
    """Such a flag is a symbol while a graph of any size is traced."""

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return call(q, q.shape[1] > 2)

    model, tensors = Model(), [made(1, length, 2, 8) for length in (5, 2, 3)]
    if tool == "compile":
        traced = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    else:
        size = {1: torch.export.Dim("seqlen", min=3, max=64)}
        traced = torch.export.export(
            model, (tensors[0],), dynamic_shapes={"q": size}, strict=False
        ).module()
        del tensors[1]
    for q in tensors:
        torch.testing.assert_close(traced(q), model(q))
