"""The Triton kernels compile for every capability, and fit there; nothing is run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from flashvar.backends.triton.attention import tiles
from flashvar.ops.attention.problem import Inputs, Options
from flashvar.ops.attention.validate import inspect, inspect_backward

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
WITHOUT_TENSOR_CORES = {(7, 5): 65536}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TENSOR_CORES = {8: "mma.sync", 9: "wgmma.mma_async", 10: "tcgen05.mma", 12: "mma.sync"}
FLOATS = ("p_lse", "p_lse_log2", "p_delta", "p_sinks", "p_slopes", "p_grad_bias")
ABSENT = ("p_grad_lse", "p_slopes", "p_offsets_q", "p_offsets_k", "p_used_k")


@pytest.fixture(scope="module", autouse=True)
def _not_fused_by_default() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
        yield


@cache
def compiled(
    direction: str,
    capability: tuple[int, int],
    head_dim: int,
    dtype: str = "bf16",
    causal: bool = True,
    *,
    features: str = "",
) -> Any:
    """A kernel with the table's tile; `features` may be "bias", or "dropout" with float32 bias.

    Both have sinks.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashvar.backends.triton.attention import launch
    from flashvar.backends.triton.attention.arguments import backward_arguments, forward_arguments

    kernel = getattr(launch, f"attention_{direction.replace('forward', 'fwd')}_kernel".replace(
        "backward", "bwd"
    ))  # fmt: skip
    q = torch.empty(2, 64, 2, head_dim + 8)[..., :head_dim].half()
    drops = features == "dropout"
    bias = torch.empty(1, 2, 64, 64, dtype=torch.float32 if drops else q.dtype)
    rng = torch.zeros(2, dtype=torch.int64) if drops else None
    inputs = Inputs(q, q, q, *((bias, torch.empty(2), None, rng) if features else ()))
    options = Options(causal=causal, dropout_p=0.1 if drops else 0.0)
    problem = inspect(inputs, options)
    tile = chosen(direction, capability, head_dim, bias.element_size() if features else 0)
    if direction == "forward":
        arguments = forward_arguments(problem, tile, kernel)
    else:
        backward = inspect_backward(inputs, options, q, bool(features))
        arguments = backward_arguments(backward, tile, kernel)
    constants = {name: value for name, value in arguments.items() if name.isupper()}
    absent = (*ABSENT, *(() if features else ("p_bias", "p_sinks")), *(() if drops else ("p_rng",)))
    constants.update((name, None) for name in kernel.arg_names if name in absent)
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("p_"):
            wide = {"p_rng": "i64", **dict.fromkeys(FLOATS, "fp32")}
            wide["p_bias"] = "fp32" if drops else dtype
            signature[name] = f"*{wide.get(name, dtype)}"
        else:
            signature[name] = "fp32" if isinstance(arguments[name], float) else "i32"
    pointers = [name for name in signature if signature[name].startswith("*")]
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs=constants,
            attrs={(list(signature).index(name),): [["tt.divisibility", 16]] for name in pointers},
        ),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options={name: arguments[name] for name in OPTIONS},
    )


def alike(
    direction: str, capability: tuple[int, int], head_dim: int, bias_bytes: int = 0
) -> tuple[int, int]:
    """The first device of the same major with the same tile: Triton's PTX for both is the same."""
    own = chosen(direction, capability, head_dim, bias_bytes)
    return next(
        other
        for other in DEVICES
        if other[0] == capability[0] and chosen(direction, other, head_dim, bias_bytes) == own
    )


def chosen(
    direction: str, capability: tuple[int, int], head_dim: int, bias_bytes: int = 0
) -> tiles.Tile:
    shared_memory = (DEVICES | WITHOUT_TENSOR_CORES)[capability]
    return tiles.choose(direction, capability, shared_memory, head_dim, head_dim, bias_bytes)


