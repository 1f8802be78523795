"""The structs that Python packs for a binary are those that its headers declare."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from abi_structs import HEADER, declared

from flashvar.backends.cuda import attention as cuda
from flashvar.backends.cuda.call import DTYPES
from flashvar.binaries import loader, manifest
from flashvar.binaries.registry import Binary
from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention.problem import Gradients, Inputs, Options, Problem
from flashvar.ops.attention.validate import inspect, inspect_backward
from flashvar.selection.candidates import CandidateResult

STRUCTS = ("flashvar_call", "flashvar_tensor", "flashvar_attention_problem")
FWD, BWD = "flashvar_attention_fwd_params", "flashvar_attention_bwd_params"


def read(name: str, packed: bytes) -> Any:
    """What was packed, as the struct `name`."""
    structure = declared(name)
    assert len(packed) == ctypes.sizeof(structure)
    return structure.from_buffer_copy(packed)


STREAM = 1003
CALL = {"abi_version": 2, "device": 3, "reserved": 0, "stream": STREAM}
# fp16: 6 query heads of 3 queries on 2 heads of 5 keys, heads first.
SIZES = {
    **{"batch": 2, "seqlen_q": 3, "seqlen_k": 5, "heads_q": 6, "heads_kv": 2},
    **{"head_dim": 16, "head_dim_v": 8, "dtype": 1},
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CHOSEN = CandidateResult("cuda", "cuda", True, "", binary=cast("Binary", object()))


class Structs(SimpleNamespace):
    """What launches handed to the library, and the tensors that they were given."""


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Collects what is handed to a library that does nothing.

    Its forward wants 256 bytes of workspace for packed queries, its backward 512.
    """
    collected: list[bytes] = []
    functions = {
        "attention_fwd": SimpleNamespace(
            launch=collected.append,
            workspace=lambda packed: 256 * bool(read(FWD, packed).problem.cu_seqlens_q),
            explain=lambda packed: f"{len(packed)} bytes",
        ),
        "attention_bwd": SimpleNamespace(
            launch=collected.append,
            workspace=lambda packed: 512,
            explain=lambda packed: f"{read(BWD, packed).call.workspace_size} wanted",
        ),
    }
    library = SimpleNamespace(function=functions.__getitem__)
    monkeypatch.setattr(loader, "load", lambda binary: library)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False
    )
    workspace = partial(torch.empty, dtype=torch.uint8)
    monkeypatch.setattr(
        cuda, "_workspaces", lambda size, device: lambda: workspace(size) if size else None
    )
    return collected


def inputs(**extras: torch.Tensor) -> Inputs:
    q = torch.empty(2, 6, 3, 16, dtype=torch.half)
    k = torch.empty(2, 2, 5, 24, dtype=torch.half)[..., :16]
    v = torch.empty(1, 2, 5, 8, dtype=torch.half).expand(2, -1, -1, -1)
    return Inputs(q, k, v, **extras)


def packed_inputs() -> Inputs:
    q = torch.empty(7, 6, 16, dtype=torch.half)
    k, v = torch.empty(2, 9, 2, 16, dtype=torch.half)
    offsets, used = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return Inputs(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets.clone(), seqused_k=used)


def on_device_3(problem: Problem) -> Problem:
    return replace(problem, device=3)


def forward(
    given: Inputs,
    options: Options,
    packed: list[bytes],
    with_lse: bool = True,
    result: CandidateResult = CHOSEN,
) -> Structs:
    problem = on_device_3(inspect(given, options))
    out = torch.empty(problem.out_shape, dtype=torch.half)
    lse = torch.empty(problem.lse_shape) if with_lse else None
    cuda.prepare_forward(problem, result)(given, out, lse)
    return Structs(found=read(FWD, packed[-1]), out=out, lse=lse)


def scalars(structure: ctypes.Structure) -> dict[str, Any]:
    kinds = tuple(declared(name) for name in STRUCTS)
    return {
        name: getattr(structure, name)
        for name, kind in structure._fields_  # type: ignore[misc]
        if kind not in kinds
    }


def tensor(found: Any) -> tuple[int, ...]:
    return (found.data, found.batch_stride, found.seq_stride, found.head_stride)


def test_forward_scalars(packed: list[bytes]) -> None:
    options = Options(causal=True, scale=-0.5, layout="bhsd")
    structs = forward(inputs(), options, packed)
    assert scalars(structs.found) == {"lse": structs.lse.data_ptr()}
    call = {**CALL, "struct_size": 368, "workspace": 0, "workspace_size": 0}
    assert scalars(structs.found.call) == call
    problem = scalars(structs.found.problem)
    set_ones = {name: value for name, value in problem.items() if value}
    assert set_ones == {**SIZES, "flags": 1, "scale": -0.5}
    assert forward(inputs(), options, packed, with_lse=False).found.lse == 0


def test_forward_tensors(packed: list[bytes]) -> None:
    given = inputs()
    structs = forward(given, Options(layout="bhsd"), packed)
    assert tensor(structs.found.q) == (given.q.data_ptr(), 288, 16, 48)
    assert tensor(structs.found.k) == (given.k.data_ptr(), 240, 24, 120)
    assert tensor(structs.found.v) == (given.v.data_ptr(), 0, 8, 40)
    assert tensor(structs.found.out) == (structs.out.data_ptr(), 144, 8, 24)


