"""The Triton kernel of rotary embeddings without a GPU: interpreted, and compiled."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_rotary import CASES, Case
from interpreter import interpreted
from test_triton_compile import stack_bytes

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found(python: str) -> dict[str, str]:
    """Case -> what was wrong; all of them in one process."""
    answers: dict[str, str] = json.loads(
        interpreted(python, "-W", "ignore", str(Path(__file__).with_name("interpreted_rotary.py")))
    )
    return answers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, found: dict[str, str]) -> None:
    assert found[str(case)] == ""


def compiled(capability: int, x: torch.Tensor, pairs: int, **options: Any) -> Any:
    """The kernel that a launch on such a device would start."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashvar.backends.triton.rotary import kernel as rotary
    from flashvar.backends.triton.rotary import launch as rotary_launch
    from flashvar.ops.rotary.rotation import checked

    asked: dict[str, Any] = {}

    def start(kernel: Any, grid: tuple[int]) -> Any:
        return lambda *given, **others: asked.update(given=given, others=others)

    table = options.pop("table", x.dtype)
    cos = torch.empty(4096, pairs, dtype=table)
    rotation = checked(x, cos, cos, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary_launch, "start", start)
        rotary_launch.launch(torch.empty_like(x), x, rotation, x.shape[-2])
    kernel = rotary.rotary_kernel
    values = {**dict(zip(kernel.arg_names, asked["given"], strict=False)), **asked["others"]}
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    signature, constants, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{names.get(value.dtype, 'i32')}"
            aligned[index,] = [["tt.divisibility", 16]]
        elif value is None or name.isupper() or (value == 1 and name.endswith("_dim")):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32"
            if name.endswith(("_batch", "_row", "_head")) and value % 16 == 0:
                aligned[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={name: asked["others"][name] for name in ("num_warps", "enable_fp_fusion")},
    )


def moves(kernel: Any) -> Counter[str]:
    """How often a thread reads and writes global memory, by width."""
    return Counter(re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"]))


# Nothing in the kernel depends on the capability; ptxas does.
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "pairs", "dtype", "packed", "capability"),
    [
        (128, 64, torch.bfloat16, False, 80),
        (128, 64, torch.bfloat16, True, 90),
        (128, 32, torch.float16, False, 90),
        (80, 40, torch.float16, False, 80),
        (256, 16, torch.bfloat16, False, 90),
        (64, 32, torch.float32, False, 80),
    ],
    ids=str,
)
def test_compiles_to_wide_moves_and_spills_nothing(
    head_dim: int,
    pairs: int,
    dtype: torch.dtype,
    packed: bool,
    capability: int,
    interleaved: bool,
    tmp_path: Path,
) -> None:
    x = torch.empty(2, 64, 8, head_dim, dtype=dtype)
    options: dict[str, Any] = {"interleaved": interleaved}
    if packed:
        cu = torch.tensor([0, 50, 128], dtype=torch.int32)
        x, options = x.flatten(0, 1), {**options, "cu_seqlens": cu, "seqlen_offsets": cu[:2]}
    kernel = compiled(capability, x, pairs, **options)
    assert stack_bytes(kernel, tmp_path) == 0
    found = moves(kernel)
    assert {name for name in found if name.startswith("st")} == {"st.global.v4.b32"}
    # x is read as it is written. Tables may be read narrowly, once for all heads.
    assert found["ld.global.v4.b32"] >= found["st.global.v4.b32"]
    if not interleaved:
        assert kernel.metadata.shared <= 16


def test_rows_that_are_not_aligned_compile_too() -> None:
    x = torch.empty(2, 64, 8, 131, dtype=torch.bfloat16)[..., :128]
    found = moves(compiled(90, x, 64))
    assert found["ld.global.b16"] >= 16
    assert set(found) <= {"ld.global.b16", "ld.global.v4.b32", "st.global.v4.b32"}
