"""The structs of gated_delta_rule that Python packs for a binary, and which calls go to one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from abi_structs import declared

from flashvar.backends.cuda import gated_delta_rule as cuda
from flashvar.binaries import loader
from flashvar.binaries.registry import Binary
from flashvar.errors import BackendUnavailableError
from flashvar.ops import backend_choice
from flashvar.ops.gated_delta_rule import run
from flashvar.ops.gated_delta_rule.api import gated_delta_rule
from flashvar.ops.gated_delta_rule.problem import Gradients, Inputs
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.plans import Plans
from flashvar.selection import resolve
from flashvar.selection.candidates import CandidateResult

CHOSEN = CandidateResult("cuda", "cuda", True, "", binary=cast("Binary", object()))
PARAMS = {name: declared(f"flashvar_{name}_params") for name in (FORWARD, BACKWARD, UPDATE)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects what is handed to a library that does nothing, and what asked for its workspace."""
    collected: list[Any] = []

    def function(name: str) -> Any:
        def given(packed: bytes) -> Any:
            assert len(packed) == ctypes.sizeof(PARAMS[name])
            return PARAMS[name].from_buffer_copy(packed)

        def workspace(packed: bytes) -> int:
            assert given(packed).call.workspace in (0, None)
            return 512

        return SimpleNamespace(
            launch=lambda packed: collected.append(given(packed)), workspace=workspace
        )

    monkeypatch.setattr(loader, "load", lambda binary: SimpleNamespace(function=function))
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False
    )
    real = cuda.function_of
    monkeypatch.setattr(cuda, "function_of", lambda name, chosen, device: real(name, chosen, 3))
    return collected


def made(packed: bool = False, dtype: torch.dtype = torch.half, **changes: Any) -> Inputs:
    batch, seqlen = (1, 15) if packed else (3, 5)
    inputs = Inputs(
        torch.empty(batch, seqlen, 2, 24, dtype=dtype),
        torch.empty(batch, seqlen, 2, 24, dtype=dtype),
        torch.empty(batch, seqlen, 4, 40, dtype=dtype),
        torch.empty(batch, seqlen, 4),
        torch.empty(batch, seqlen, 4, dtype=dtype),
        torch.empty(4),
        None,
        torch.tensor([0, 5, 15]) if packed else None,
        0.5,
        True,
        False,
        True,
    )
    return inputs._replace(**changes)


def tensor(found: Any) -> tuple[int, ...]:
    return (found.data, found.batch_stride, found.seq_stride, found.head_stride)


def gate(found: Any) -> tuple[int | None, ...]:
    return (*tensor(found), found.dtype, found.reserved)


def state(found: Any) -> tuple[int | None, ...]:
    return (
        found.data,
        found.sequence_stride,
        found.head_stride,
        found.k_stride,
        found.v_stride,
    )


def test_batch(calls: list[Any]) -> None:
    inputs, out = made(), torch.empty(3, 5, 4, 40, dtype=torch.half)
    before = torch.empty(3, 4, 40, 24).transpose(-1, -2)
    after = torch.empty(3, 4, 24, 40)
    launch = cuda.prepare_forward(CHOSEN, inputs, before, out, after)
    launch((*inputs[:8], before, None), out, after)
    (params,) = calls
    assert (params.call.abi_version, params.call.device, params.call.stream) == (2, 3, 1003)
    assert params.call.workspace_size == 512
    assert tensor(params.out) == (out.data_ptr(), 800, 160, 40)
    assert state(params.final_state) == (after.data_ptr(), 3840, 960, 40, 1)
    problem = params.problem
    assert (problem.sequences, problem.seqlen) == (3, 5)
    sizes = (problem.heads_qk, problem.heads, problem.head_dim, problem.head_dim_v)
    assert sizes == (2, 4, 24, 40)
    assert (problem.dtype, problem.flags, problem.scale, problem.reserved) == (1, 5, 0.5, 0)
    assert not problem.cu_seqlens
    assert tensor(problem.q) == (inputs.q.data_ptr(), 240, 48, 24)
    assert tensor(problem.v) == (inputs.v.data_ptr(), 800, 160, 40)
    assert inputs.g is not None
    assert inputs.a_log is not None
    assert gate(problem.g) == (inputs.g.data_ptr(), 20, 4, 1, 2, 0)
    assert gate(problem.beta) == (inputs.beta.data_ptr(), 20, 4, 1, 1, 0)
    assert gate(problem.a_log) == (inputs.a_log.data_ptr(), 0, 0, 1, 2, 0)
    assert not problem.dt_bias.data
    assert state(problem.initial_state) == (before.data_ptr(), 3840, 960, 1, 24)


