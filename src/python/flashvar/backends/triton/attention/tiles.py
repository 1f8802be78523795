"""The tiles of the Triton kernels: a table, filtered by the shared memory of the device.

The module computes only with its arguments, so it works without a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple


class Tile(NamedTuple):
    """The rows of q and of k and v in a tile, and Triton's compile options."""

    block_q: int
    block_kv: int
    warps: int
    stages: int


class Split(NamedTuple):
    """A padded head dim as one or two powers of two, at least 16; `tail` is the smaller or 0."""

    head: int
    tail: int


_Table = dict[int, tuple[Tile, ...]]  # largest padded head dim -> candidates, the fastest first
_Tables = dict[str, _Table]  # by kernel; "<kernel>_with_bias" where a bias needs other tiles

DIRECTIONS: Final = ("forward", "backward_q", "backward_kv", "backward_bias")
# Of an element of a bias, by its dtype; None: no bias.
BIAS_BYTES: Final = {None: 0, "bf16": 2, "fp16": 2, "fp32": 4}

# Tiles of the gradient of a bias, which are not worth tuning.
_BIAS: Final[_Table] = {
    64: (Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
    128: (Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
    192: (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: (Tile(32, 32, 4, 1),),
    512: (Tile(16, 16, 8, 1),),
}
# Every element of a bias is loaded through its own address: larger tiles spill registers.
_FORWARD_WITH_BIAS: Final[_Table] = {
    64: (Tile(64, 64, 4, 2),),
    128: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2),),
    512: (Tile(32, 16, 8, 2),),
}
# Without tensor cores for Triton, 64 KiB of shared memory per block, and nothing asynchronous.
_TURING: Final[_Tables] = {
    "forward": {
        64: (Tile(32, 32, 4, 1),),
        128: (Tile(16, 32, 4, 1),),
        256: (Tile(16, 16, 4, 1),),
    },
    "forward_with_bias": {256: (Tile(16, 16, 4, 1),)},
    "backward_q": {
        64: (Tile(16, 32, 4, 1),),
        256: (Tile(16, 16, 8, 1),),
    },
    "backward_kv": {
        64: (Tile(16, 32, 4, 1),),
        256: (Tile(16, 16, 8, 1),),
    },
    "backward_bias": {256: (Tile(16, 16, 8, 1),)},
}
# The first choices spill few registers or none (ptxas of Triton 3.7 and 3.9).
_AMPERE: Final[_Tables] = {
    "forward": {
        64: (Tile(128, 64, 4, 3),),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
        192: (Tile(128, 32, 8, 3), Tile(64, 32, 4, 3)),
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        512: (Tile(64, 16, 8, 2),),
    },
    "forward_with_bias": _FORWARD_WITH_BIAS,
    "backward_q": {
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
        128: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        192: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
        512: (Tile(32, 32, 8, 2),),
    },
    "backward_kv": {
        64: (Tile(32, 64, 4, 3), Tile(32, 64, 4, 2)),
        128: (Tile(32, 64, 8, 2), Tile(32, 64, 8, 1)),
        192: (Tile(32, 32, 4, 2),),
        256: (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2)),
        512: (Tile(32, 16, 8, 1),),
    },
    "backward_bias": _BIAS,
}
_SMALL: Final[_Tables] = {  # 99 KiB of shared memory per block
    "forward": {
        64: (Tile(128, 64, 4, 3),),
        128: (Tile(128, 64, 8, 2),),
        192: (Tile(64, 32, 8, 3),),
        256: (Tile(64, 32, 8, 2),),
        512: (Tile(32, 16, 8, 2),),
    },
    "forward_with_bias": _FORWARD_WITH_BIAS,
    "backward_q": {
        64: (Tile(64, 64, 4, 2),),
        128: (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
        192: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
        512: (Tile(16, 16, 8, 1),),
    },
    "backward_kv": {
        64: (Tile(32, 64, 4, 2),),
        128: (Tile(32, 64, 8, 2), Tile(32, 64, 8, 1)),
        192: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
        256: (Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
        512: (Tile(16, 16, 8, 1),),
    },
    "backward_bias": _BIAS,
}
_HOPPER: Final[_Tables] = {
    "forward": {
        64: (Tile(64, 64, 4, 3),),
        128: (Tile(64, 64, 4, 3),),
        192: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
        256: (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        512: (Tile(64, 32, 8, 2),),
    },
    "forward_with_bias": {
        **_FORWARD_WITH_BIAS,
        128: (Tile(128, 32, 8, 2),),
        256: (Tile(128, 16, 8, 3), Tile(64, 32, 8, 2)),
        512: _FORWARD_WITH_BIAS[512],
    },
    "backward_q": {
        64: (Tile(64, 64, 4, 3),),
        128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
        192: (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
        256: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
        512: (Tile(32, 64, 8, 1),),
    },
    "backward_kv": {
        64: (Tile(64, 64, 4, 3),),
        128: (Tile(32, 64, 4, 4), Tile(32, 64, 4, 3)),
        192: (Tile(32, 64, 8, 3), Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(32, 64, 8, 3), Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
        512: (Tile(32, 32, 8, 1),),
    },
    "backward_bias": _BIAS,
}
_BLACKWELL: Final[_Tables] = {
    "forward": {
        64: (Tile(128, 128, 8, 3),),
        128: (Tile(128, 64, 8, 3),),
        192: (Tile(128, 64, 8, 2),),
        256: (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
        512: (Tile(64, 16, 8, 2),),
    },
    "forward_with_bias": _FORWARD_WITH_BIAS,
    "backward_q": {
        **_HOPPER["backward_q"],
        256: (Tile(64, 32, 4, 2),),
        512: (Tile(32, 16, 8, 2),),
    },
    "backward_kv": {
        64: (Tile(64, 64, 8, 3),),
        128: (Tile(32, 64, 8, 3), Tile(32, 64, 8, 2)),
        192: (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
        512: (Tile(32, 16, 8, 1),),
    },
    "backward_bias": _BIAS,
}
_TABLE: Final[dict[tuple[int, int], _Tables]] = {
    (7, 5): _TURING,
    (8, 0): _AMPERE,
    (8, 6): _SMALL,
    (8, 7): _AMPERE,
    (8, 9): _SMALL,
    (9, 0): _HOPPER,
    (10, 0): _BLACKWELL,
    (10, 3): _BLACKWELL,
    (12, 0): _SMALL,
    (12, 1): _SMALL,
}

# For unknown devices: these fit on every device that Triton compiles for.
_LAST_RESORT: Final = (Tile(32, 32, 4, 1), Tile(16, 16, 1, 1))

# The tensor cores of these capabilities read operands from shared memory, others from registers.
_SHARED_OPERANDS_SINCE: Final = (9, 0)
_SHARED_OPERANDS_BEFORE: Final = (12, 0)
_TENSOR_MEMORY_SINCE: Final = (10, 0)
# Before that, products are computed in float32 of operands that are all in shared memory.
TENSOR_CORES_SINCE: Final = (8, 0)
# Upper bound of the bytes of barriers and row sums of a program.
_BARRIERS: Final = 4096


@cache
def split(head_dim: int) -> Split:
    """Pad a head dim as little as two powers of two allow, e.g. 96 = 64 + 32, 72 = 64 + 16."""
    head = max(16, 1 << (head_dim.bit_length() - 1))
    if head_dim <= head:
        return Split(head, 0)
    tail = max(16, 1 << (head_dim - head - 1).bit_length())
    return Split(2 * head, 0) if tail == head else Split(head, tail)


@cache
def choose(
    direction: str,
    capability: tuple[int, int],
    shared_memory: int,
    head_dim: int,
    head_dim_v: int,
    bias_bytes: int = 0,
    tuned: Tile | None = None,
) -> Tile:
    """The fastest known tile that fits in `shared_memory` bytes per block; `tuned` if it fits."""
    padded, padded_v = sum(split(head_dim)), sum(split(head_dim_v))
    tables = _TABLE.get(capability, _SMALL)
    with_bias = f"{direction}_with_bias" if bias_bytes else direction
    by_head_dim = tables.get(with_bias, tables[direction])
    size = max(padded, padded_v)
    candidates = next((tiles for limit, tiles in by_head_dim.items() if size <= limit), ())
    # `tuned` was measured without a bias.
    measured: tuple[Tile, ...] = ()
    if tuned is not None and by_head_dim is tables[direction]:
        measured = (tuned,)
    for tile in (*measured, *candidates, *_LAST_RESORT):
        needed = shared_bytes(direction, tile, padded, padded_v, capability, bias_bytes)
        if needed <= shared_memory:
            return tile
    return _LAST_RESORT[-1]


def shared_bytes(
    direction: str,
    tile: Tile,
    padded: int,
    padded_v: int,
    capability: tuple[int, int],
    bias_bytes: int = 0,
) -> int:
    """Upper bound of Triton's shared memory in bytes, for 16-bit inputs of padded head dims."""
    if capability < TENSOR_CORES_SINCE:
        operands = _float32_operands(direction, tile, padded, padded_v)
        return operands + bias_bytes * tile.block_q * tile.block_kv + _BARRIERS
    both = 2 * (padded + padded_v)
    scores = tile.block_q * tile.block_kv
    # If the tensor cores read shared memory, the block in use needs its own buffer.
    buffers = tile.stages if reads_shared_memory(capability) else max(1, tile.stages - 1)
    rest = bias_bytes * scores * buffers + _BARRIERS
    if direction != "forward" and _TENSOR_MEMORY_SINCE <= capability < _SHARED_OPERANDS_BEFORE:
        # Copies of operands for tensor memory: the measured size plus a margin.
        rest += max(tile.block_q, tile.block_kv) * max(padded, padded_v)
        buffers += direction == "backward_kv"
    if direction == "forward":
        # q is loaded once, k and v are streamed, P is an operand.
        return 2 * tile.block_q * padded + buffers * tile.block_kv * both + 2 * scores + rest
    if direction == "backward_q":
        # q and grad_out are loaded once, k and v are streamed, dS is an operand.
        return tile.block_q * both + buffers * tile.block_kv * both + 2 * scores + rest
    if direction == "backward_kv":
        # k and v are loaded once; q, grad_out and two float32 per row are streamed; P and dS are
        # operands.
        streamed = buffers * tile.block_q * (both + 8)
        # Without a pipeline Triton keeps q or grad_out a second time, transposed.
        if tile.stages == 1 and max(padded, padded_v) > 256:
            streamed += 2 * tile.block_q * max(padded, padded_v)
        return tile.block_kv * both + streamed + 4 * scores + rest
    return (tile.block_q + tile.block_kv) * both * buffers + 4 * scores + rest


def reads_shared_memory(capability: tuple[int, int]) -> bool:
    """Whether the tensor cores read operands from shared memory; otherwise from registers."""
    return _SHARED_OPERANDS_SINCE <= capability < _SHARED_OPERANDS_BEFORE


def _float32_operands(direction: str, tile: Tile, padded: int, padded_v: int) -> int:
    """Upper bound of the bytes of the operands, one of those that are streamed at a time."""
    both, larger = padded + padded_v, max(padded, padded_v)
    scores = tile.block_q * tile.block_kv
    if direction == "forward":
        return 4 * (tile.block_q * padded + tile.block_kv * larger + scores)
    if direction == "backward_q":
        return 4 * (tile.block_q * both + tile.block_kv * larger + scores)
    if direction == "backward_kv":
        return 4 * (tile.block_kv * both + tile.block_q * larger + scores)
    return 4 * ((tile.block_q + tile.block_kv) * larger + scores)
