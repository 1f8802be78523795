"""Which block sizes the Triton kernels run with: a table, filtered by the device's shared memory.

Pure arithmetic on facts that the caller has: it works, and is tested, without a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple


class Tile(NamedTuple):
    """Rows of q and of k and v that a program holds, and how Triton compiles it."""

    block_q: int
    block_kv: int
    warps: int
    stages: int


class Split(NamedTuple):
    """A head dim as one or two powers of two of at least 16; `tail` is 0 or the smaller one."""

    head: int
    tail: int


_Table = dict[int, tuple[Tile, ...]]  # largest padded head dim -> candidates, the fastest first
_Tables = dict[str, _Table]  # by direction, and a direction with a bias where that is another

DIRECTIONS: Final = ("forward", "backward_q", "backward_kv", "backward_bias")

# One tile of the gradient of a bias and what it is made of; nothing of it is worth tuning.
_BIAS: Final[_Table] = {
    64: (Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
    128: (Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
    192: (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: (Tile(32, 32, 4, 1),),
}
# A bias is loaded element by element, each with its own address: larger tiles spill.
_FORWARD_WITH_BIAS: Final[_Table] = {
    64: (Tile(64, 64, 4, 2),),
    128: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: (Tile(64, 32, 8, 2),),
}
# First choices keep registers from spilling, or nearly so (ptxas of Triton 3.7 and 3.9).
_AMPERE: Final[_Tables] = {
    "forward": {
        64: (Tile(128, 64, 4, 3),),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
        192: (Tile(128, 32, 8, 3), Tile(64, 32, 4, 3)),
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
    },
    "forward_with_bias": _FORWARD_WITH_BIAS,
    "backward_q": {
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
        128: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        192: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    },
    "backward_kv": {
        64: (Tile(32, 64, 4, 3), Tile(32, 64, 4, 2)),
        128: (Tile(32, 64, 8, 2), Tile(32, 64, 8, 1)),
        192: (Tile(32, 32, 4, 2),),
        256: (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2)),
    },
    "backward_bias": _BIAS,
}
_SMALL: Final[_Tables] = {  # 99 KiB a block
    "forward": {
        64: (Tile(128, 64, 4, 3),),
        128: (Tile(128, 64, 8, 2),),
        192: (Tile(64, 32, 8, 3),),
        256: (Tile(64, 32, 8, 2),),
    },
    "forward_with_bias": _FORWARD_WITH_BIAS,
    "backward_q": {
        64: (Tile(64, 64, 4, 2),),
        128: (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
        192: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
    },
    "backward_kv": {
        64: (Tile(32, 64, 4, 2),),
        128: (Tile(32, 64, 8, 2), Tile(32, 64, 8, 1)),
        192: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
        256: (Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
    },
    "backward_bias": _BIAS,
}
_HOPPER: Final[_Tables] = {
    "forward": {
        64: (Tile(64, 64, 4, 3),),
        128: (Tile(64, 64, 4, 3),),
        192: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
        256: (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
    },
    "forward_with_bias": {
        **_FORWARD_WITH_BIAS,
        128: (Tile(128, 32, 8, 2),),
        256: (Tile(128, 16, 8, 3), Tile(64, 32, 8, 2)),
    },
    "backward_q": {
        64: (Tile(64, 64, 4, 3),),
        128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
        192: (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
        256: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    },
    "backward_kv": {
        64: (Tile(64, 64, 4, 3),),
        128: (Tile(32, 64, 4, 4), Tile(32, 64, 4, 3)),
        192: (Tile(32, 64, 8, 3), Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(32, 64, 8, 3), Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    },
    "backward_bias": _BIAS,
}
_BLACKWELL: Final[_Tables] = {
    "forward": {
        64: (Tile(128, 128, 8, 3),),
        128: (Tile(128, 64, 8, 3),),
        192: (Tile(128, 64, 8, 2),),
        256: (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
    },
    "forward_with_bias": _FORWARD_WITH_BIAS,
    "backward_q": {
        **_HOPPER["backward_q"],
        256: (Tile(64, 32, 4, 2),),
    },
    "backward_kv": {
        64: (Tile(64, 64, 8, 3),),
        128: (Tile(32, 64, 8, 3), Tile(32, 64, 8, 2)),
        192: (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
        256: (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    },
    "backward_bias": _BIAS,
}
_TABLE: Final[dict[tuple[int, int], _Tables]] = {
    (8, 0): _AMPERE,
    (8, 6): _SMALL,
    (8, 9): _SMALL,
    (9, 0): _HOPPER,
    (10, 0): _BLACKWELL,
    (10, 3): _BLACKWELL,
    (12, 0): _SMALL,
    (12, 1): _SMALL,
}

# For devices that nobody has met: these fit wherever Triton compiles.
_LAST_RESORT: Final = (Tile(32, 32, 4, 1), Tile(16, 16, 1, 1))

# Operands of these capabilities' tensor cores lie in shared memory; the others read registers.
_SHARED_OPERANDS_SINCE: Final = (9, 0)
_SHARED_OPERANDS_BEFORE: Final = (12, 0)
_TENSOR_MEMORY_SINCE: Final = (10, 0)
# Barriers and the row sums of a program, at most.
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
    """The fastest tile known that fits in `shared_memory` bytes a block; `tuned` if it does."""
    padded, padded_v = sum(split(head_dim)), sum(split(head_dim_v))
    tables = _TABLE.get(capability, _SMALL)
    with_bias = f"{direction}_with_bias" if bias_bytes else direction
    by_head_dim = tables.get(with_bias, tables[direction])
    size = max(padded, padded_v)
    candidates = next(tiles for limit, tiles in by_head_dim.items() if size <= limit)
    # What was measured was a call without a bias.
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
    """Upper bound of what Triton allocates for 16-bit inputs of padded head dims."""
    both = 2 * (padded + padded_v)
    scores = tile.block_q * tile.block_kv
    # Where the tensor cores read shared memory, the block in use needs a buffer of its own.
    in_use = _SHARED_OPERANDS_SINCE <= capability < _SHARED_OPERANDS_BEFORE
    buffers = tile.stages if in_use else max(1, tile.stages - 1)
    rest = bias_bytes * scores * buffers + _BARRIERS
    if direction != "forward" and _TENSOR_MEMORY_SINCE <= capability < _SHARED_OPERANDS_BEFORE:
        # Operands of tensor memory pass through copies: as much as was seen, and a little more.
        rest += max(tile.block_q, tile.block_kv) * max(padded, padded_v)
        buffers += direction == "backward_kv"
    if direction == "forward":
        # q stays, k and v pass, the weights are an operand.
        return 2 * tile.block_q * padded + buffers * tile.block_kv * both + 2 * scores + rest
    if direction == "backward_q":
        # q and grad_out stay, k and v pass, dS is an operand.
        return tile.block_q * both + buffers * tile.block_kv * both + 2 * scores + rest
    if direction == "backward_kv":
        # k and v stay, q, grad_out and two float32 of each row pass, P and dS are operands.
        passing = buffers * tile.block_q * (both + 8)
        return tile.block_kv * both + passing + 4 * scores + rest
    return (tile.block_q + tile.block_kv) * both * buffers + 4 * scores + rest