def test_packed(calls: list[Any]) -> None:
    inputs = made(packed=True, g=None, dtype=torch.bfloat16)
    out = torch.empty(1, 15, 4, 40, dtype=torch.bfloat16)
    cuda.prepare_forward(CHOSEN, inputs, None, out, None)((*inputs[:8], None, None), out, None)
    problem = calls[0].problem
    assert (problem.sequences, problem.seqlen, problem.dtype) == (2, 15, 0)
    assert problem.cu_seqlens
    assert not problem.g.data
    assert not problem.initial_state.data
    assert not calls[0].final_state.data
    assert tensor(problem.q)[1:] == (0, 48, 24)  # a batch of one


def test_other_tensors_of_a_kind(calls: list[Any]) -> None:
    """A launch takes the addresses of each call, and the rest from what it was prepared for."""
    inputs, out, after = made(), torch.empty(3, 5, 4, 40).half(), torch.empty(3, 4, 24, 40)
    launch = cuda.prepare_forward(CHOSEN, inputs, after, out, after)
    other = Inputs(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))
    found, final = torch.empty_like(out), torch.empty_like(after)
    launch((*other[:8], final, None), found, None)
    (params,) = calls
    assert not params.final_state.data
    problem = params.problem
    assert (params.out.data, problem.initial_state.data) == (found.data_ptr(), final.data_ptr())
    for name in ("q", "k", "v", "g", "beta", "a_log"):
        assert getattr(problem, name).data == getattr(other, name).data_ptr()
    assert gate(problem.beta)[1:] == (20, 4, 1, 1, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_pool(calls: list[Any], dtype: torch.dtype) -> None:
    inputs, out = made(), torch.empty(3, 5, 4, 40, dtype=torch.half)
    pool = torch.empty(7, 4, 40, 24, dtype=torch.half)
    states, indices = pool.transpose(-1, -2), torch.arange(6).to(dtype)[::2]
    launch = cuda.prepare_update(CHOSEN, inputs, states, indices, out, states)
    launch((*inputs[:8], pool, indices), out, pool)
    (params,) = calls
    assert params.call.workspace_size == 0
    assert tensor(params.out) == (out.data_ptr(), 800, 160, 40)
    for found in (params.final_state, params.problem.initial_state):
        assert state(found) == (pool.data_ptr(), 3840, 960, 1, 24)
    assert (params.state_indices, params.state_index_stride) == (indices.data_ptr(), 2)
    assert (params.states, params.state_dtype, params.index_bytes) == (7, 1, dtype.itemsize)


def test_few_tokens_without_a_pool(calls: list[Any]) -> None:
    inputs, out = made(), torch.empty(3, 5, 4, 40, dtype=torch.half)
    after = torch.empty(3, 4, 24, 40)
    launch = cuda.prepare_update(CHOSEN, inputs, None, None, out, after)
    launch((*inputs[:8], None, None), out, after)
    (params,) = calls
    assert not params.problem.initial_state.data
    assert state(params.final_state) == (after.data_ptr(), 3840, 960, 40, 1)
    assert not params.state_indices
    assert (params.states, params.state_dtype, params.index_bytes) == (0, 2, 0)


def backward(inputs: Inputs, before: Any, grad_out: Any, grad_after: Any) -> Gradients:
    """The gradients by a launch that was prepared for the call itself."""
    launch = cuda.prepare_backward(CHOSEN, inputs, before, grad_out, grad_after)
    return Gradients(*launch((grad_out, grad_after, before, *inputs[:8])))  # type: ignore[arg-type]


def test_gradients(calls: list[Any]) -> None:
    inputs, before = made(), torch.empty(3, 4, 40, 24).transpose(-1, -2)
    grad_out, after = torch.empty(3, 5, 4, 40).half(), torch.empty(3, 4, 24, 40)
    grads = backward(inputs, before, grad_out, after)
    (params,) = calls
    assert (params.call.abi_version, params.call.device, params.call.stream) == (2, 3, 1003)
    assert params.call.workspace_size == 512
    assert tensor(params.grad_out) == (grad_out.data_ptr(), 800, 160, 40)
    assert state(params.grad_final_state) == (after.data_ptr(), 3840, 960, 40, 1)
    for name, grad, given in zip("qkv", grads[:3], inputs[:3], strict=True):
        assert grad is not None
        assert grad.shape == given.shape
        assert tensor(getattr(params, f"grad_{name}"))[0] == grad.data_ptr()
        assert grad.is_contiguous()
    assert grads.g is not None
    assert gate(params.grad_g) == (grads.g.data_ptr(), 20, 4, 1, 2, 0)
    assert gate(params.grad_beta) == (grads.beta.data_ptr(), 20, 4, 1, 1, 0)
    assert grads.a_log is not None
    assert gate(params.grad_a_log) == (grads.a_log.data_ptr(), 0, 0, 1, 2, 0)
    assert grads.dt_bias is None
    assert not params.grad_dt_bias.data
    assert grads.initial_state is not None
    assert state(params.grad_initial_state)[0] == grads.initial_state.data_ptr()
    assert tensor(params.problem.q) == (inputs.q.data_ptr(), 240, 48, 24)
    assert state(params.problem.initial_state) == (before.data_ptr(), 3840, 960, 1, 24)


def test_gradients_of_other_tensors_of_a_kind(calls: list[Any]) -> None:
    """Each call has addresses of its own, and writes gradients of its own."""
    inputs, before = made(packed=True), torch.empty(2, 4, 24, 40)
    grad_out, after = torch.empty(1, 15, 4, 40).half(), torch.empty(2, 4, 24, 40)
    launch = cuda.prepare_backward(CHOSEN, inputs, before, grad_out, after)
    first = launch((grad_out, after, before, *inputs[:8]))
    other = Inputs(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))
    given = before.clone(), grad_out.clone(), after.clone()
    second = launch((*given[1:], given[0], *other[:8]))
    params = calls[1]
    assert params.grad_out.data == given[1].data_ptr()
    assert params.grad_final_state.data == given[2].data_ptr()
    assert params.problem.initial_state.data == given[0].data_ptr()
    for name in ("q", "k", "v", "g", "beta", "a_log"):
        assert getattr(params.problem, name).data == getattr(other, name).data_ptr()
    # Binaries read offsets of 32 bits.
    assert other.cu_seqlens is not None
    assert params.problem.cu_seqlens not in (None, other.cu_seqlens.data_ptr())
    names = ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "initial_state")
    for name, one, another in zip(names, first, second, strict=True):
        assert (one is None) is (another is None)
        if one is not None and another is not None:
            assert getattr(params, f"grad_{name}").data == another.data_ptr() != one.data_ptr()


