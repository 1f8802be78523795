"""What torch may do with the ops: trace, compile, export, fake, intercept, differentiate."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashvar
from flashvar.errors import ShapeError
from flashvar.ops import plans
from flashvar.ops.attention import call as attention_call
from flashvar.ops.attention import plan as attention_plan
from flashvar.ops.attention.problem import NO_TENSORS, Options
from flashvar.ops.attention.torch_library import attention_fwd
from flashvar.ops.plans import Plans

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Torch's own opcheck copies the inputs, and reads .grad of the copies.
OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def make(
    seqlen_q: int = 9,
    seqlen_k: int = 7,
    layout: str = "bshd",
    grad: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    q = torch.randn(2, seqlen_q, 4, 16, dtype=dtype)
    k, v = (torch.randn(2, seqlen_k, 2, 16, dtype=dtype) for _ in range(2))
    if layout.startswith("bhsd"):
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    if grad:
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    return q, k, v


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@OPCHECK
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "bhsd->bshd"])
def test_opcheck_forward(layout: str, grad: bool, dtype: torch.dtype) -> None:
    options = Options(causal=True, scale=0.3, layout=layout)
    arguments = (*make(layout=layout, grad=grad, dtype=dtype), *NO_TENSORS, *options)
    # What is traced for training holds what is traced for inference, and has no dtype of its own.
    traced = ("test_aot_dispatch_dynamic",) if grad and dtype == torch.float32 else ()
    torch.library.opcheck(attention_fwd, arguments, test_utils=(*CHECKS, *traced))


def test_opcheck_forward_of_views() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in make(layout="bhsd"))
    arguments = (q, k, v, *NO_TENSORS, *Options())
    torch.library.opcheck(attention_fwd, arguments)


@pytest.mark.parametrize("absent", ["nothing", "grad_out", "grad_lse"])
def test_opcheck_backward(absent: str) -> None:
    grad_out = None if absent == "grad_out" else torch.randn(2, 9, 4, 16)
    grad_lse = None if absent == "grad_lse" else torch.randn(2, 4, 9)
    inputs = make()
    out, lse = flashvar.attention(*inputs, return_lse=True)
    arguments = (grad_out, grad_lse, out, lse, False, False, *inputs, *NO_TENSORS, *Options())
    # What is traced of the forward for training has the backward in it.
    backward = torch.ops.flashvar.attention_bwd.default
    torch.library.opcheck(backward, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("head_dim", [16, 12])  # the second is padded where kernels run
def test_heads_first_in_and_rows_first_out(head_dim: int) -> None:
    tensors = [torch.randn(2, 4, 9, head_dim, requires_grad=True) for _ in range(3)]
    grad = torch.randn(2, 9, 4, head_dim)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return flashvar.attention(*inputs, causal=True, layout="bhsd->bshd")

    expected = flashvar.attention(*tensors, causal=True, layout="bhsd").transpose(1, 2)
    wanted = torch.autograd.grad(expected, tensors, grad)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for call in (attend, compiled):
        out = call(*tensors)
        assert out.is_contiguous()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        found = torch.autograd.grad(out, tensors, grad)
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
    rows = torch.vmap(attend)(*(tensor[:, None] for tensor in tensors))
    torch.testing.assert_close(rows[:, 0], expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training_equals_eager(dynamic: bool) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = flashvar.attention(q * 2, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen_q, seqlen_k in [(5, 8), (6, 11)]:
        tensors = make(seqlen_q, seqlen_k, grad=True)
        found = torch.autograd.grad(compiled(*tensors), tensors)
        expected = torch.autograd.grad(step(*tensors), tensors)
        torch.testing.assert_close(found, expected)


def test_one_dynamic_graph_serves_all_lengths() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: flashvar.attention(q, k, v), fullgraph=True, dynamic=True, backend=counter
    )
    for lengths in [(5, 8), (6, 11), (30, 4)]:
        tensors = make(*lengths)
        torch.testing.assert_close(compiled(*tensors), flashvar.attention(*tensors))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dim", range(4), ids=["batch", "seqlen", "heads", "head dim"])
def test_one_graph_serves_all_sizes_of_a_dynamic_dimension(dim: int) -> None:
    counter = CompileCounter()
    compiled = torch.compile(flashvar.attention, fullgraph=True, backend=counter)
    for size in (3, 5, 8):
        shape = [2, 4, 2, 16]
        shape[dim] = size
        tensors = torch.randn(3, *shape).unbind()
        for x in tensors:
            torch._dynamo.mark_dynamic(x, dim)
        torch.testing.assert_close(compiled(*tensors), flashvar.attention(*tensors))
    assert counter.frame_count == 1


def test_compiles_as_the_first_use_in_a_process(python_with_models: str) -> None:
    program = """
