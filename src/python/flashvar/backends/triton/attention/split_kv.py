"""The launches of attention of few queries: several programs may share the keys of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from flashvar.backends.triton.attention import tiles
from flashvar.backends.triton.attention.arguments import LOG2E, UNBOUNDED, bias_strides, float32
from flashvar.backends.triton.attention.fwd import STRIDE_UNIT
from flashvar.backends.triton.attention.split_kv_kernels import (
    split_kv_kernel,
    split_kv_merge_kernel,
)
from flashvar.backends.triton.attention.tiles import Tile
from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.repeated import Bind, RepeatedLaunch, on_device
from flashvar.machine.system import gather
from flashvar.ops.plans import Maker, maker_of

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import Problem, Strides

# Of a program. Where tensor cores read registers, more rows would spill some.
_MOST_ROWS: Final = 64
_MOST_ROWS_IN_REGISTERS: Final = 32
_MOST_SPLITS: Final = 64
# A kernel merges up to so many: one for each number would have to be compiled.
MERGED_SPLITS: Final = (2, 8, _MOST_SPLITS)
# So many programs run on a multiprocessor at a time: up to head dim 128, and above. More splits
# would leave few of them for a last wave.
_PROGRAMS: Final = 4
_PROGRAMS_OF_LARGE: Final = 2
_MEDIUM_HEAD_DIM: Final = 128
_LARGE_HEAD_DIM: Final = 256
# A split of fewer blocks of keys takes longer to merge than it saves.
_LEAST_BLOCKS: Final = 2


class Machine(NamedTuple):
    """What a launch depends on of a device."""

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int


# That of the interpreter, which has no device.
NO_DEVICE: Final = Machine((8, 0), 48 * 1024, 4)


class Keys(NamedTuple):
    """Where the keys and values of sequences are: in [slots, size, heads, head_dim]."""

    k: Strides
    v: Strides
    slots: int
    size: int
    pages: int = 1  # of each sequence: the slots that it has
    table: tuple[int, int] | None = None  # strides of a table of pages

    def capacity(self) -> int:
        """How many keys a sequence can have."""
        return self.size * self.pages


class SplitKVLaunch(NamedTuple):
    """The two kernels of a call, and how the results of splits are made."""

    run: Callable[..., object]
    merge: Callable[..., object] | None  # None: the first kernel stores the results of the call
    make_outs: Maker
    make_lses: Maker
    device: int | None

    def __call__(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *given: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        """Compute `out` and, unless it is None, its log-sum-exp.

        `given`: q, k, v, slots, table, before, begins, lengths and slopes, as of the kernel.
        """
        with on_device(self.device):
            if self.merge is None:
                self.run(out, lse, *given, bias, sinks, offsets)
            else:
                outs, lses = self.make_outs(), self.make_lses()
                self.run(outs, lses, *given, bias, None, offsets)
                self.merge(out, lse, outs, lses, sinks, offsets)


def prepare(
    problem: Problem,
    keys: Keys,
    machine: Machine,
    new: int = 0,
    splits: int | None = None,
    bind: Bind = RepeatedLaunch,
) -> SplitKVLaunch:
    """The launch of a problem, whose strides of k and v are not used; rows are contiguous.

    Args:
        problem: Queries are dense or packed; no dropout.
        keys: Where keys and values are.
        machine: The device.
        new: How many keys of each sequence the call has added to a cache.
        splits: How many programs share the keys of a sequence; None: as the device needs.
        bind: Makes the function that launches a kernel.
    """
    group = problem.heads_q // problem.heads_kv
    rows = problem.seqlen_q * group
    bias_bytes = tiles.BIAS_BYTES[problem.bias_dtype]
    tile = choose_tile(rows, problem.head_dim, problem.head_dim_v, machine, bias_bytes)
    programs = problem.batch * problem.heads_kv * -(-rows // tile.block_q)
    if splits is None:
        largest = max(problem.head_dim, problem.head_dim_v)
        running = _PROGRAMS if largest <= _MEDIUM_HEAD_DIM else _PROGRAMS_OF_LARGE
        most = most_keys(problem, keys.capacity())
        splits = _splits(programs, running * machine.multiprocessors, most, tile.block_kv)
    # The first kernel does not write rows that belong to no sequence.
    merged = splits > 1 or problem.total_q is not None
    shared = {
        "seqlen_q": problem.seqlen_q,
        "total_q": problem.total_q or 0,
        "heads_kv": problem.heads_kv,
        "splits": splits,
        "heads_first": int(problem.total_q is None and problem.layout_out == "bhsd"),
        "V_DIM": problem.head_dim_v,
        "BLOCK_V": max(16, power_of_2(problem.head_dim_v)),
    }
    arguments = {
        **shared,
        **_strides(problem, keys),
        **_numbers(problem, keys),
        "new": new,
        "GROUP": group,
        "MERGED": merged,
        "BLOCK_K": max(16, power_of_2(problem.head_dim)),
        "BLOCK_ROWS": tile.block_q,
        "BLOCK_KEYS": tile.block_kv,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
    of_merge = {
        **shared,
        "batch": problem.batch,
        "group": group,
        "BLOCK_SPLITS": next(most for most in MERGED_SPLITS if splits <= most),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    merge = bind(split_kv_merge_kernel, (math.prod(problem.lse_shape),), of_merge)
    parts = (problem.batch, problem.heads_kv, splits, rows)
    return SplitKVLaunch(
        bind(split_kv_kernel, (programs * splits,), arguments),
        merge if merged else None,
        _make_float32(problem, *parts, problem.head_dim_v),
        _make_float32(problem, *parts),
        problem.device,
    )


def choose_tile(
    rows: int, head_dim: int, head_dim_v: int, machine: Machine, bias_bytes: int = 0
) -> Tile:
    """The rows and keys of a program: as few rows as there are, and as many keys as fit.

    Measured on an H200: with three stages fewer programs run on a multiprocessor, which costs more
    than it gains, except with many rows of large head dims.
    """
    capability, shared_memory, _ = machine
    padded, padded_v = (max(16, power_of_2(dim)) for dim in (head_dim, head_dim_v))
    in_shared = tiles.reads_shared_memory(capability)
    most = _MOST_ROWS if in_shared else _MOST_ROWS_IN_REGISTERS
    block = min(max(16, power_of_2(rows)), most)
    largest = max(padded, padded_v)
    if capability < tiles.TENSOR_CORES_SINCE:
        wanted = [Tile(16, 32, 4, 1)] if largest <= _MEDIUM_HEAD_DIM else []
    else:
        first = Tile(block, 128 if largest <= 64 else 64, 4, 2)
        if largest > _MEDIUM_HEAD_DIM and block > 16:
            first = Tile(block, 32, 4, 3)
        wanted = [first, Tile(block, 32, 4, 2), Tile(16, 32, 4, 2)]
        if largest > _LARGE_HEAD_DIM:  # the output of more rows does not fit in registers
            wanted = [Tile(16, 32, 8, 2)]
    wanted.append(Tile(16, 16, 4, 1))
    for tile in wanted:
        needed = tiles.shared_bytes("forward", tile, padded, padded_v, capability, bias_bytes)
        if needed <= shared_memory:
            return tile
    return wanted[-1]


def machine_of(device: int | None) -> Machine:
    """What a launch depends on of a CUDA device; None: the CPU, for the interpreter."""
    found = None if device is None else gather().device(device)
    if found is None:
        return NO_DEVICE
    return Machine(found.capability, found.shared_memory, found.multiprocessors)


def most_keys(problem: Problem, capacity: int) -> int:
    """How many keys the queries of a sequence see at most."""
    if problem.window_left < 0 or problem.window_right < 0:
        return capacity
    return min(capacity, problem.window_left + problem.seqlen_q + problem.window_right)


def _make_float32(problem: Problem, *sizes: int) -> Maker:
    device = torch.device("cpu" if problem.device is None else f"cuda:{problem.device}")
    return maker_of(torch.empty(sizes, dtype=torch.float32, device="meta"), device)


def _splits(programs: int, running: int, most_keys: int, block_keys: int) -> int:
    """How many programs share the keys of a sequence; how many it has is not known here."""
    wanted = running // programs
    most = min(_MOST_SPLITS, most_keys // (_LEAST_BLOCKS * block_keys))
    return max(1, min(wanted, most))


def _strides(problem: Problem, keys: Keys) -> dict[str, int]:
    """The strides of the kernel's tensors, in units of 16 bytes where all are multiples of that."""
    strides = {
        f"{name}_{axis}": stride
        for name, of, axes in (
            ("q", problem.q, ("batch", "row", "head")),
            ("k", keys.k, ("slot", "row", "head")),
            ("v", keys.v, ("slot", "row", "head")),
        )
        for axis, stride in zip(axes, of, strict=True)
    }
    unit = STRIDE_UNIT.value
    if any(stride % unit for stride in strides.values()):
        unit = 1
    table = keys.table or (0, 0)
    return {
        **{name: stride // unit for name, stride in strides.items()},
        "UNIT": unit,
        "table_row": table[0],
        "table_page": table[1],
    }


def _numbers(problem: Problem, keys: Keys) -> dict[str, Any]:
    """The other arguments that do not depend on the tile."""
    softcap, scale = problem.softcap, problem.scale * LOG2E
    return {
        "slopes_batch": problem.alibi_batch_stride or 0,
        **bias_strides("bias", problem.bias),
        "slots": keys.slots,
        "size": keys.size,
        "pages": keys.pages,
        "window_left": min(problem.window_left, UNBOUNDED),
        "window_right": min(problem.window_right, UNBOUNDED),
        "scale_log2": float32(scale),
        "softcap_in": float32(2.0 * scale / softcap) if softcap else 0.0,
        "softcap_out": float32(softcap * LOG2E),
        "PAGE": 0 if keys.table is None else keys.size,
        "SOFTCAP": softcap != 0.0,
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        "K_DIM": problem.head_dim,
    }
