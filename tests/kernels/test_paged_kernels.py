"""Attention on a cache that is read in place, without a GPU: interpreted, and compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_paged import CASES, Case
from interpreter import interpreted
from test_triton_compile import stack_bytes

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process."""
    script = str(Path(__file__).with_name("interpreted_paged.py"))
    answers: dict[str, str] = json.loads(interpreted(python, "-W", "ignore", script))
    return answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_for_what_is_missing(splits: int, found: dict[str, str]) -> None:
    assert found[f"missing {splits}"] == ""


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_for_keys_outside(splits: int, found: dict[str, str]) -> None:
    assert found[f"outside {splits}"] == ""


def test_nan_beyond_the_longest_sequence_of_queries(found: dict[str, str]) -> None:
    assert found["beyond the longest"] == ""


# Kibibytes of shared memory that a block may have, by capability.
_ROOM = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def launches(capability: int, rows: int, dims: tuple[int, int]) -> list[tuple[Any, list[str]]]:
    """The launches of both kernels on such a device, and the types of their tensors."""
    from flashvar.backends.triton.attention import paged, split_kv
    from flashvar.ops.attention.cache import Cache
    from flashvar.ops.attention.paged import Paged, with_any_keys
    from flashvar.ops.attention.problem import Options
    from flashvar.ops.attention.validate import inspect

    dtype, name = (torch.float16, "*fp16") if capability == 75 else (torch.bfloat16, "*bf16")
    k, v = (torch.empty(8, 16, 2, dim, dtype=dtype) for dim in dims)
    q = torch.empty(1, rows // 4, 8, dims[0], dtype=dtype)
    table, ends = torch.zeros(1, 64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    call = Paged(q, k, v, None, table, ends, None, None, None, 1)
    problem = inspect(with_any_keys(call), Options(causal=True, softcap=30.0))
    machine = split_kv.Machine(divmod(capability, 10), _ROOM[capability] * 1024, 132)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "machine_of", lambda _: machine)
        launch = paged.prepare(problem, q, Cache(k, v, None, table), 1, splits=4).run
    results = ["*fp32", "*fp32"]
    return [
        (launch.run, [*results, name, name, name, "", "*i32", "*i32", "", "*i32", "", "", "", ""]),
        (launch.merge, [name, "*fp32", *results, "", ""]),
    ]


@pytest.mark.parametrize(
    ("capability", "rows", "dims"),
    [
        (75, 512, (256, 256)),
        (80, 512, (128, 128)),
        (86, 4, (128, 128)),
        (86, 512, (256, 256)),
        (89, 512, (64, 64)),
        (90, 4, (128, 128)),
        (90, 512, (128, 128)),
        (90, 512, (256, 256)),
        (100, 512, (192, 128)),
        (120, 4, (256, 256)),
        (120, 512, (192, 128)),
        (80, 512, (512, 512)),
        (86, 4, (512, 512)),
        (90, 512, (512, 512)),
        (90, 4, (320, 512)),
    ],
)
def test_compiles_within_shared_memory_and_hardly_spills(
    capability: int, rows: int, dims: tuple[int, int], tmp_path: Path
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for launch, of_tensors in launches(capability, rows, dims):
        kernel, arguments = launch._kernel, launch._arguments
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: dict[Any, Any] = {}
        for index, name in enumerate(kernel.arg_names):
            value = arguments.get(name)
            if index < len(of_tensors) and of_tensors[index]:
                signature[name] = of_tensors[index]
                aligned[index,] = [["tt.divisibility", 16]]
            elif index < len(of_tensors) or name.isupper():
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if "_" in name and not isinstance(value, float) and value % 16 == 0:
                    aligned[index,] = [["tt.divisibility", 16]]
        names = {"num_warps", "num_stages", "enable_fp_fusion"} & arguments.keys()
        compiled = triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", capability, 32),
            options={name: arguments[name] for name in names},
        )
        assert compiled.metadata.shared <= _ROOM[capability] * 1024
        assert stack_bytes(compiled, tmp_path) <= 8  # bytes of a thread