import torch, flashvar
q = torch.randn(1, 4, 2, 8)
compiled = torch.compile(lambda q: flashvar.attention(q, q, q), fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(q), flashvar.attention(q, q, q))
"""
    finished = subprocess.run(
        [python_with_models, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(flashvar.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


def test_exports_as_one_op() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flashvar.attention(q, k, v, layout="bhsd")

    tensors = make(layout="bhsd")
    program = torch.export.export(Model(), tensors)
    assert "flashvar.attention_fwd.default" in str(program.graph)
    torch.testing.assert_close(program.module()(*tensors), Model()(*tensors))


@pytest.mark.parametrize("other", ["bshd", "bhsd", "bhsd->bshd"])
def test_fake_tensors_look_like_real_ones(other: str) -> None:
    layout = "bhsd" if other == "bshd" else "bshd"
    views = [tensor.transpose(1, 2) for tensor in make(layout=layout)]
    real = flashvar.attention(*views, return_lse=True, layout=other)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(view) for view in views]
        fake = flashvar.attention(*fakes, return_lse=True, layout=other)
    for one, two in zip(real, fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)


def test_fake_cuda_tensors_need_no_gpu() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
        assert flashvar.attention(q, q, q).device.type == "cuda"
        odd = torch.empty(1, 3, 2, 12, device="cuda", dtype=torch.bfloat16)
        assert flashvar.attention(odd, odd, odd).shape == odd.shape
        large = torch.empty(1, 3, 2, 520, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(ShapeError, match="from 1 to 512"):
            flashvar.attention(large, large, large)


def test_meta_tensors() -> None:
    q = torch.empty(1, 3, 2, 8, device="meta")
    out, lse = flashvar.attention(q, q, q, return_lse=True)
    assert (out.shape, lse.shape, out.is_meta) == (q.shape, (1, 2, 3), True)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_meta_tensors_of_a_call_of_another_device(grad: bool) -> None:
    """The op serves them before a backend is chosen, which no device is there for."""
    q, k, v = (x.to("meta").requires_grad_(grad) for x in make())
    out, lse = attention_fwd(q, k, v, *NO_TENSORS, *Options(backend="cuda"))
    assert (out.shape, lse.shape, out.is_meta) == (q.shape, (2, 4, 9), True)
    assert out.requires_grad == grad


def test_gradients_of_packed_meta_tensors() -> None:
    q = torch.empty(3, 2, 8, device="meta", requires_grad=True)
    ends = torch.tensor([0, 1, 3], dtype=torch.int32, device="meta")
    flashvar.attention_varlen(q, q, q, cu_seqlens_q=ends).sum().backward()
    assert (q.grad.shape, q.grad.is_meta) == (q.shape, True)


def test_packed_meta_tensors_of_strict_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict calls read cu_seqlens on every device, but these have no values."""
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    monkeypatch.setattr(attention_plan, "_plans", Plans())
    q = torch.empty(3, 2, 8, device="meta")
    ends = torch.tensor([0, 1, 3], dtype=torch.int32, device="meta")
    assert flashvar.attention_varlen(q, q, q, cu_seqlens_q=ends).is_meta


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Ops, _Functions], ids=["dispatch-mode", "function-mode"])
def test_modes_see_one_op(mode: type[_Ops] | type[_Functions]) -> None:
    with mode() as active:
        flashvar.attention(*make())
    assert [name for name in active.seen if "attention" in name] == [
        "flashvar.attention_fwd.default"
    ]


