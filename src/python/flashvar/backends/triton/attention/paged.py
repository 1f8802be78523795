"""The launches of attention on a KV cache that is read in place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from flashvar.backends.triton.attention import tiles
from flashvar.backends.triton.attention.arguments import LOG2E, UNBOUNDED, float32
from flashvar.backends.triton.attention.fwd import STRIDE_UNIT
from flashvar.backends.triton.attention.paged_kernels import paged_fwd_kernel, paged_merge_kernel
from flashvar.backends.triton.attention.tiles import Tile
from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.repeated import RepeatedLaunch, on_device
from flashvar.machine.system import gather
from flashvar.ops.plans import Maker, maker

if TYPE_CHECKING:
    from flashvar.ops.attention.cache import Cache
    from flashvar.ops.attention.problem import Problem

# Capability, shared memory and multiprocessors that the interpreter uses, which has no device.
_NO_DEVICE: Final = ((8, 0), 48 * 1024, 4)
# Of a program. Where tensor cores read registers, more rows would spill some.
_MOST_ROWS: Final = 64
_MOST_ROWS_IN_REGISTERS: Final = 32
_MOST_SPLITS: Final = 64
# So many programs run on a multiprocessor at a time: up to head dim 128, and above. More splits
# would leave few of them for a last wave.
_PROGRAMS: Final = 4
_PROGRAMS_OF_LARGE: Final = 2
_MEDIUM_HEAD_DIM: Final = 128
# A split of fewer blocks of keys takes longer to merge than it saves.
_LEAST_BLOCKS: Final = 2


class PagedLaunch(NamedTuple):
    """The two kernels of a call, and how the tensors that they write are made."""

    run: RepeatedLaunch
    make_out: Maker
    make_lse: Maker
    merge: RepeatedLaunch | None  # None: the first kernel stores the results of the call
    make_outs: Maker
    make_lses: Maker
    device: int | None

    def __call__(self, *given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and its log-sum-exp.

        `given`: q, k, v, slots, table, before, begins, lengths, slopes and the offsets of packed
        queries, as of the kernel.
        """
        out, lse = self.make_out(), self.make_lse()
        with on_device(self.device):
            if self.merge is None:
                self.run(out, lse, *given)
            else:
                outs, lses = self.make_outs(), self.make_lses()
                self.run(outs, lses, *given)
                self.merge(out, lse, outs, lses, given[-1])
        return out, lse


