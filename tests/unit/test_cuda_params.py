"""The struct that Python packs for a binary is the one that flashvar.h declares."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flashvar import loader
from flashvar.backends import cuda
from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention_inputs import inspect
from flashvar.registry import Binary
from flashvar.verdicts import Verdict

HEADER = (Path(__file__).parents[2] / "src/cuda/abi/flashvar.h").read_text(encoding="utf-8")
C_TYPES: dict[str, Any] = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "void*": ctypes.c_uint64,
    "float*": ctypes.c_uint64,
}


def declared(name: str) -> type[ctypes.Structure]:
    """The struct `name` of the header, as ctypes lays it out."""
    match = re.search(rf"typedef struct {name} {{(.*?)}} {name};", HEADER, re.DOTALL)
    assert match is not None
    body = re.sub(r"/\*.*?\*/", "", match[1], flags=re.DOTALL)
    fields = [(field, C_TYPES[kind]) for kind, field in re.findall(r"([\w]+\*?) (\w+);", body)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a launch with unequal sizes, strides and options hands to the library."""
    C_TYPES["flashvar_tensor"] = declared("flashvar_tensor")
    packed: list[bytes] = []
    monkeypatch.setattr(loader, "load", lambda binary: SimpleNamespace(attention_fwd=packed.append))
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False
    )
    q = torch.empty(2, 6, 3, 16, dtype=torch.half)  # heads first: 6 heads of 3 queries
    k = torch.empty(2, 2, 5, 24, dtype=torch.half)[..., :16]
    v = torch.empty(1, 2, 5, 16, dtype=torch.half).expand(2, -1, -1, -1)
    problem = inspect(q, k, v, causal=True, scale=-0.5, layout="bhsd")
    object.__setattr__(problem, "device", 3)
    verdict = Verdict("cuda", "cuda", True, "", binary=cast("Binary", object()))
    out, lse = torch.empty_like(q), torch.empty(2, 6, 3)
    cuda.prepare_attention_fwd(problem, verdict)(q, k, v, out, lse)
    cuda.prepare_attention_fwd(problem, verdict)(q, k, v, out, None)
    structure = declared("flashvar_attention_fwd_params")
    with_lse, without = (structure.from_buffer_copy(one) for one in packed)
    assert all(len(one) == ctypes.sizeof(structure) for one in packed)
    return SimpleNamespace(found=with_lse, without=without, q=q, k=k, v=v, out=out, lse=lse)


def test_scalars(params: Any) -> None:
    found = {
        name: getattr(params.found, name)
        for name, kind in params.found._fields_
        if kind is not C_TYPES["flashvar_tensor"]
    }
    assert found == {
        "struct_size": ctypes.sizeof(params.found),
        "abi_version": 1,
        "device": 3,
        "dtype": 1,
        "stream": 1003,
        "lse": params.lse.data_ptr(),
        "batch": 2,
        "seqlen_q": 3,
        "seqlen_k": 5,
        "heads_q": 6,
        "heads_kv": 2,
        "head_dim": 16,
        "flags": 1,
        "scale": -0.5,
        "reserved": 0,
    }
    assert params.without.lse == 0


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("q", (288, 16, 48)),
        ("k", (240, 24, 120)),
        ("v", (0, 16, 80)),
        ("out", (288, 16, 48)),
    ],
)
def test_tensors(params: Any, name: str, strides: tuple[int, int, int]) -> None:
    found = getattr(params.found, name)
    assert found.data == getattr(params, name).data_ptr()
    assert (found.batch_stride, found.seq_stride, found.head_stride) == strides


def test_constants_are_the_headers() -> None:
    constants = dict(re.findall(r"(FLASHVAR_\w+)(?: =)? (\d+)u?\b", HEADER))
    assert int(constants["FLASHVAR_ABI_VERSION"]) == cuda._ABI_VERSION
    assert int(constants["FLASHVAR_CAUSAL"]) == cuda._CAUSAL
    for name, value in cuda._DTYPES.items():
        assert int(constants[f"FLASHVAR_{name.upper()}"]) == value


def test_no_binary_no_launch() -> None:
    q = torch.empty(1, 1, 1, 8, dtype=torch.half)
    problem = inspect(q, q, q, causal=False, scale=None, layout="bshd")
    with pytest.raises(BackendUnavailableError, match="through an installed binary, got triton"):
        cuda.prepare_attention_fwd(problem, Verdict("triton", "triton", True, ""))