def test_gradients_of_little(calls: list[Any]) -> None:
    """No gate, no states, packed rows, and no gradient of out but that of the final states."""
    inputs = made(packed=True, g=None, a_log=None, dtype=torch.bfloat16)
    grads = backward(inputs, None, None, torch.empty(2, 4, 24, 40))
    (params,) = calls
    assert grads.g is None
    assert grads.initial_state is None
    assert not params.grad_g.data
    assert not params.grad_initial_state.data
    assert params.grad_out.data
    # Rows of no sequence, which the kernels leave as they are.
    assert all(not x.any() for x in (grads.q, grads.k, grads.v, grads.beta))


@pytest.mark.parametrize("shifted", [False, True])
def test_a_gradient_whose_rows_start_anywhere_is_copied(calls: list[Any], shifted: bool) -> None:
    inputs, whole = made(), torch.zeros(3 * 5 * 4 * 40 + 1).half()
    grad_out = whole[1:].view(3, 5, 4, 40) if shifted else whole[:1].expand(3, 5, 4, 40)
    backward(inputs, None, grad_out, None)
    assert tensor(calls[0].grad_out)[0] != grad_out.data_ptr()
    assert tensor(calls[0].grad_out)[1:] == (800, 160, 40)


class OnDevice(torch.Tensor):
    """A tensor of which the rules believe that it is on a device."""

    is_cuda = True  # type: ignore[assignment]