def test_rows_of_the_output_may_come_first(packed: list[bytes]) -> None:
    structs = forward(inputs(), Options(layout="bhsd->bshd"), packed)
    assert tensor(structs.found.q)[1:] == (288, 16, 48)
    assert structs.out.shape == (2, 3, 6, 8)
    assert tensor(structs.found.out) == (structs.out.data_ptr(), 144, 48, 8)


def test_no_modifiers(packed: list[bytes]) -> None:
    problem = forward(inputs(), Options(layout="bhsd"), packed).found.problem
    assert tensor(problem.bias) == (0, 0, 0, 0)
    set_ones = {name: value for name, value in scalars(problem).items() if value}
    assert set_ones == {**SIZES, "scale": 0.25}


def test_modifiers(packed: list[bytes]) -> None:
    bias = torch.empty(1, 6, 3, 8)[..., :5]
    slopes = torch.empty(2, 8)[:, :6]
    given = inputs(bias=bias, alibi_slopes=slopes, rng_state=torch.tensor([1, 2]))
    options = Options(window_left=2, window_right=1, softcap=2.0, dropout_p=0.25, layout="bhsd")
    found = forward(given, options, packed).found
    assert given.rng_state is not None
    assert tensor(found.problem.bias) == (bias.data_ptr(), 0, 8, 24)
    assert scalars(found.problem) == {
        **SIZES,
        "scale": 0.25,
        "flags": 2 | 4,
        "cu_seqlens_q": 0,
        "cu_seqlens_k": 0,
        "seqused_k": 0,
        "total_q": 0,
        "total_k": 0,
        "alibi_slopes": slopes.data_ptr(),
        "alibi_batch_stride": 8,
        "rng": given.rng_state.data_ptr(),
        "dropout_p": 0.25,
        "softcap": 2.0,
        "window_left": 2,
        "window_right": 1,
        "bias_dtype": 1,
        "sinks": 0,
        "delta": 0,
        "sinks_dtype": 0,
        "reserved": 0,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sinks(dtype: torch.dtype, packed: list[bytes]) -> None:
    given = inputs(sinks=torch.zeros(6, dtype=dtype))
    found = forward(given, Options(layout="bhsd"), packed).found.problem
    assert given.sinks is not None
    assert found.sinks == given.sinks.data_ptr()
    assert found.sinks_dtype == DTYPES[NAMES[dtype]]
    assert found.delta == 0


def test_delta_is_written_where_it_is_wanted(packed: list[bytes]) -> None:
    given = inputs(sinks=torch.zeros(6))
    out, lse, delta = torch.empty(2, 6, 3, 8, dtype=torch.half), *torch.empty(2, 2, 6, 3)
    problem = inspect_backward(given, Options(layout="bhsd"), out, False)
    problem = replace(problem, forward=on_device_3(problem.forward))
    grads = Gradients(*(torch.empty_like(x) for x in given[:3] if x is not None))
    launch = cuda.prepare_backward(problem, CHOSEN)
    launch(given, out, lse, out, None, grads, delta)
    launch(given, out, lse, out, None, grads)
    found = [read(BWD, one).problem.delta for one in packed]
    assert found == [delta.data_ptr(), 0]


def test_packed_sequences(packed: list[bytes]) -> None:
    given = packed_inputs()
    found = forward(given, Options(max_seqlen_q=4), packed).found
    assert found.call.workspace != 0
    assert found.call.workspace_size == 256
    problem = found.problem
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 4, 9)
    assert (problem.total_q, problem.total_k) == (7, 9)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        assert getattr(problem, name) == getattr(given, name).data_ptr()
    assert tensor(found.q) == (given.q.data_ptr(), 0, 96, 16)


def test_state_of_no_dropout_is_not_passed(packed: list[bytes]) -> None:
    given = inputs(rng_state=torch.tensor([1, 2]))
    assert forward(given, Options(layout="bhsd"), packed).found.problem.rng == 0


