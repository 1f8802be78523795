"""Whole layers: gated delta networks, of flashvar and of FLA, beside softmax attention.

A layer maps [batch, seqlen, hidden] to the same shape; projections, convolutions, norms and gates
are timed with it. All layers of a cell have as many heads and head dims, and take turns. `first_s`
is the first call of a layer in this process, which compiles what is not compiled yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Final

import torch
from torch import nn

from benchmarks import cases, timing, worker_pool
from benchmarks.cases import LayerCell
from benchmarks.report import Options, Report, Row, chosen, reason
from flashvar.ops.dtypes import dtype_of

OURS: Final = "gated-delta-net"
_SEED: Final = 20


def run(options: Options) -> Report:
    """Times the chosen cells on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown cell or contender.
    """
    cells = {cell.name: cell for cell in cases.layers()}
    wanted = chosen(tuple(CONTENDERS), options.contenders, option="--contender")
    rows = worker_pool.run(
        chosen(tuple(cells), options.only),
        0,  # other processes would slow first calls down
        prepare=partial(_prepare, cells, wanted),
        measure=partial(_measure, cells, options.seconds),
        lost=partial(_lost, cells, wanted),
    )
    lines = [_line(row) for row in rows if "skipped" not in row]
    return Report(rows=rows, columns=_COLUMNS, lines=lines)


_COLUMNS: Final = ("cell", "layer", "first call (s)", "ms", "10^6 tokens/s", "flashvar's to it")


class SoftmaxAttention(nn.Module):  # type: ignore[misc]
    """Causal attention between projections of q, k and v and one of the output."""

    def __init__(self, cell: LayerCell, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.head_dim = cell.head_dim
        self.attend = attend
        self.qkv_proj = nn.Linear(cell.hidden, 3 * cell.hidden, bias=False)
        self.o_proj = nn.Linear(cell.hidden, cell.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of x."""
        heads = self.qkv_proj(x).unflatten(-1, (3, -1, self.head_dim))
        out: torch.Tensor = self.o_proj(self.attend(*heads.unbind(2)).flatten(-2))
        return out


class _Output(nn.Module):  # type: ignore[misc]
    """A layer of linear attention that returns its output alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


def _gated_delta_net(module: str) -> Callable[[LayerCell], nn.Module]:
    def made(cell: LayerCell) -> nn.Module:
        layer = import_module(module).GatedDeltaNet
        heads = cell.hidden // cell.head_dim
        return _Output(layer(cell.hidden, expand_v=1, head_dim=cell.head_dim, num_heads=heads))

    return made


def _softmax_flashvar(cell: LayerCell) -> nn.Module:
    from flashvar import attention

    return SoftmaxAttention(cell, lambda q, k, v: attention(q, k, v, causal=True))


def _softmax_sdpa(cell: LayerCell) -> nn.Module:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (one.transpose(1, 2) for one in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        return out.transpose(1, 2)

    return SoftmaxAttention(cell, attend)


CONTENDERS: Final[Mapping[str, Callable[[LayerCell], nn.Module]]] = {
    OURS: _gated_delta_net("flashvar.layers"),
    "fla-gated-delta-net": _gated_delta_net("fla.layers"),
    "attention": _softmax_flashvar,
    "sdpa": _softmax_sdpa,
}


def current_device() -> torch.device:
    """The CUDA device that is timed."""
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Prepared:
    """Layers of a cell that were called: their calls, seconds of the first one, why not."""

    calls: dict[str, Callable[[], object]]
    first: dict[str, float]
    skipped: dict[str, str]


_held: dict[str, Prepared] = {}  # in the process that prepared them, until they are measured


def _prepare(cells: Mapping[str, LayerCell], wanted: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        prepared = _held[name] = Prepared({}, {}, {})
        for contender in wanted:
            try:
                call = _call(CONTENDERS[contender], cells[name])
                prepared.first[contender] = _seconds(call)
                for _ in range(cells[name].warm_up - 1):
                    call()
                prepared.calls[contender] = call
            except torch.cuda.OutOfMemoryError:
                raise  # says nothing of the contender: the case is lost
            except Exception as error:  # what a contender does not run is an answer
                prepared.skipped[contender] = reason(error)


def _described(cell: LayerCell) -> Row:
    return {
        "cell": cell.name,
        "direction": cell.direction,
        "dtype": cell.dtype,
        "batch": cell.batch,
        "seqlen": cell.seqlen,
        "hidden": cell.hidden,
        "head_dim": cell.head_dim,
        "warm_up": cell.warm_up,
    }


def _skipped(cell: LayerCell, reasons: Mapping[str, str]) -> list[Row]:
    return [{**_described(cell), "contender": who, "skipped": why} for who, why in reasons.items()]


def _lost(cells: Mapping[str, LayerCell], wanted: Sequence[str], name: str, why: str) -> list[Row]:
    return _skipped(cells[name], dict.fromkeys(wanted, why))


def _measure(cells: Mapping[str, LayerCell], seconds: float, name: str) -> list[Row]:
    cell, prepared = cells[name], _held.pop(name)
    measured = timing.measure(prepared.calls, seconds=seconds)
    ours = measured.timings.get(OURS)
    rows: list[Row] = [
        {
            **_described(cell),
            "contender": contender,
            "first_s": round(prepared.first[contender], 3),
            "median_ms": spent.median_ms,
            "low_ms": spent.low_ms,
            "high_ms": spent.high_ms,
            "rounds": spent.rounds,
            "tokens_per_s": cell.batch * cell.seqlen / spent.median_ms * 1e3,
            "to_contender": None if ours is None else spent.median_ms / ours.median_ms,
            **measured.clocks,
        }
        for contender, spent in measured.timings.items()
    ]
    return rows + _skipped(cell, prepared.skipped)


def _call(make: Callable[[LayerCell], nn.Module], cell: LayerCell) -> Callable[[], object]:
    """A call of a layer with random parameters; the inputs of all layers of a cell are the same."""
    device = current_device()
    torch.manual_seed(_SEED)
    shape = (cell.batch, cell.seqlen, cell.hidden)
    dtype = dtype_of(cell.dtype)
    x, grad = torch.randn(2, *shape, device=device, dtype=dtype).unbind()
    layer = make(cell).to(device, dtype)  # draws numbers too, so the inputs come first
    if cell.direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return layer(x)

        return forward
    leaves = [x.requires_grad_(), *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), leaves, grad)


def _seconds(call: Callable[[], object]) -> float:
    """Wall clock of one call and of the device's work for it."""
    began = perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - began


def _line(row: Row) -> tuple[str, ...]:
    ratio = row["to_contender"]
    return (
        str(row["cell"]),
        str(row["contender"]),
        f"{row['first_s']:.2f}",
        f"{row['median_ms']:.3f}",
        f"{float(row['tokens_per_s'] or 0) / 1e6:.1f}",
        "" if ratio is None else f"{ratio:.2f}",
    )