def on_device(**changes: Any) -> Inputs:
    inputs = made(**changes)
    rows = inputs.q.new_empty(3, 64, 2, 24)
    values = inputs.v.new_empty(3, 64, 4, 40)
    q = changes.get("q", rows).as_subclass(OnDevice)
    return inputs._replace(q=q, k=changes.get("k", rows), v=changes.get("v", values))


@pytest.mark.parametrize(
    ("function", "changes", "chosen", "expected"),
    [
        (FORWARD, {}, "cuda", None),
        (FORWARD, {"q": torch.empty(3, 64, 2, 20).half()}, "cuda", "triton"),
        (FORWARD, {"v": torch.empty(3, 64, 4, 36).half()}, "cuda", "triton"),
        (FORWARD, {"k": torch.empty(3, 64, 2, 25).half()[..., 1:]}, "cuda", "triton"),
        (FORWARD, {"k": torch.empty(3, 64, 24, 2).half().transpose(2, 3)}, "cuda", "triton"),
        (FORWARD, {"q": torch.empty(3, 64, 2, 20).half()}, "triton", None),
        (UPDATE, {"q": torch.empty(3, 1, 2, 20).half()}, "cuda", None),
        (UPDATE, {"k": torch.empty(3, 1, 2, 25).half()[..., 1:]}, "cuda", None),
        (UPDATE, {"v": torch.empty(3, 1, 40, 4).half().transpose(2, 3)}, "cuda", "triton"),
        (BACKWARD, {}, "cuda", None),
        (BACKWARD, {"q": torch.empty(3, 64, 2, 8).half()}, "cuda", None),
        (BACKWARD, {"q": torch.empty(3, 64, 2, 20).half()}, "cuda", "triton"),
        (BACKWARD, {"v": torch.empty(3, 64, 4, 36).half()}, "cuda", "triton"),
        (BACKWARD, {"k": torch.empty(3, 64, 2, 25).half()[..., 1:]}, "cuda", "triton"),
        (BACKWARD, {"q": torch.empty(3, 64, 2, 264).half()}, "triton", "reference"),
        (BACKWARD, {"q": torch.empty(3, 64, 2, 264).half()}, "reference", None),
    ],
)
def test_calls_that_go_elsewhere(
    function: str, changes: dict[str, Any], chosen: str, expected: str | None
) -> None:
    found = run._fallback(function, on_device(**changes), chosen)
    assert (None if found is None else found.backend) == expected


@pytest.mark.parametrize(("tokens", "few"), [(15, True), (16, False)])
def test_few_tokens_go_one_by_one(tokens: int, few: bool) -> None:
    """On average, where they are packed."""
    inputs = made(packed=True)
    rows = inputs._replace(q=torch.empty(1, 2 * tokens, 2, 24))
    assert run._few_tokens(rows) is few
    assert run._few_tokens(on_device(q=torch.empty(3, tokens, 2, 24).half())) is few