class _Tagged(torch.Tensor):
    pass


def test_subclasses_stay_what_they_are() -> None:
    q, k, v = make()
    out = flashvar.attention(q.as_subclass(_Tagged), k, v)
    assert type(out) is _Tagged
    torch.testing.assert_close(out.as_subclass(torch.Tensor), flashvar.attention(q, k, v))


def dispatched(monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor) -> bool:
    """Whether a call goes through torch's dispatcher."""
    calls: list[object] = []
    op = attention_call.attention_fwd

    def watched(*arguments: object) -> Any:
        calls.append(arguments)
        return op(*arguments)

    monkeypatch.setattr(attention_call, "attention_fwd", watched)
    flashvar.attention(*tensors)
    return bool(calls)


def test_plain_calls_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dispatched(monkeypatch, *make())


def test_training_skips_the_dispatcher_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dispatched(monkeypatch, *make(grad=True))
    with torch.no_grad():
        assert not dispatched(monkeypatch, *make(grad=True))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_dispatcher_is_entered_once(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all arguments of a Python kernel apart, which is most of an op's host time."""
    tensors, grads = make(grad=grad), (torch.randn(2, 9, 4, 16), torch.randn(2, 4, 9))
    expected = flashvar.attention(*tensors, return_lse=True)
    monkeypatch.delattr(torch._ops.OpOverload, "redispatch")
    for _ in range(3):
        results = attention_fwd(*tensors, *NO_TENSORS, *Options())
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        if grad:
            found, wanted = (torch.autograd.grad(x, tensors, grads) for x in (results, expected))
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            expected = flashvar.attention(*tensors, return_lse=True)


def test_the_op_of_a_backward_is_entered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, grads = make(grad=True), (torch.randn(2, 9, 4, 16), torch.randn(2, 4, 9))
    results = flashvar.attention(*tensors, return_lse=True)
    saved = [x.detach() for x in (*results, *tensors)]
    wanted = torch.autograd.grad(results, tensors, grads)
    monkeypatch.delattr(torch._ops.OpOverload, "redispatch")
    backward = torch.ops.flashvar.attention_bwd.default
    for recording in (False, True):
        for _ in range(3):
            with torch.set_grad_enabled(recording):
                arguments = (*grads, *saved[:2], False, False, *saved[2:], *NO_TENSORS, *Options())
                *found, of_bias, of_sinks = backward(*arguments)
            torch.testing.assert_close(tuple(found), wanted, rtol=0, atol=0)
            assert of_bias.numel() == of_sinks.numel() == 0


def test_a_second_call_makes_no_second_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_plans", Plans())
    q, k, v = make()
    for _ in range(3):
        flashvar.attention(q, k, v)
    flashvar.attention(q, k, v, causal=True)
    assert len(attention_plan._plans) == 2
    for _ in range(3):
        attention_fwd(q, k, v, *NO_TENSORS, *Options())
    assert len(attention_plan._plans) == 2


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_plans", Plans())
    monkeypatch.setattr(plans, "PLANS_KEPT", 3)
    for seqlen_k in range(1, 9):
        flashvar.attention(*make(1, seqlen_k))
    assert len(attention_plan._plans) <= 3


def test_checkpointed_training() -> None:
    from torch.utils.checkpoint import checkpoint

    tensors = make(grad=True)
    out = checkpoint(lambda *inputs: flashvar.attention(*inputs), *tensors, use_reentrant=False)
    found = torch.autograd.grad(out.sum(), tensors)
    expected = torch.autograd.grad(flashvar.attention(*tensors).sum(), tensors)
    torch.testing.assert_close(found, expected)
