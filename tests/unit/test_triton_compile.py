"""The Triton kernel compiles for every capability, and fits there; nothing is run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from flashvar.backends.triton import tiles
from flashvar.ops.attention_inputs import inspect

triton = pytest.importorskip("triton", reason="triton is not installed")

# Capability -> bytes of shared memory that a block may have there.
DEVICES = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (12, 0): 101376,
}
TENSOR_CORES = {8: "mma.sync", 9: "wgmma.mma_async", 10: "tcgen05.mma", 12: "mma.sync"}


def compiled(capability: tuple[int, int], head_dim: int, dtype: str, causal: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashvar.backends.triton.attention_fwd import attention_fwd_kernel
    from flashvar.backends.triton.launch import kernel_arguments

    q = torch.empty(2, 3, 2, head_dim + 8)[..., :head_dim]
    problem = inspect(q, q, q, causal=causal, scale=None, layout="bshd")
    tile = tiles.choose(capability, DEVICES[capability], head_dim)
    arguments = kernel_arguments(problem, tile)
    constants = {name: value for name, value in arguments.items() if name.isupper()}
    signature = {}
    for name in attention_fwd_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "p_lse":
            signature[name] = "*fp32"
        elif name.startswith("p_"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
    pointers = [name for name in signature if name.startswith("p_")]
    return triton.compile(
        ASTSource(
            fn=attention_fwd_kernel,
            signature=signature,
            constexprs=constants,
            attrs={(list(signature).index(name),): [["tt.divisibility", 16]] for name in pointers},
        ),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "causal"),
    [
        *((capability, 96, "bf16", True) for capability in DEVICES),
        *((capability, 64, "fp16", False) for capability in [(8, 0), (9, 0)]),
    ],
    ids=str,
)
def test_compiles_and_fits(
    capability: tuple[int, int], head_dim: int, dtype: str, causal: bool
) -> None:
    kernel = compiled(capability, head_dim, dtype, causal)
    tile = tiles.choose(capability, DEVICES[capability], head_dim)
    bound = tiles.shared_bytes(tile, sum(tiles.split(head_dim)), capability)
    assert kernel.metadata.shared <= bound <= DEVICES[capability]
    assert TENSOR_CORES[capability[0]] in kernel.asm["ptx"]
    # Keys and values arrive asynchronously, 16 bytes at a time.
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10, ", kernel.asm["ptx"])


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_split_covers_the_head_dim_with_little_padding(head_dim: int) -> None:
    head, tail = tiles.split(head_dim)
    assert head.bit_count() == 1
    assert tail.bit_count() <= 1
    assert tail == 0 or 16 <= tail < head
    assert head_dim <= head + tail
    assert head + tail < head_dim + max(16, head_dim / 3)


@pytest.mark.parametrize("head_dim", [8, 64, 96, 192, 256])
@pytest.mark.parametrize("capability", [*DEVICES, (7, 5), (11, 0), (13, 7)], ids=str)
@pytest.mark.parametrize("shared_memory", [48 * 1024, 101376])
def test_every_device_gets_a_tile_that_fits(
    shared_memory: int, capability: tuple[int, int], head_dim: int
) -> None:
    tile = tiles.choose(capability, shared_memory, head_dim)
    assert tiles.shared_bytes(tile, sum(tiles.split(head_dim)), capability) <= shared_memory


@pytest.mark.parametrize("capability", DEVICES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_tables_first_choice_fits_where_it_was_written_for(
    capability: tuple[int, int], head_dim: int
) -> None:
    table = tiles._TABLE[capability]
    assert tiles.choose(capability, DEVICES[capability], head_dim) == table[head_dim][0]