def bound(direction: str, capability: tuple[int, int], head_dim: int, bias_bytes: int = 0) -> int:
    tile = chosen(direction, capability, head_dim, bias_bytes)
    padded = sum(tiles.split(head_dim))
    return tiles.shared_bytes(direction, tile, padded, padded, capability, bias_bytes)


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Local memory per thread, which is where registers are spilled to."""
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [reader, "-res-usage", cubin]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"STACK:(\d+)", done.stdout)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("direction", "capability", "head_dim", "dtype", "causal"),
    [
        *(("forward", capability, 64, "bf16", True) for capability in DEVICES),
        *(
            (direction, capability, 32, "bf16", True)
            for direction in ("backward_q", "backward_kv")
            for capability in DEVICES
        ),
        ("forward", (9, 0), 96, "fp16", False),
        ("backward_kv", (8, 6), 96, "fp16", False),
    ],
    ids=str,
)
def test_compiles_and_fits(
    direction: str, capability: tuple[int, int], head_dim: int, dtype: str, causal: bool
) -> None:
    kernel = compiled(direction, alike(direction, capability, head_dim), head_dim, dtype, causal)
    assert kernel.metadata.shared <= bound(direction, capability, head_dim) <= DEVICES[capability]
    assert TENSOR_CORES[capability[0]] in kernel.asm["ptx"]
    # What passes through the loop arrives asynchronously, 16 bytes at a time.
    assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10, ", kernel.asm["ptx"])


@pytest.mark.parametrize("direction", ["forward", "backward_q", "backward_kv"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
def test_the_largest_head_dim_fits(
    capability: tuple[int, int], direction: str, tmp_path: Path
) -> None:
    kernel = compiled(direction, alike(direction, capability, 512), 512)
    assert kernel.metadata.shared <= bound(direction, capability, 512) <= DEVICES[capability]
    assert "mma" in kernel.asm["ptx"]  # of any kind: tiles of 16 and 32 rows have an older one
    assert stack_bytes(kernel, tmp_path) <= 256  # bytes of a thread, of Triton 3.9


@pytest.mark.parametrize("capability", WITHOUT_TENSOR_CORES, ids=str)
@pytest.mark.parametrize(
    ("direction", "features"),
    [("forward", ""), ("backward_q", ""), ("backward_kv", ""), ("backward_bias", "bias")],
)
def test_fits_without_tensor_cores(
    direction: str, features: str, capability: tuple[int, int]
) -> None:
    kernel = compiled(direction, capability, 128, "fp16", features=features)
    at_most = bound(direction, capability, 128, 2 if features else 0)
    assert kernel.metadata.shared <= at_most <= WITHOUT_TENSOR_CORES[capability]


@pytest.mark.parametrize("direction", tiles.DIRECTIONS)
def test_products_are_fused_whatever_the_default_is(direction: str) -> None:
    features = "bias" if direction == "backward_bias" else ""
    head_dim = 64 if direction == "forward" else 32  # of a kernel that is compiled anyway
    kernel = compiled(direction, (8, 0), head_dim, "bf16", True, features=features)
    assert kernel.metadata.enable_fp_fusion
    assert "fma.rn.f32" in kernel.asm["ptx"]


@pytest.mark.parametrize("direction", tiles.DIRECTIONS)
def test_features_fit_too(direction: str) -> None:
    capability = (9, 0)
    kernel = compiled(direction, capability, 32, features="dropout")
    assert kernel.metadata.shared <= bound(direction, capability, 32, 4) <= DEVICES[capability]


@pytest.mark.parametrize("capability", DEVICES, ids=str)
@pytest.mark.parametrize(
    ("direction", "head_dim"), [("forward", 64), ("backward_q", 32), ("backward_kv", 32)]
)
def test_no_registers_are_spilled(
    direction: str, head_dim: int, capability: tuple[int, int], tmp_path: Path
) -> None:
    kernel = compiled(direction, alike(direction, capability, head_dim), head_dim, "bf16", True)
    assert stack_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nor_are_they_with_a_bias(
    head_dim: int, capability: tuple[int, int], tmp_path: Path
) -> None:
    device = alike("forward", capability, head_dim, 2)
    kernel = compiled("forward", device, head_dim, "fp16", features="bias")
    assert stack_bytes(kernel, tmp_path) == 0


def test_split_covers_the_head_dim_with_little_padding() -> None:
    for head_dim in range(8, 513, 8):
        head, tail = tiles.split(head_dim)
        assert head.bit_count() == 1, head_dim
        assert tail.bit_count() <= 1, head_dim
        assert tail == 0 or 16 <= tail < head, head_dim
        assert head_dim <= head + tail, head_dim
        assert head + tail < head_dim + max(16, head_dim / 3), head_dim


@pytest.mark.parametrize(
    ("capability", "shared_memory"),
    [
        *((capability, 99 * 1024) for capability in DEVICES),
        *(((8, 0), 48 * 1024), ((7, 5), 64 * 1024), ((13, 7), 48 * 1024)),
    ],
    ids=str,
)
def test_every_device_gets_a_tile_that_fits(
    shared_memory: int, capability: tuple[int, int]
) -> None:
    for direction, head_dim, bias_bytes in product(tiles.DIRECTIONS, (8, 64, 96, 256), (0, 4)):
        tile = tiles.choose(direction, capability, shared_memory, head_dim, head_dim, bias_bytes)
        padded = sum(tiles.split(head_dim))
        needed = tiles.shared_bytes(direction, tile, padded, padded, capability, bias_bytes)
        assert needed <= shared_memory, (direction, head_dim, bias_bytes)


@pytest.mark.parametrize("capability", {**DEVICES, **WITHOUT_TENSOR_CORES}, ids=str)
def test_the_tables_first_choice_fits_where_it_was_written_for(
    capability: tuple[int, int],
) -> None:
    head_dims = (64, 128, 192, 256, *([512] if capability in DEVICES else []))
    for direction, head_dim in product(tiles.DIRECTIONS, head_dims):
        by_head_dim = tiles._TABLE[capability][direction]
        first = next(found[0] for limit, found in by_head_dim.items() if head_dim <= limit)
        assert chosen(direction, capability, head_dim) == first, (direction, head_dim)


def test_a_measured_tile_wins_where_it_fits() -> None:
    small, large = tiles.Tile(64, 32, 4, 2), tiles.Tile(128, 128, 8, 4)
    arguments = ("forward", (9, 0), DEVICES[9, 0], 256, 256, 0)
    assert tiles.choose(*arguments, small) == small
    assert tiles.choose(*arguments, large) == tiles.choose(*arguments)
