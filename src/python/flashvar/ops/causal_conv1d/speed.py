"""The calls of causal_conv1d that `doctor --bench` times, beside a copy of as many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal

from flashvar.cli.speed import OURS, Call, Cell
from flashvar.errors import LayoutError
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD

if TYPE_CHECKING:
    import torch

DTYPE: Final = "bf16"
WIDTH: Final = 4
_BYTES: Final = 2

TITLE: Final = "Speed of causal_conv1d, TB/s"
NOTE: Final = (
    f"Tokens x channels, width {WIDTH}, SiLU, {DTYPE}; bytes read and written. btd: channels lie "
    "beside each other, bdt: tokens."
)
PEERS: Final = {"copy": "copy", "causal-conv1d": "causal-conv1d", "fla": "FLA"}


@dataclass(frozen=True)
class ConvCell(Cell):
    """Sequences of one length, each of the batch alone or all of them packed."""

    direction: str = "forward"
    layout: Literal["btd", "bdt"] = "btd"
    batch: int = 1
    seqlen: int = 1
    dim: int = 1
    packed: bool = False


def _cell(
    direction: str,
    layout: Literal["btd", "bdt"],
    batch: int,
    seqlen: int,
    dim: int,
    packed: bool = False,
) -> ConvCell:
    # The backward reads x and the gradient of y, and writes that of x.
    moved = (2 if direction == "forward" else 3) * batch * seqlen * dim * _BYTES
    form = ", packed" if packed else ""
    name = f"convolution, {direction}, {layout}, {batch} x {seqlen} x {dim}{form}"
    function = FORWARD if direction == "forward" else BACKWARD
    shape = (batch, seqlen, dim, packed)
    return ConvCell(name, function, DTYPE, (), float(moved), direction, layout, *shape)


_SHAPES: Final = (
    *((1, 8192, 2048), (1, 8192, 8192), (8, 1024, 8192), (4, 8192, 8192)),
    (16, 512, 8192, True),
)
# Of gigabytes; small ones; and some whose rows are no multiples of 16 bytes.
_MORE_SHAPES: Final = (
    *((1, 65536, 4096), (128, 512, 4096, True), (12, 2048, 8192)),
    *((1, 2048, 2048), (1, 32768, 512), (32, 128, 2048)),
    *((1, 8191, 2050), (1, 8191, 8192), (2, 1001, 3072), (8, 513, 1536), (4, 2047, 4096)),
)
_LAYOUTS: Final[tuple[Literal["btd", "bdt"], ...]] = ("btd", "bdt")


def _cells(shapes: tuple[Any, ...]) -> tuple[ConvCell, ...]:
    return tuple(
        _cell(direction, layout, *shape)
        for layout in _LAYOUTS
        for shape in shapes
        for direction in ("forward", "backward")
    )


CELLS: Final = _cells(_SHAPES)
MORE_CELLS: Final = _cells(_MORE_SHAPES)

SMALL_CELLS: Final = (_cell("forward", "btd", 1, 64, 256),)


def call(cell: ConvCell, contender: str, device: torch.device) -> Call:
    """A call of flashvar (OURS) or of a peer, with its inputs. The copy moves as many bytes."""
    import torch

    if contender == "copy":
        source = torch.empty(int(cell.work) // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    shape = [cell.batch, cell.seqlen, cell.dim]
    ends = None
    if cell.packed:
        steps = range(0, (cell.batch + 1) * cell.seqlen, cell.seqlen)
        ends = torch.tensor(steps, dtype=torch.int32, device=device)
        shape = [1, cell.batch * cell.seqlen, cell.dim]
    if cell.layout == "bdt":
        shape[1:] = reversed(shape[1:])
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    weight = torch.randn(cell.dim, WIDTH, dtype=torch.bfloat16, device=device)
    convolve = _convolution(contender, cell.layout, ends)
    if cell.direction == "forward":
        return lambda: convolve(x, weight)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = convolve(*leaves)
    grad = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


def _convolution(contender: str, layout: Literal["btd", "bdt"], ends: torch.Tensor | None) -> Any:
    """The convolution as a function of x and weight; `ends`: cu_seqlens of packed sequences."""
    import torch

    if contender == OURS:
        from flashvar.ops.causal_conv1d.api import causal_conv1d

        return lambda x, weight: causal_conv1d(
            x, weight, activation="silu", layout=layout, cu_seqlens=ends
        )
    if contender == "fla":
        if layout == "bdt":
            raise LayoutError(
                "FLA takes adjacent channels, found adjacent tokens: transpose x first"
            )
        of_fla = import_module("fla.modules.convolution").causal_conv1d
        return lambda x, weight: of_fla(x, weight, activation="silu", cu_seqlens=ends)[0]
    original = import_module("causal_conv1d").causal_conv1d_fn
    ids = None
    if ends is not None:
        numbers = torch.arange(ends.numel() - 1, dtype=torch.int32, device=ends.device)
        ids = numbers.repeat_interleave(ends.diff())[None]
    if layout == "bdt":
        return lambda x, weight: original(x, weight, activation="silu", seq_idx=ids)
    return lambda x, weight: original(x.mT, weight, activation="silu", seq_idx=ids).mT
