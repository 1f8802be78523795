"""The calls of gated_delta_rule that `doctor --bench` times: layers of models, beside peers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from flashvar.cli.speed import OURS, Call, Cell
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FORWARD

if TYPE_CHECKING:
    import torch

DTYPE: Final = "bf16"
HEAD_DIM: Final = 128
_CHUNK: Final = 64

TITLE: Final = "Speed of gated_delta_rule, TFLOP/s"
NOTE: Final = (
    f"K and V {HEAD_DIM} unless named, {DTYPE}; the products of chunks of {_CHUNK} tokens count."
)
PEERS: Final = {"fla": "FLA", "flash-qla": "FlashQLA", "torch": "torch's functions"}


@dataclass(frozen=True)
class DeltaCell(Cell):
    """A layer's call: sequences of one length."""

    direction: str = "forward"
    heads: tuple[int, int] = (16, 32)  # of q and k, of v
    batch: int = 1
    seqlen: int = 8192
    head_dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)  # K, V
    lowest_gate: float = -1.0


def _cell(
    direction: str,
    heads: tuple[int, int],
    batch: int,
    seqlen: int,
    head_dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM),
    lowest_gate: float = -1.0,
) -> DeltaCell:
    # Products with a state, of squares with K and with V, and of squares, for each token.
    products = (3, 2, 2, 1 / 3) if direction == "forward" else (9, 6, 5, 2)
    k, v = head_dims
    sizes = k * v, _CHUNK * k, _CHUNK * v, _CHUNK**2
    token = 2 * sum(count * size for count, size in zip(products, sizes, strict=True))
    name = f"{direction}, {heads[0]}/{heads[1]} heads, {batch} x {seqlen}"
    if head_dims != (HEAD_DIM, HEAD_DIM):
        name += f", K {k}, V {v}"
    if lowest_gate != -1.0:
        name += f", gates to {lowest_gate:g}"
    function = FORWARD if direction == "forward" else BACKWARD
    work = batch * seqlen * heads[1] * token
    return DeltaCell(
        *(name, function, DTYPE, ((k,),), work, direction, heads, batch, seqlen, head_dims),
        lowest_gate,
    )


_Shape: TypeAlias = tuple[tuple[int, int], int, int]


def _cells(
    *shapes: _Shape,
    head_dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM),
    lowest_gate: float = -1.0,
) -> tuple[DeltaCell, ...]:
    return tuple(
        _cell(direction, *shape, head_dims, lowest_gate)
        for shape in shapes
        for direction in ("forward", "backward")
    )


CELLS: Final = _cells(((16, 64), 1, 8192), ((16, 32), 1, 32768), ((16, 32), 8, 1024))
MORE_CELLS: Final = (
    *_cells(((16, 64), 4, 8192), ((16, 32), 1, 8192), ((2, 8), 1, 32768), ((16, 16), 1, 8192)),
    *_cells(((32, 32), 1, 8192), head_dims=(64, 64)),
    *_cells(((16, 16), 1, 8192), head_dims=(96, 192)),
    *_cells(((6, 6), 1, 16384), ((6, 6), 4, 4096), head_dims=(256, 512)),
    # States that decay slowly, so that a token depends on all before it in its chunk.
    *_cells(((16, 32), 1, 8192), lowest_gate=-0.01),
)

SMALL_CELLS: Final = _cells(((2, 2), 1, 64))[:1]


def call(cell: DeltaCell, contender: str, device: torch.device) -> Call:
    """A call of flashvar (OURS) or of a peer, with its inputs."""
    import torch

    few, many = cell.heads
    rows = (cell.batch, cell.seqlen)

    def made(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(*rows, heads, dim, dtype=torch.bfloat16, device=device)

    k, v = cell.head_dims
    given = {
        **{"q": made(few, k), "k": made(few, k), "v": made(many, v)},
        "g": cell.lowest_gate * torch.rand(*rows, many, device=device),
        "beta": torch.rand(*rows, many, device=device).bfloat16(),
    }
    rule = _rule(contender)
    if cell.direction == "forward":
        return lambda: rule(given)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    out = rule(given)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _rule(contender: str) -> Any:
    """Out of a contender, for the arguments by name; q and k are normalized inside."""
    if contender == "fla":
        # FLA hands the call on where FlashQLA is installed, which is a contender of its own.
        os.environ["FLA_FLASH_QLA"] = "0"
        of_fla = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        return lambda given: of_fla(**given, use_qk_l2norm_in_kernel=True)[0]
    if contender == "flash-qla":
        of_qla = import_module("flash_qla").chunk_gated_delta_rule
        return lambda given: of_qla(**given, use_qk_l2norm_in_kernel=True, auto_cp=True)[0]
    from flashvar.ops.gated_delta_rule.api import gated_delta_rule

    backend: Any = "auto" if contender == OURS else "reference"
    # Not by name: making a dictionary of the names is no part of the call.
    return lambda given: gated_delta_rule(*given.values(), qk_l2norm=True, backend=backend)[0]
