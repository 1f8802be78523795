"""What `doctor --bench` times of causal_conv1d: it moves bytes, so it is set beside a copy."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from flashvar.cli.speed import OURS, Call, Cell
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD

if TYPE_CHECKING:
    import torch

DTYPE: Final = "bf16"
DIM: Final = 8192
WIDTH: Final = 4
_BYTES: Final = 2

TITLE: Final = "Speed of causal_conv1d, TB/s"
NOTE: Final = f"{DIM} channels, width {WIDTH}, SiLU, {DTYPE}; bytes read and written."
PEERS: Final = {"copy": "copy", "causal-conv1d": "causal-conv1d", "fla": "FLA"}


@dataclass(frozen=True)
class ConvCell(Cell):
    """Sequences of one length, channels beside each other."""

    direction: str = "forward"
    batch: int = 1
    seqlen: int = 1


def _cell(direction: str, batch: int, seqlen: int) -> ConvCell:
    # The backward reads x and the gradient of y, and writes that of x.
    moved = (2 if direction == "forward" else 3) * batch * seqlen * DIM * _BYTES
    name = f"convolution, {direction}, {batch} x {seqlen}"
    function = FORWARD if direction == "forward" else BACKWARD
    return ConvCell(name, function, DTYPE, (), float(moved), direction, batch, seqlen)


CELLS: Final = tuple(
    _cell(direction, *shape)
    for shape in ((1, 8192), (8, 1024), (4, 8192))
    for direction in ("forward", "backward")
)


def call(cell: ConvCell, contender: str, device: torch.device) -> Call:
    """A call of flashvar (OURS) or of a peer, with its inputs. The copy moves as many bytes."""
    import torch

    if contender == "copy":
        source = torch.empty(int(cell.work) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    x = torch.randn(cell.batch, cell.seqlen, DIM, dtype=torch.bfloat16, device=device)
    weight = torch.randn(DIM, WIDTH, dtype=torch.bfloat16, device=device)
    convolve = _convolution(contender)
    if cell.direction == "forward":
        return lambda: convolve(x, weight)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = convolve(*leaves)
    grad = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


def _convolution(contender: str) -> Any:
    """Of x [batch, seqlen, dim] and weight."""
    if contender == OURS:
        from flashvar.ops.causal_conv1d.api import causal_conv1d

        return lambda x, weight: causal_conv1d(x, weight, activation="silu")
    if contender == "fla":
        of_fla = import_module("fla.modules.convolution").causal_conv1d
        return lambda x, weight: of_fla(x, weight, activation="silu")[0]
    original = import_module("causal_conv1d").causal_conv1d_fn
    return lambda x, weight: original(x.mT, weight, activation="silu").mT
