"""The Triton kernels of gated_delta_rule without a GPU: interpreted, and compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_gated_delta_rule import CASES, Case
from interpreter import interpreted
from test_triton_compile import DEVICES, stack_bytes

from flashvar.ops.gated_delta_rule.problem import Inputs

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process, which takes a second to start."""
    script = Path(__file__).with_name("interpreted_gated_delta_rule.py")
    answers: dict[str, str] = json.loads(interpreted(python, "-W", "ignore", str(script)))
    return answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def inputs_of(
    seqlen: int, dims: tuple[int, int], dtype: torch.dtype, fused: bool, packed: bool = False
) -> Inputs:
    """Without memory: nothing is run."""
    k, v = dims

    def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, values, rows = made(1, seqlen, 2, k), made(1, seqlen, 4, v), made(1, seqlen, 4)
    head = made(4, dtype=torch.float32) if fused else None
    cu_seqlens = made(5, dtype=torch.int32) if packed else None
    return Inputs(q, q, values, rows, rows, head, head, cu_seqlens, 0.1, fused, fused, fused)


def compiled(
    capability: int, inputs: Inputs, direction: str = "forward", only: str | None = None
) -> dict[str, Any]:
    """Name -> kernel that a call on such a device would start; of `only` that one."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashvar.backends.triton import gated_delta_rule as launches
    from flashvar.backends.triton.gated_delta_rule.recurrent import RUNTIME

    kernels: dict[str, Any] = {}

    def begin(kernel: Any, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 1

        def launch(*given: Any, **others: Any) -> None:
            if only not in (None, kernel.__name__):
                return
            values = {**dict(zip(kernel.arg_names, given, strict=False)), **others}
            signature, constants, aligned = {}, {}, {}
            for index, name in enumerate(kernel.arg_names):
                value = values[name]
                if isinstance(value, torch.Tensor):
                    signature[name] = NAMES[value.dtype]
                    aligned[index,] = [["tt.divisibility", 16]]
                elif (
                    value is None or name.isupper() or (value == 1 and name.endswith(("dim", "_v")))
                ):
                    signature[name], constants[index,] = "constexpr", value
                else:
                    signature[name] = "fp32" if isinstance(value, float) else "i32"
                    if name not in RUNTIME and value % 16 == 0:
                        aligned[index,] = [["tt.divisibility", 16]]
            kernels[kernel.__name__] = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
                target=GPUTarget("cuda", capability, 32),
                options={n: others[n] for n in OPTIONS if n in others},
            )

        return launch

    k, v = inputs.q.shape[-1], inputs.v.shape[-1]
    states = torch.empty(inputs.sequences, 4, k, v, device="meta")
    out = torch.empty_like(inputs.v)
    if direction == "update":
        indices = torch.empty(inputs.sequences, dtype=torch.int32, device="meta")
        launches.update(inputs, states, indices, out, begin)
    elif direction == "backward":
        launches.backward(inputs, states, out, states, begin)
    else:
        launches.forward(inputs, states, out, states, begin)
    return kernels


@pytest.mark.parametrize(
    ("dims", "capability"),
    [((128, 128), (8, 0)), ((128, 128), (9, 0)), ((256, 64), (9, 0)), ((40, 7), (8, 0))],
    ids=str,
)
def test_the_recurrence_compiles(
    dims: tuple[int, int], capability: tuple[int, int], tmp_path: Path
) -> None:
    inputs = inputs_of(1, dims, torch.bfloat16, fused=True)
    kernels = compiled(10 * capability[0] + capability[1], inputs, "update")
    assert list(kernels) == ["recurrent_kernel"]
    assert stack_bytes(kernels["recurrent_kernel"], tmp_path) == 0


FORWARD = ["chunk_kernel", "chain_kernel"]
KERNELS = {
    "forward": FORWARD,
    "backward": [*FORWARD, "reverse_kernel", "squares_kernel", "rows_kernel"],
}


@pytest.mark.parametrize(
    ("direction", "capability", "dims", "dtype", "packed"),
    [
        ("backward", (8, 6), (128, 128), torch.bfloat16, True),
        ("forward", (8, 6), (128, 64), torch.float32, False),
        ("backward", (9, 0), (32, 32), torch.bfloat16, False),
    ],
    ids=str,
)
def test_the_chunks_compile(
    direction: str,
    capability: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    packed: bool,
) -> None:
    inputs = inputs_of(512, dims, dtype, fused=True, packed=packed)
    kernels = compiled(10 * capability[0] + capability[1], inputs, direction)
    assert list(kernels) == KERNELS[direction]
    for kernel in kernels.values():
        assert kernel.metadata.shared <= DEVICES[capability]


@pytest.mark.parametrize("dims", [(128, 64), (256, 32)], ids=str)
def test_rows_of_few_columns_fit_shared_memory(dims: tuple[int, int]) -> None:
    """All columns of v in one iteration took more than blocks have: 117 KiB for K 128, V 64."""
    inputs = inputs_of(512, dims, torch.bfloat16, fused=True, packed=True)
    kernels = compiled(86, inputs, "backward", only="rows_kernel")
    assert kernels["rows_kernel"].metadata.shared <= DEVICES[8, 6]
