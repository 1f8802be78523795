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

# First choices keep registers from spilling, or nearly so (ptxas of Triton 3.7).
_AMPERE: Final[_Table] = {
    64: (Tile(128, 64, 4, 3),),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    192: (Tile(128, 32, 8, 3), Tile(64, 32, 4, 3)),
    256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
}
_SMALL: Final[_Table] = {  # 99 KiB a block
    64: (Tile(128, 64, 4, 3),),
    128: (Tile(128, 64, 8, 2),),
    192: (Tile(64, 32, 8, 3),),
    256: (Tile(64, 32, 8, 2),),
}
_HOPPER: Final[_Table] = {
    64: (Tile(128, 128, 8, 3), Tile(128, 64, 4, 3)),
    128: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3)),
    192: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    256: (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
}
_BLACKWELL: Final[_Table] = {
    64: (Tile(128, 128, 8, 3),),
    128: (Tile(128, 64, 8, 3),),
    192: (Tile(128, 64, 8, 2),),
    256: (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
}
_TABLE: Final[dict[tuple[int, int], _Table]] = {
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
def choose(capability: tuple[int, int], shared_memory: int, head_dim: int) -> Tile:
    """The fastest tile known that fits in `shared_memory` bytes a block."""
    padded = sum(split(head_dim))
    by_head_dim = _TABLE.get(capability, _SMALL)
    candidates = next(tiles for limit, tiles in by_head_dim.items() if padded <= limit)
    for tile in (*candidates, *_LAST_RESORT):
        if shared_bytes(tile, padded, capability) <= shared_memory:
            return tile
    return _LAST_RESORT[-1]


def shared_bytes(tile: Tile, padded: int, capability: tuple[int, int]) -> int:
    """Upper bound of what Triton allocates for 16-bit inputs of a padded head dim."""
    b_q, b_kv = 2 * tile.block_q * padded, 2 * tile.block_kv * padded
    b_p = 2 * tile.block_q * tile.block_kv
    # Where the tensor cores read shared memory, the block in use needs a buffer of its own.
    in_use = _SHARED_OPERANDS_SINCE <= capability < _SHARED_OPERANDS_BEFORE
    buffers = tile.stages if in_use else max(1, tile.stages - 1)
    return b_q + 2 * buffers * b_kv + b_p + _BARRIERS
