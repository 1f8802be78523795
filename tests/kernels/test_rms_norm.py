"""Norms without a GPU: the Triton kernels, interpreted and compiled; the ops; when each serves."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from interpreted_rms_norm import CASES, Case
from interpreter import interpreted
from test_triton_compile import stack_bytes
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from flashvar.layers.norms import rms_norm, rms_norm_gated
from flashvar.ops.plans import Plans
from flashvar.ops.rms_norm import formula, run, torch_library
from flashvar.ops.rms_norm.formula import Norm, Tensors

triton = pytest.importorskip("triton", reason="triton is not installed")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process."""
    script = str(Path(__file__).with_name("interpreted_rms_norm.py"))
    answers: dict[str, str] = json.loads(interpreted(python, "-W", "ignore", script))
    return answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


def compiled(capability: int, tensors: Tensors, direction: str) -> list[Any]:
    """The kernels that launches on such a device would start."""
    from flashvar.backends.triton import rms_norm

    found: list[Any] = []

    class Compiling:
        def __init__(self, kernel: Any, grid: Any, arguments: dict[str, Any]) -> None:
            self.kernel, self.arguments = kernel, arguments

        def __call__(self, *given: Any) -> None:
            found.append(compiled_for(capability, self.kernel, given, self.arguments))

    norm = Norm(1e-5, True, False, tensors.x.dtype, None)
    given = (torch.empty_like(tensors.x), None, *tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rms_norm, "RepeatedLaunch", Compiling)
        if direction == "forward":
            rms_norm.prepare_forward(tensors, norm)(given[0], None, tensors)
        else:
            rms_norm.prepare_backward(given, norm)(tensors, given)
    return found


# A copy of 16 bytes to shared memory.
WIDE_COPY = re.compile(r"cp\.async\.cg\.shared\.global .*\], 0x10\b")


def compiled_for(capability: int, kernel: Any, given: Any, arguments: dict[str, Any]) -> Any:
    """A kernel that was given these tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = {**dict(zip(kernel.arg_names, given, strict=False)), **arguments}
    signature, constants, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            aligned[index,] = [["tt.divisibility", 16]]
        elif value is None or name.isupper():
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if name.endswith("_row") and value % 16 == 0:
                aligned[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={name: arguments[name] for name in ("num_warps", "enable_fp_fusion")},
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiles_to_wide_moves_and_spills_nothing(
    direction: str, capability: int, tmp_path: Path
) -> None:
    # Of other dims, what one dtype compiles to is what the other does.
    wide = product((8192,), (torch.bfloat16, torch.float32))
    for dim, dtype in ((128, torch.bfloat16), (1024, torch.float32), *wide):
        x = torch.empty(4, dim, dtype=dtype)
        weight = torch.empty(dim)
        residual = x if dim == 8192 else None
        tensors = Tensors(x, x, weight, weight if dim == 1024 else None, residual)
        kernels = compiled(capability, tensors, direction)
        assert len(kernels) == (1 if direction == "forward" else 2)
        for kernel in kernels:
            assert stack_bytes(kernel, tmp_path) == 0, (dim, dtype)
            ptx = kernel.asm["ptx"]
            assert "ld.global.v4.b32" in ptx or WIDE_COPY.search(ptx), (dim, dtype)
            assert kernel.metadata.shared <= 48 * 1024, (dim, dtype)
        assert "st.global.v4.b32" in kernels[0].asm["ptx"], (dim, dtype)


def given(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    sizes = ((3, 5, 8), (3, 5, 8), (8,), (8,), (3, 5, 8))
    return [torch.randn(one, dtype=dtype).requires_grad_() for one in sizes]


@pytest.mark.parametrize("sigmoid", [False, True], ids=["swish", "sigmoid"])
@pytest.mark.parametrize("mean", [True, False], ids=["rms", "l2"])
def test_the_formula_of_the_gradients(mean: bool, sigmoid: bool) -> None:
    tensors = given(torch.float64)
    norm = Norm(1e-3, mean, sigmoid, torch.float64, torch.float64)
    outs = formula.forward(Tensors._make(tensors), norm)
    grads = [torch.randn_like(x) for x in tensors[:2]]
    expected = torch.autograd.grad(outs, tensors, grads)
    found = formula.backward(*grads, Tensors._make(tensors), norm)
    torch.testing.assert_close(tuple(found), expected)


@pytest.mark.filterwarnings("ignore")  # opcheck's own
@pytest.mark.parametrize("total", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_are_registered_right(dtype: torch.dtype, total: torch.dtype | None) -> None:
    x, gate, weight, bias, residual = given()
    x = x.detach().to(dtype).requires_grad_()
    norm = Norm(1e-5, True, False, dtype, total)
    torch.library.opcheck(
        torch.ops.flashvar.rms_norm.default, (x, gate, weight, bias, residual, *norm)
    )
    if total != dtype:  # else the sum would be x, which callers have
        torch.library.opcheck(torch.ops.flashvar.rms_norm.default, (x, *[None] * 4, *norm))
    plain = [None if one is None else one.detach() for one in (x, gate, weight, bias, residual)]
    grads = torch.randn(3, 5, 8, dtype=dtype), None if total is None else torch.randn(3, 5, 8)
    torch.library.opcheck(torch.ops.flashvar.rms_norm_bwd.default, (*grads, *plain, *norm))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a device, with the formula in place of the kernels; lists their launches."""
    from flashvar.backends.triton import rms_norm

    launches: list[str] = []

    def prepare_forward(_: Tensors, norm: Norm) -> Any:
        def launch(y: Any, total: Any, tensors: Any) -> None:
            launches.append("forward")
            write((y, total), formula.forward(Tensors._make(tensors), norm))

        return launch

    def prepare_backward(_: Any, norm: Norm) -> Any:
        def launch(grads: Any, given: Any) -> None:
            launches.append("backward")
            write(grads, formula.backward(*given[:2], Tensors._make(given[2:]), norm))

        return launch

    def write(outs: Any, values: Any) -> None:
        for out, value in zip(outs, values, strict=True):
            if out is not None:
                out.copy_(value)

    monkeypatch.setattr(rms_norm, "prepare_forward", prepare_forward)
    monkeypatch.setattr(rms_norm, "prepare_backward", prepare_backward)
    monkeypatch.setattr(torch_library, "_in_triton", lambda x: True)
    monkeypatch.setattr(run, "_plans", Plans())
    monkeypatch.setattr(run, "_backward_plans", Plans())
    return launches


def gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> Any:
    return rms_norm_gated(x, gate, weight, None)


def test_repeated_calls_are_found_at_once(
    served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = given()[:3]
    frozen = [one.detach() for one in leaves]

    def step() -> None:
        gated(*frozen)
        gated(*leaves).square().sum().backward()

    def refuse(*_: object) -> None:
        raise AssertionError("a repeated call was checked anew")

    step()
    for name in ("_kernels_run", "skips_dispatcher", "_OP", "_BACKWARD_OP"):
        monkeypatch.setattr(torch_library, name, refuse)
    step()
    assert served == ["forward", "forward", "backward"] * 2


@pytest.mark.parametrize("wanted", list(product([False, True], repeat=4)), ids=str)
def test_gradients_that_are_wanted_alone_are_made(
    wanted: tuple[bool, ...], served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashvar.backends.triton import rms_norm

    made = []

    def prepare(given: Any, norm: Norm, prepare: Any = rms_norm.prepare_backward) -> Any:
        launch = prepare(given, norm)

        def watched(grads: Any, given: Any) -> None:
            made.append([grad is not None for grad in grads])
            launch(grads, given)

        return watched

    monkeypatch.setattr(rms_norm, "prepare_backward", prepare)
    tensors = given()
    for x, is_wanted in zip(tensors[1:], wanted, strict=True):
        x.requires_grad_(is_wanted)
    leaves = [x for x in tensors if x.requires_grad]
    x, gate, weight, bias, residual = tensors
    expected = formula.forward(Tensors._make(tensors), Norm(1e-6, True, False, x.dtype, None))[0]
    grad = torch.randn_like(x)
    for _ in range(2):
        y = rms_norm_gated(x, gate, weight, bias, residual=residual)
        found = torch.autograd.grad(y, leaves, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))
    assert made == [[True, *wanted[:3], False]] * 2  # that of the residual is that of x
    assert served == ["forward", "backward"] * 2


class Seen(TorchDispatchMode):
    """The calls of ops that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")  # those of torch.jit
def test_repeated_calls_are_seen(served: list[str]) -> None:
    """By modes, traces, transforms and subclasses, which the first call was not for."""
    x, gate, weight = (one.detach() for one in given()[:3])
    leaves = [one.clone().requires_grad_() for one in (x, gate, weight)]
    for _ in range(2):
        plain = gated(x, gate, weight)
        gated(*leaves).sum().backward()
    served.clear()
    with Seen() as seen:
        gated(x, gate, weight)
    assert "flashvar.rms_norm.default" in seen.ops
    out = gated(*leaves)
    with Seen() as seen:
        out.sum().backward()
    assert "flashvar.rms_norm_bwd.default" in seen.ops
    traced = torch.jit.trace(gated, (x, gate, weight), check_trace=False)
    assert "flashvar::rms_norm" in str(traced.graph)
    served.clear()
    mapped = torch.vmap(lambda one: gated(x, gate, weight) + one)(torch.zeros(2))
    torch.testing.assert_close(mapped[0], plain)
    with forward_ad.dual_level():
        gated(x, gate, weight)
    gated(x.as_subclass(Other), gate, weight)
    assert served == []


class Other(torch.Tensor):  # type: ignore[misc]
    """A subclass."""


def test_events_of_the_profiler(served: list[str]) -> None:
    leaves = given()[:3]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(2):
            gated(*[one.detach() for one in leaves])
            gated(*leaves).sum().backward()
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts.get("flashvar::rms_norm") == 4
    assert counts.get("flashvar::rms_norm_bwd") == 2


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch.func.jvp loads it
def test_what_the_kernels_serve(served: list[str]) -> None:
    x, gate, weight = given()[:3]
    y = gated(x, gate, weight)
    assert served == ["forward"]
    y.sum().backward()
    assert served == ["forward", "backward"]
    assert all(one.grad is not None for one in (x, gate, weight))
    served.clear()
    gated(x.double(), gate.double(), weight.double())
    gated(x, gate[:1], weight)
    torch.func.vmap(gated, (0, 0, None))(x, gate, weight)
    torch.func.jvp(lambda x: gated(x, gate, weight), (x,), (x,))
    assert served == []


def test_derivatives_around_the_kernels(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_library, "_IN_TRITON", (torch.float64,))
    leaves = [one.detach().double().requires_grad_() for one in given()[:3]]
    assert torch.autograd.gradcheck(gated, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(gated, leaves)
    assert {*served} == {"forward", "backward"}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("as_on_a_device", [False, True])
def test_compiled(as_on_a_device: bool, request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    leaves = given()[:3]
    wanted = torch.autograd.grad(gated(*leaves).square().sum(), leaves)
    calls = request.getfixturevalue("served") if as_on_a_device else []
    out = torch.compile(gated, backend="aot_eager", fullgraph=True)(*leaves)
    found = torch.autograd.grad(out.square().sum(), leaves)
    torch.testing.assert_close(found, wanted)
    assert calls == (["forward", "backward"] if as_on_a_device else [])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_under_autocast(reentrant: bool, served: list[str]) -> None:
    leaves = [one.detach().bfloat16().requires_grad_() for one in given()[:3]]
    wanted = torch.autograd.grad(gated(*leaves).sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(gated, *leaves, use_reentrant=reentrant)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(torch.equal(x.grad, grad) for x, grad in zip(leaves, wanted, strict=True))
    assert served == ["forward", "backward", "forward", "forward", "backward"]


def test_the_sum_and_its_gradients(served: list[str]) -> None:
    for residual in (torch.bfloat16, torch.float32):
        x, _, weight, _, other = (one.detach().bfloat16().requires_grad_() for one in given())
        other = other.detach().to(residual).requires_grad_()
        outs = rms_norm(x, weight, None, other, prenorm=True)
        grads = [torch.randn_like(one) for one in outs]
        found = torch.autograd.grad(outs, (x, weight, other), grads)
        norm = Norm(1e-5, True, False, x.dtype, residual)
        expected = formula.forward(Tensors(x, None, weight, None, other), norm)
        wanted = torch.autograd.grad(expected, (x, weight, other), grads)
        torch.testing.assert_close(tuple(outs), expected)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert served == ["forward", "backward"] * 2


@pytest.mark.filterwarnings("error")
def test_batches_of_the_ops(served: list[str]) -> None:
    """A program that was traced without them calls the op; a backward calls it by itself."""
    x, gate, weight = given()[:3]
    y = gated(x, gate, weight)
    grads = torch.randn(4, *y.shape)

    def gradients(grad: torch.Tensor) -> Any:
        return torch.autograd.grad(y, (x, gate, weight), grad, retain_graph=True)

    wanted = [torch.stack(some) for some in zip(*map(gradients, grads), strict=True)]
    torch.testing.assert_close(torch.vmap(gradients)(grads), tuple(wanted))
    options = (None, None, 1e-6, True, False, torch.float32, None)
    op = torch.vmap(lambda x, gate: torch.ops.flashvar.rms_norm(x, gate, weight, *options)[0])
    torch.testing.assert_close(op(x, gate), y)
    assert served == ["forward", *["backward"] * (4 + 4), *["forward"] * 3]