@pytest.mark.parametrize("asked", [False, True], ids=["auto", "FLASHVAR_BACKEND=cuda"])
def test_a_fallback_is_refused_or_logged(
    asked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The environment is read by selection alone: a later value changes no choice."""
    monkeypatch.setenv("FLASHVAR_BACKEND", "reference")
    monkeypatch.setattr(resolve, "_logged", set())
    results = {
        "auto": CandidateResult("cuda sm_90", "cuda", True, "", explicit=asked),
        "triton": CandidateResult("triton", "triton", True, "", explicit=True),
    }
    monkeypatch.setattr(backend_choice, "choose", lambda request, backend: results[backend])
    odd = on_device(q=torch.empty(3, 64, 2, 20).half())
    assert run._choose(FORWARD, on_device(), "auto")[0].backend == "cuda"
    assert not caplog.records
    if asked:
        with pytest.raises(BackendUnavailableError, match=r"expected backend 'cuda'.*\"triton\""):
            run._choose(FORWARD, odd, "auto")
    else:
        for _ in range(2):
            assert run._choose(FORWARD, odd, "auto")[0].backend == "triton"
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().endswith(
            "runs on triton, not cuda sm_90 (binaries take head dims that are multiples of 8, not "
            "(20, 40)); to change that: pad q, k and v with zeros, and pass scale"
        )


@pytest.fixture
def served(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The library serves every call; no plans yet."""
    for name in ("_plans", "_backward_plans"):
        monkeypatch.setattr(run, name, Plans())
    monkeypatch.setattr(run, "_choose", lambda *call: (CHOSEN, cuda))
    return calls


def a_call(seqlen: int = 70, **changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.randn(2, seqlen, 2, 24).half(),
        "k": torch.randn(2, seqlen, 2, 24).half(),
        "v": torch.randn(2, seqlen, 4, 40).half(),
        "g": -torch.rand(2, seqlen, 4),
        "beta": torch.rand(2, seqlen, 4),
    }
    return {**given, **changes}


OPTIONAL: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "no gates": lambda: {"g": None},
    "raw gates": lambda: {"A_log": torch.rand(4), "dt_bias": torch.rand(4)},
    "raw gates without dt_bias": lambda: {"A_log": torch.rand(4)},
    "states": lambda: {"initial_state": torch.rand(2, 4, 24, 40)},
}
PLACES = {"A_log": "a_log"}


@pytest.mark.parametrize("seqlen", [70, 1], ids=["chunks", "tokens"])
def test_every_call_packs_the_addresses_of_its_own_tensors(served: list[Any], seqlen: int) -> None:
    for extra in [*OPTIONAL.values()] * 3:
        given = a_call(seqlen, **extra())
        for wanted in (True, False):
            out, final = gated_delta_rule(**given, return_final_state=wanted)
            params = served[-1]
            assert params.out.data == out.data_ptr()
            assert (params.final_state.data or 0) == (0 if final is None else final.data_ptr())
            for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
                x, field = given.get(name), getattr(params.problem, PLACES.get(name, name))
                assert (field.data or 0) == (0 if x is None else x.data_ptr()), name
    assert len(run._plans) == len(OPTIONAL)


def test_every_call_is_on_the_stream_that_is_current(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = {name: x.requires_grad_() for name, x in a_call().items()}
    pool = {"initial_state": torch.rand(2, 4, 24, 40), "state_indices": torch.tensor([1, 0])}
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[0], raising=False)
    for stream in (1, 1, 2, 3):
        current[0] = stream
        served.clear()
        out, _ = gated_delta_rule(**leaves)
        torch.autograd.grad(out.sum(), list(leaves.values()))
        with torch.no_grad():
            gated_delta_rule(**leaves)
            gated_delta_rule(**a_call(1), **pool)
        assert [params.call.stream for params in served] == [stream] * 4
    assert served[-1].state_indices == pool["state_indices"].data_ptr()


def test_gradients_are_those_of_the_call(served: list[Any]) -> None:
    """Of the tensors that want them alone, whatever the call before wanted."""
    for extra in [*OPTIONAL.values()] * 2:
        given = a_call(**extra())
        for wanting in (["v"], [*given], ["q", "beta"], [*given]):
            leaves = {
                name: None if x is None else x.detach().requires_grad_(name in wanting)
                for name, x in given.items()
            }
            out, final = gated_delta_rule(**leaves, return_final_state=True)
            assert final is not None
            grad_out, grad_final = torch.rand_like(out), torch.rand_like(final)
            torch.autograd.backward((out, final), (grad_out, grad_final))
            params = served[-1]
            assert params.grad_out.data == grad_out.data_ptr()
            assert params.grad_final_state.data == grad_final.data_ptr()
            for name, x in leaves.items():
                if x is None:
                    continue
                packed = getattr(params, f"grad_{PLACES.get(name, name)}")
                assert getattr(params.problem, PLACES.get(name, name)).data == x.data_ptr()
                assert (x.grad is not None) is (name in wanting), name
                assert x.grad is None or packed.data == x.grad.data_ptr()
            with torch.no_grad():
                assert not gated_delta_rule(**leaves)[0].requires_grad
            out, _ = gated_delta_rule(**leaves, return_final_state=True)
            torch.autograd.grad(out, leaves[wanting[0]], grad_out)
            assert not served[-1].grad_final_state.data  # instead of zeros
