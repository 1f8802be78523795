"""Attention, both directions: flashvar's backends beside their peers, on the same tensors.

Rate = operations of the result / median time, in TFLOP/s. `difference_to_reference` is the relative
distance (Frobenius norm) of a contender's results from those of the first exact one: it tells that
the same function was timed, or how far an approximate one is from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benchmarks import cases, ratios, worker_pool
from benchmarks.contender import Call, Contender, Tensors, inputs, prepare
from benchmarks.contenders import named
from benchmarks.ratios import REFERENCE
from benchmarks.report import Options, Report, Row, chosen, reason
from benchmarks.timing import Measurement, Timing, measure

DEFAULT = (
    *(REFERENCE, "sdpa-cudnn", "sdpa-efficient", "flex", "flash-attn"),
    *(
        "flash-attn-3",
        "flash-attn-4",
        "flashinfer",
        "xformers",
        "sageattention",
        "flashvar-cuda",
        "flashvar-sm80",
        "flashvar-triton",
    ),
)
_SIDE: Final = 8192
_PRODUCT: Final = "product"


@dataclass(frozen=True)
class Prepared:
    """Works that were called once: calls by name, distances from the first exact one, why not."""

    calls: dict[str, Call]
    distances: dict[str, float]
    skipped: dict[str, str]


def run(options: Options) -> Report:
    """Times the chosen cells on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown cell or contender.
    """
    return report(cases.attention(), options)


def report(cells: Sequence[cases.Cell], options: Options) -> Report:
    """Times those of the cells that the options choose.

    Raises:
        BenchmarkError: for an unknown cell or contender.
    """
    contenders = tuple(named(options.contenders or DEFAULT))
    by_name = {cell.name: cell for cell in cells}
    names = chosen(list(by_name), options.only)
    rows = worker_pool.run(
        names,
        options.processes,
        prepare=partial(_prepare, by_name, contenders),
        measure=partial(_measure, by_name, options.seconds),
        lost=partial(_lost, by_name, contenders),
    )
    ran = {row["contender"] for row in rows if "tflops" in row}
    timed = [name for name in contenders if name in ran]
    return Report(
        rows=rows,
        columns=("cell (TFLOP/s)", *map(ratios.marked, timed), "cuda / flash", "cuda / best"),
        lines=[_line(name, rows, timed) for name in names],
        closing=[ratios.summary(rows), ratios.to_best_peers(rows), ratios.differences(rows)],
    )


_held: dict[str, Prepared] = {}  # in the process that prepared them, until they are measured


def _prepare(
    cells: Mapping[str, cases.Cell], contenders: Sequence[str], names: Sequence[str]
) -> None:
    for name in names:
        works = {who: (one, cells[name]) for who, one in named(contenders).items()}
        _held[name] = ready(works)


def _measure(cells: Mapping[str, cases.Cell], seconds: float, name: str) -> list[Row]:
    cell, prepared = cells[name], _held.pop(name)
    beside = {_PRODUCT: _product()} if cell.product and prepared.calls else {}
    measured = measure({**prepared.calls, **beside}, seconds=seconds)
    return _rows(cell, measured, prepared)


def _product() -> Call:
    """What the card could do: a product of two square matrices in bf16."""
    a, b = (torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: (a @ b,)


def _lost(
    cells: Mapping[str, cases.Cell], contenders: Sequence[str], name: str, why: str
) -> list[Row]:
    return _rows(cells[name], Measurement({}, {}), Prepared({}, {}, dict.fromkeys(contenders, why)))


def ready(works: Mapping[str, tuple[Contender, cases.Cell]]) -> Prepared:
    """Calls each work once, which compiles what it needs, and compares the results.

    Works that are the same cell have the same tensors.
    """
    made: dict[cases.Cell, tuple[Tensors, torch.Tensor]] = {}
    calls: dict[str, Call] = {}
    results: dict[str, Tensors] = {}
    skipped: dict[str, str] = {}
    for name, (contender, cell) in works.items():
        if cell not in made:
            made[cell] = inputs(cell, torch.device("cuda"))
        tensors, grad_out = made[cell]
        try:
            call = prepare(contender, cell, tensors, grad_out)
            results[name] = call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # a peer that cannot run this cell is a result, not a failure
            skipped[name] = reason(error)
    return Prepared(calls, _distances(results), skipped)


def describe(cell: cases.Cell) -> Row:
    """The columns that say what a cell is."""
    return {
        "direction": cell.direction,
        "dtype": cell.dtype,
        "batch": cell.batch,
        "seqlen": cell.seqlen,
        **({"seqlen_k": cell.seqlen_k} if cell.seqlen_k else {}),
        "heads": cell.heads,
        "heads_kv": cell.heads_kv,
        "head_dim": cell.head_dim,
        "causal": cell.causal,
    }


def describe_timing(timing: Timing) -> Row:
    """The columns that say how long something took."""
    return {
        "median_ms": timing.median_ms,
        "low_ms": timing.low_ms,
        "high_ms": timing.high_ms,
        "rounds": timing.rounds,
    }


def number(value: object, spec: str) -> str:
    """A cell of the table; "-" where there is no number."""
    return format(value, spec) if isinstance(value, float) else "-"


def _rows(cell: cases.Cell, measured: Measurement, prepared: Prepared) -> list[Row]:
    timings = dict(measured.timings)
    product = timings.pop(_PRODUCT, None)
    beside = {} if product is None else {"product_tflops": 2.0 * _SIDE**3 / product.median_ms / 1e9}
    rates = {name: cell.operations / timing.median_ms / 1e9 for name, timing in timings.items()}
    compared = ratios.to_peers(rates)
    rows: list[Row] = [
        {
            "cell": cell.name,
            "contender": name,
            **describe(cell),
            **describe_timing(timing),
            "tflops": rates[name],
            "difference_to_reference": prepared.distances[name],
            **({"approximate": True} if name in ratios.APPROXIMATE else {}),
            **compared[name],
            **beside,
            **measured.clocks,
        }
        for name, timing in timings.items()
    ]
    return rows + [
        {"cell": cell.name, "contender": name, **describe(cell), "skipped": why}
        for name, why in prepared.skipped.items()
    ]


def _distances(results: Mapping[str, Tensors]) -> dict[str, float]:
    """Relative distance of each work's results from the first exact one's: of its tensors the most.

    Not a number where there is none to compare with.
    """
    exact = [name for name in results if name not in ratios.APPROXIMATE]
    if not exact:
        return dict.fromkeys(results, float("nan"))
    first = [tensor.float() for tensor in results[exact[0]]]
    return {
        name: max(
            float((tensor.float() - expected).norm() / expected.norm())
            for tensor, expected in zip(tensors, first, strict=True)
        )
        if all(t.shape == e.shape for t, e in zip(tensors, first, strict=True))
        else float("nan")
        for name, tensors in results.items()
    }


def _line(cell: str, rows: Sequence[Row], contenders: Sequence[str]) -> tuple[str, ...]:
    by_name = {row["contender"]: row for row in rows if row["cell"] == cell}
    cuda = by_name.get("flashvar-cuda", {})
    return (
        cell,
        *(number(by_name[name].get("tflops"), ".0f") for name in contenders),
        number(cuda.get("to_reference"), ".2f"),
        number(cuda.get("to_best"), ".2f"),
    )
