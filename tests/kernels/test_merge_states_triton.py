"""The Triton kernels of merge_states without a GPU: interpreted, and compiled."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_merge_states import CASES, Case
from interpreter import interpreted
from test_triton_compile import stack_bytes

from flashvar.ops.merge_states.problem import Parts

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process, which takes a second to start."""
    answers: dict[str, str] = json.loads(
        interpreted(
            python, "-W", "ignore", str(Path(__file__).with_name("interpreted_merge_states.py"))
        )
    )
    return answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compiled(capability: int, direction: str, parts: Parts, grad_lse: bool = True) -> Any:
    """The kernel that a launch on such a device would start."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashvar.backends.triton import merge_states
    from flashvar.backends.triton.merge_states import kernels

    asked: dict[str, Any] = {}

    class Recorded:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *given, **others: asked.update(given=given, others=others)

    one_out = parts.outs[0][0] if parts.stacked else parts.outs[0]
    one_lse = parts.lses[0][0] if parts.stacked else parts.lses[0]
    out, lse = torch.empty(one_out.shape, dtype=one_out.dtype), torch.empty(one_lse.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_states, f"{direction}_kernel", Recorded())
        if direction == "fwd":
            forward = parts, out, lse
            merge_states.prepare_forward(None, *forward)(*forward)
        else:
            grads = torch.empty(parts.count, *out.shape, dtype=out.dtype)
            of_lses = torch.empty(parts.count, *lse.shape)
            backward = parts, out, lse if grad_lse else None, grads, of_lses
            merge_states.prepare_backward(None, *backward, 0)(*backward)
    kernel = getattr(kernels, f"{direction}_kernel")
    values = {**dict(zip(kernel.arg_names, asked["given"], strict=False)), **asked["others"]}
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    aligned: dict[Any, Any] = {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, tuple):
            signature[name] = tuple(NAMES[x.dtype] for x in value)
            aligned.update({(index, i): [["tt.divisibility", 16]] for i in range(len(value))})
        elif isinstance(value, torch.Tensor):
            signature[name] = NAMES[value.dtype]
            aligned[index,] = [["tt.divisibility", 16]]
        elif value is None or name.isupper():
            signature[name], constants[index,] = "constexpr", value
        else:
            signature[name] = "i32"
            if name not in kernels.RUNTIME and value % 16 == 0:
                aligned[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={name: asked["others"][name] for name in ("num_warps", "enable_fp_fusion")},
    )


def parts_of(count: int, head_dim: int, dtype: torch.dtype, stacked: bool = False) -> Parts:
    outs = [torch.empty(2, 64, 8, head_dim, dtype=dtype) for _ in range(count)]
    parts = Parts(tuple(outs), tuple(torch.empty(2, 8, 64) for _ in range(count)), False)
    return parts.as_stacked() if stacked else parts


# Nothing in the kernels depends on the capability; ptxas does.
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("count", "head_dim", "dtype", "stacked", "capability"),
    [
        (2, 128, torch.bfloat16, False, 90),
        (8, 64, torch.float16, False, 80),
        (5, 128, torch.bfloat16, True, 90),
        (2, 256, torch.float32, False, 80),
    ],
    ids=str,
)
def test_compiles_to_wide_moves(
    count: int,
    head_dim: int,
    dtype: torch.dtype,
    stacked: bool,
    capability: int,
    direction: str,
    tmp_path: Path,
) -> None:
    kernel = compiled(capability, direction, parts_of(count, head_dim, dtype, stacked))
    # Four registers at most: ptxas spills so little for one more warp.
    assert stack_bytes(kernel, tmp_path) <= 16
    moves = Counter(re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"]))
    # Rows are moved 16 bytes at a time; log-sum-exps are single.
    assert moves["ld.global.v4.b32"] >= (1 if stacked else count)
    assert moves["st.global.v4.b32"] >= 1
    assert {name for name in moves if name.endswith("b16")} == set()


def test_denormal_weights_are_not_flushed() -> None:
    """exp2 flushes, so its argument is halved and its result squared; nothing else flushes."""
    code = compiled(90, "bwd", parts_of(2, 128, torch.bfloat16)).asm["ptx"]
    assert set(re.findall(r"\w[\w.]*\.ftz\S*", code)) == {"ex2.approx.ftz.f32"}
    halved = struct.pack(">f", math.log2(math.e) / 2).hex().upper()
    factors = re.findall(r"mul\.f32\s+(%\w+), %\w+, 0f(\w+);", code)
    scaled = {name for name, factor in factors if factor == halved}
    assert set(re.findall(r"ex2\.approx\.ftz\.f32 %\w+, (%\w+);", code)) <= scaled


def test_a_head_dim_of_any_size_compiles() -> None:
    assert compiled(90, "bwd", parts_of(2, 7, torch.bfloat16), grad_lse=False) is not None
