"""The calls of merge_states that `doctor --bench` times, beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flashvar.cli.speed import OURS, Call, Cell
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD

if TYPE_CHECKING:
    import torch

DTYPE: Final = "bf16"
HEADS: Final = 16
HEAD_DIM: Final = 128
_BYTES: Final = 2
_LSE_BYTES: Final = 4

TITLE: Final = "Speed of merge_states, TB/s"
NOTE: Final = f"Rows of {HEADS} heads, head dim {HEAD_DIM}, {DTYPE}; bytes read and written."
PEERS: Final = {"copy": "copy", "torch": "torch's functions"}


@dataclass(frozen=True)
class MergeCell(Cell):
    """Parts of one batch of rows."""

    direction: str = "forward"
    parts: int = 2
    seqlen: int = 1


def _cell(direction: str, parts: int, seqlen: int) -> MergeCell:
    rows = seqlen * HEADS
    row, lse = HEAD_DIM * _BYTES, _LSE_BYTES
    moved = (parts + 1) * (row + lse)
    if direction == "backward":  # reads grad_out, grad_lse and the parts, writes their gradients
        moved += parts * (row + lse)
    name = f"merge, {direction}, {parts} parts of {seqlen} rows"
    function = FORWARD if direction == "forward" else BACKWARD
    return MergeCell(name, function, DTYPE, (), float(rows * moved), direction, parts, seqlen)


CELLS: Final = (
    _cell("forward", 2, 65536),
    _cell("backward", 2, 65536),
    _cell("forward", 16, 16384),
    _cell("backward", 16, 16384),
)
MORE_CELLS: Final = (_cell("forward", 4, 65536), _cell("backward", 4, 65536))

SMALL_CELLS: Final = (_cell("forward", 2, 64),)


def call(cell: MergeCell, contender: str, device: torch.device) -> Call:
    """A call of flashvar (OURS) or of a peer, with its inputs. The copy moves as many bytes."""
    import torch

    if contender == "copy":
        source = torch.empty(int(cell.work) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    shape = (1, cell.seqlen, HEADS, HEAD_DIM)
    outs = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(cell.parts)]
    lses = [torch.randn(1, HEADS, cell.seqlen, device=device) for _ in range(cell.parts)]
    merge = _merge(contender)
    if cell.direction == "forward":
        return lambda: merge(outs, lses)
    leaves = [tensor.requires_grad_() for tensor in (*outs, *lses)]
    results = merge(outs, lses)
    grads = [torch.randn_like(one) for one in results]
    return lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True)


def _merge(
    contender: str,
) -> Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    if contender == OURS:
        from flashvar.ops.merge_states.api import merge_states

        return merge_states
    from flashvar.backends.reference.merge_states import formula
    from flashvar.ops.merge_states.problem import Parts

    return lambda outs, lses: formula.forward(Parts(tuple(outs), tuple(lses), False))