def test_backward(packed: list[bytes]) -> None:
    given = inputs(bias=torch.empty(2, 6, 3, 5, dtype=torch.half))
    options = Options(causal=True, window_left=1, deterministic=True, layout="bhsd")
    out = torch.empty(2, 6, 3, 8, dtype=torch.half)
    grad_out = torch.empty(2, 3, 6, 8, dtype=torch.half).transpose(1, 2)
    problem = inspect_backward(given, options, grad_out, True)
    problem = replace(problem, forward=on_device_3(problem.forward))
    lse, grad_lse = torch.empty(2, 6, 3), torch.empty(2, 6, 3)
    grads = Gradients(
        *(torch.empty_like(x) for x in given[:3] if x is not None), torch.zeros(2, 6, 3, 5)
    )
    launch = cuda.prepare_backward(problem, CHOSEN)
    launch(given, out, lse, grad_out, grad_lse, grads)
    launch(given, out, lse, grad_out, None, grads)
    with_lse, without = (read(BWD, one) for one in packed)
    assert scalars(with_lse) == {"lse": lse.data_ptr(), "grad_lse": grad_lse.data_ptr()}
    call = {**CALL, "struct_size": 536, "workspace_size": 512}
    assert scalars(with_lse.call) == {**call, "workspace": with_lse.call.workspace}
    assert with_lse.call.workspace != 0
    set_ones = {name: value for name, value in scalars(with_lse.problem).items() if value}
    assert set_ones == {**SIZES, "flags": 1 | 2 | 8, "scale": 0.25, "window_left": 1}
    assert without.grad_lse == 0
    assert grads.bias is not None
    assert tensor(with_lse.grad_out) == (grad_out.data_ptr(), 144, 48, 8)
    assert tensor(with_lse.grad_q) == (grads.q.data_ptr(), 288, 16, 48)
    assert tensor(with_lse.grad_k) == (grads.k.data_ptr(), 160, 16, 80)
    assert tensor(with_lse.grad_v) == (grads.v.data_ptr(), 80, 8, 40)
    assert tensor(with_lse.grad_bias) == (grads.bias.data_ptr(), 90, 5, 15)
    bias = given.bias
    assert bias is not None
    assert tensor(with_lse.problem.bias) == (bias.data_ptr(), 90, 5, 15)
    explain = cuda.explain_backward(problem, CHOSEN)
    assert explain(given, out, lse, grad_out, None, grads) == "0 wanted"


def test_size_of_the_workspace_is_asked_for_as_of_a_call(packed: list[bytes]) -> None:
    """The struct before there are addresses is that of a call but for what addresses are."""
    given = packed_inputs()
    problem = on_device_3(inspect(given, Options(max_seqlen_q=4, softcap=2.0)))
    asked: list[bytes] = []
    function = SimpleNamespace(launch=packed.append, workspace=lambda one: asked.append(one) or 0)
    library = SimpleNamespace(function=lambda name: function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", lambda binary: library)
        launch = cuda.prepare_forward(problem, CHOSEN)
        launch(given, torch.empty(problem.out_shape, dtype=torch.half), None)
    before, after = read(FWD, asked[0]), read(FWD, packed[-1])
    pointers = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "rng", "sinks"}
    for name, value in scalars(after.problem).items():
        found = getattr(before.problem, name)
        assert bool(found) == bool(value) if name in pointers else found == value


@pytest.mark.parametrize("wants_bias", [True, False])
def test_size_of_the_workspace_of_a_backward(wants_bias: bool, packed: list[bytes]) -> None:
    """It is asked for once, before any call, with addresses where calls have some."""
    given = inputs(bias=torch.empty(2, 1, 3, 5, dtype=torch.half))
    out = torch.empty(2, 6, 3, 8, dtype=torch.half)
    problem = inspect_backward(given, Options(layout="bhsd"), out, wants_bias)
    problem = replace(problem, forward=on_device_3(problem.forward))
    asked: list[bytes] = []
    function = SimpleNamespace(launch=packed.append, workspace=lambda one: asked.append(one) or 0)
    library = SimpleNamespace(function=lambda name: function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", lambda binary: library)
        launch = cuda.prepare_backward(problem, CHOSEN)
    before = read(BWD, asked[0])
    of_bias = torch.zeros(2, 1, 3, 5) if wants_bias else None
    grads = Gradients(*(torch.empty_like(x) for x in given[:3] if x is not None), of_bias)
    for _ in range(2):
        launch(given, out, torch.empty(2, 6, 3), out, None, grads)
    assert len(asked) == 1
    after = read(BWD, packed[-1])
    assert scalars(before.problem) == scalars(after.problem)
    assert bool(before.problem.bias.data)
    assert bool(before.grad_bias.data) is wants_bias is bool(after.grad_bias.data)


def test_the_binary_explains_a_call(packed: list[bytes]) -> None:
    given = inputs()
    problem = on_device_3(inspect(given, Options(layout="bhsd")))
    explain = cuda.explain_forward(problem, CHOSEN)
    out = torch.empty(problem.out_shape, dtype=torch.half)
    assert explain(given, out, None) == "368 bytes"
    assert packed == []


def test_constants_are_the_headers() -> None:
    constants = dict(re.findall(r"(FLASHVAR_\w+)(?: =)? (\d+)u?\b", HEADER))
    assert int(constants["FLASHVAR_ABI_VERSION"]) == manifest.ABI
    for name in ("CAUSAL", "WINDOW_LEFT", "WINDOW_RIGHT", "DETERMINISTIC"):
        assert int(constants[f"FLASHVAR_{name}"]) == getattr(cuda, f"_{name}")
    for name, value in DTYPES.items():
        assert int(constants[f"FLASHVAR_{name.upper()}"]) == value


def test_no_binary_no_launch() -> None:
    q = torch.empty(1, 1, 1, 8, dtype=torch.half)
    problem = inspect(Inputs(q, q, q), Options())
    with pytest.raises(BackendUnavailableError, match="through an installed binary, found triton"):
        cuda.prepare_forward(problem, CandidateResult("triton", "triton", True, ""))