def prepare(
    problem: Problem,
    q: torch.Tensor,
    cache: Cache,
    new: int,
    splits: int | None = None,
) -> PagedLaunch:
    """The launch of a problem whose keys are those of a cache; rows of all tensors are contiguous.

    Args:
        problem: Its strides of k and v are not used.
        q: [batch, seqlen_q, heads_q, head_dim] or [total_q, heads_q, head_dim].
        cache: The cache.
        new: How many keys of each sequence the call has added.
        splits: How many programs share the keys of a sequence; None: as the device needs.
    """
    group = problem.heads_q // problem.heads_kv
    rows = problem.seqlen_q * group
    capability, shared_memory, multiprocessors = _device(problem.device)
    tile = choose_tile(rows, problem.head_dim, problem.head_dim_v, capability, shared_memory)
    programs = problem.batch * problem.heads_kv * -(-rows // tile.block_q)
    if splits is None:
        largest = max(problem.head_dim, problem.head_dim_v)
        running = _PROGRAMS if largest <= _MEDIUM_HEAD_DIM else _PROGRAMS_OF_LARGE
        splits = _splits(programs, running * multiprocessors, cache.capacity(), tile.block_kv)
    packed = problem.total_q is not None
    merged = splits > 1 or packed
    v_block = max(16, power_of_2(problem.head_dim_v))
    arguments = {
        **_strides(problem, cache),
        **_numbers(problem, cache),
        "new": new,
        "splits": splits,
        "GROUP": group,
        "MERGED": merged,
        "BLOCK_K": max(16, power_of_2(problem.head_dim)),
        "BLOCK_V": v_block,
        "BLOCK_ROWS": tile.block_q,
        "BLOCK_KEYS": tile.block_kv,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
    merge = RepeatedLaunch(
        paged_merge_kernel,
        (math.prod(problem.lse_shape),),
        {
            "batch": problem.batch,
            "seqlen_q": problem.seqlen_q,
            "total_q": problem.total_q or 0,
            "heads_kv": problem.heads_kv,
            "splits": splits,
            "GROUP": group,
            "V_DIM": problem.head_dim_v,
            "BLOCK_V": v_block,
            "BLOCK_SPLITS": power_of_2(splits),
            "num_warps": 4,
            "enable_fp_fusion": True,
        },
    )
    parts = (problem.batch, problem.heads_kv, splits, rows)
    return PagedLaunch(
        RepeatedLaunch(paged_fwd_kernel, (programs * splits,), arguments),
        maker(q.new_empty(problem.out_shape)),
        maker(q.new_empty(problem.lse_shape, dtype=problem.lse_dtype)),
        merge if merged else None,
        maker(q.new_empty((*parts, problem.head_dim_v), dtype=torch.float32)),
        maker(q.new_empty(parts, dtype=torch.float32)),
        problem.device,
    )


def choose_tile(
    rows: int, head_dim: int, head_dim_v: int, capability: tuple[int, int], shared_memory: int
) -> Tile:
    """The rows and keys of a program: as few rows as there are, and as many keys as fit.

    Measured on an H200: with three stages fewer programs run on a multiprocessor, which costs more
    than it gains, except with many rows of large head dims.
    """
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
    wanted.append(Tile(16, 16, 4, 1))
    for tile in wanted:
        needed = tiles.shared_bytes("forward", tile, padded, padded_v, capability)
        if needed <= shared_memory:
            return tile
    return wanted[-1]


def _device(device: int | None) -> tuple[tuple[int, int], int, int]:
    found = None if device is None else gather().device(device)
    if found is None:
        return _NO_DEVICE
    return found.capability, found.shared_memory, found.multiprocessors


def _splits(programs: int, running: int, capacity: int, block_keys: int) -> int:
    """How many programs share the keys of a sequence; how many it has is not known here."""
    wanted = running // programs
    most = min(_MOST_SPLITS, capacity // (_LEAST_BLOCKS * block_keys))
    return max(1, min(wanted, most))


def _strides(problem: Problem, cache: Cache) -> dict[str, int]:
    """The strides of the kernel's tensors, in units of 16 bytes where all are multiples of that."""
    strides = dict(
        zip(
            [f"{name}_{axis}" for name in ("k", "v") for axis in ("slot", "row", "head")],
            (*cache.k.stride()[:3], *cache.v.stride()[:3]),
            strict=True,
        )
    )
    strides |= zip(("q_batch", "q_row", "q_head"), problem.q, strict=True)
    unit = STRIDE_UNIT.value
    if any(stride % unit for stride in strides.values()):
        unit = 1
    table = (0, 0) if cache.table is None else cache.table.stride()
    return {
        **{name: stride // unit for name, stride in strides.items()},
        "UNIT": unit,
        "table_row": table[0],
        "table_page": table[1],
    }


def _numbers(problem: Problem, cache: Cache) -> dict[str, Any]:
    """The other arguments that do not depend on the tile."""
    slots, size = cache.k.shape[:2]
    softcap, scale = problem.softcap, problem.scale * LOG2E
    return {
        "slopes_batch": problem.alibi_batch_stride or 0,
        "seqlen_q": problem.seqlen_q,
        "total_q": problem.total_q or 0,
        "heads_kv": problem.heads_kv,
        "slots": slots,
        "size": size,
        "pages": 1 if cache.table is None else cache.table.shape[1],
        "window_left": min(problem.window_left, UNBOUNDED),
        "window_right": min(problem.window_right, UNBOUNDED),
        "scale_log2": float32(scale),
        "softcap_in": float32(2.0 * scale / softcap) if softcap else 0.0,
        "softcap_out": float32(softcap * LOG2E),
        "PAGE": 0 if cache.table is None else size,
        "SOFTCAP": softcap != 0.0,
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        "K_DIM": problem.head_dim,
        "V_DIM": problem.head_dim_v,
    }
