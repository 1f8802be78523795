"""Attention, both directions: flashvar's backends beside torch's own kernels, on the same tensors.

Rate = operations of the result / median time, in TFLOP/s. `difference_to_reference` is the relative
distance (Frobenius norm) of a contender's results from the first one's: it tells that the same
function was timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks import cases, ratios
from benchmarks.contenders import CONTENDERS, REFERENCE, Call, Contender, Tensors, inputs, prepare
from benchmarks.report import BenchmarkError, Options, Report, Row, chosen, reason
from benchmarks.timing import Measurement, Timing, measure

DEFAULT = (REFERENCE, "sdpa-cudnn", "flashvar-cuda", "flashvar-triton")


def run(options: Options) -> Report:
    """Times the chosen cells on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown cell or contender.
    """
    contenders = named(options.contenders or DEFAULT)
    cells = {cell.name: cell for cell in cases.attention()}
    names = chosen(list(cells), options.only)
    rows: list[Row] = []
    for name in names:
        cell = cells[name]
        works = {who: (contender, cell) for who, contender in contenders.items()}
        rows += _rows(cell, *time(works, options.seconds))
    return Report(
        rows=rows,
        columns=("cell (TFLOP/s)", *contenders, "cuda / flash", "cuda / best"),
        lines=[_line(name, rows, contenders) for name in names],
        closing=ratios.summary(rows),
    )


def named(names: Sequence[str]) -> dict[str, Contender]:
    """The contenders of these names.

    Raises:
        BenchmarkError: for one that is not known.
    """
    for name in names:
        if name not in CONTENDERS:
            raise BenchmarkError(
                f"--contender must be one of {', '.join(CONTENDERS)}, got {name!r}: correct it"
            )
    return {name: CONTENDERS[name] for name in names}


def time(
    works: Mapping[str, tuple[Contender, cases.Cell]], seconds: float
) -> tuple[Measurement, dict[str, float], dict[str, str]]:
    """Times of works by name, distances from the first one's results, and why some have neither.

    Works that are the same cell have the same tensors. With 0 seconds each is called once, which
    compiles what it needs, and not timed.
    """
    made: dict[cases.Cell, tuple[Tensors, torch.Tensor]] = {}
    calls: dict[str, Call] = {}
    results: dict[str, Tensors] = {}
    skipped: dict[str, str] = {}
    for name, (contender, cell) in works.items():
        tensors, grad_out = made.setdefault(cell, inputs(cell, torch.device("cuda")))
        try:
            call = prepare(contender, cell, tensors, grad_out)
            results[name] = call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # a peer that cannot serve this cell is a result, not a failure
            skipped[name] = reason(error)
    distances = _distances(results)
    results.clear()
    if seconds == 0:
        skipped |= dict.fromkeys(calls, "called once, not timed (--seconds 0)")
        calls.clear()
    measured = measure(calls, seconds=seconds) if calls else Measurement({}, {})
    return measured, distances, skipped


def describe(cell: cases.Cell) -> Row:
    """The columns that say what a cell is."""
    return {
        "direction": cell.direction,
        "dtype": cell.dtype,
        "batch": cell.batch,
        "seqlen": cell.seqlen,
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


def number(value: object, form: str) -> str:
    """A cell of the table; "-" where there is no number."""
    return format(value, form) if isinstance(value, float) else "-"


def _rows(
    cell: cases.Cell,
    measured: Measurement,
    distances: Mapping[str, float],
    skipped: Mapping[str, str],
) -> list[Row]:
    timings = measured.timings
    rates = {name: cell.operations / timing.median_ms / 1e9 for name, timing in timings.items()}
    compared = ratios.to_peers(rates)
    rows: list[Row] = [
        {
            "cell": cell.name,
            "contender": name,
            **describe(cell),
            **describe_timing(timing),
            "tflops": rates[name],
            "difference_to_reference": distances[name],
            **compared[name],
            **measured.clocks,
        }
        for name, timing in timings.items()
    ]
    return rows + [
        {"cell": cell.name, "contender": name, **describe(cell), "skipped": why}
        for name, why in skipped.items()
    ]


def _distances(results: Mapping[str, Tensors]) -> dict[str, float]:
    """Relative distance of each work's results from the first one's, the largest of its tensors."""
    if not results:
        return {}
    first = [tensor.float() for tensor in next(iter(results.values()))]
    return {
        name: max(
            float((tensor.float() - expected).norm() / expected.norm())
            for tensor, expected in zip(tensors, first, strict=True)
        )
        if all(t.shape == e.shape for t, e in zip(tensors, first, strict=True))
        else float("nan")
        for name, tensors in results.items()
    }


def _line(cell: str, rows: Sequence[Row], contenders: Mapping[str, Contender]) -> tuple[str, ...]:
    by_name = {row["contender"]: row for row in rows if row["cell"] == cell}
    cuda = by_name.get("flashvar-cuda", {})
    return (
        cell,
        *(number(by_name[name].get("tflops"), ".0f") for name in contenders),
        number(cuda.get("to_reference"), ".2f"),
        number(cuda.get("to_best"), ".2f"),
    )
