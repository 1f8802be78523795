"""Special calls beside plain ones: grouped key heads, packed sequences, features, other head dims.

Rates count what a call's own result needs, for padded sequences the padding too: at a ratio of 1
the special call does as many useful operations a second as a plain call full of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

from benchmarks import cases, worker_pool
from benchmarks.attention import Prepared, describe, describe_timing, number, ready
from benchmarks.contenders import named
from benchmarks.ratios import REFERENCE
from benchmarks.report import Options, Report, Row, chosen
from benchmarks.timing import Measurement, measure

Pairs: TypeAlias = Mapping[str, Mapping[str, cases.Cell]]

DEFAULT = (REFERENCE, "flashvar-cuda", "flashvar-triton")


def run(options: Options) -> Report:
    """Times the chosen pairs on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown pair or contender.
    """
    contenders = tuple(named(options.contenders or DEFAULT))
    pairs = dict(cases.shapes())
    names = chosen(list(pairs), options.only)
    rows = worker_pool.run(
        names,
        options.processes,
        prepare=partial(_prepare, pairs, contenders),
        measure=partial(_measure, pairs, contenders, options.seconds),
        lost=partial(_lost, pairs, contenders),
    )
    shapes = {name: next(iter(pair)) for name, pair in pairs.items()}
    special = {
        (row["cell"], row["contender"]): row
        for row in rows
        if row["shape"] == shapes[str(row["cell"])]
    }
    return Report(
        rows=rows,
        columns=("rate of special call / plain call (time of plain / special)", *contenders),
        lines=[(name, *(_shown(special[name, who]) for who in contenders)) for name in names],
    )


_held: dict[str, Prepared] = {}  # in the process that prepared them, until they are measured


def _prepare(pairs: Pairs, contenders: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        _held[name] = ready(
            {
                f"{who} {shape}": (one, cell)
                for who, one in named(contenders).items()
                for shape, cell in pairs[name].items()
            }
        )


def _measure(pairs: Pairs, contenders: Sequence[str], seconds: float, name: str) -> list[Row]:
    prepared = _held.pop(name)
    measured = measure(prepared.calls, seconds=seconds)
    return _rows(name, pairs[name], contenders, measured, prepared.skipped)


def _lost(pairs: Pairs, contenders: Sequence[str], name: str, why: str) -> list[Row]:
    skipped = {f"{who} {shape}": why for who in contenders for shape in pairs[name]}
    return _rows(name, pairs[name], contenders, Measurement({}, {}), skipped)


def _rows(
    name: str,
    pair: Mapping[str, cases.Cell],
    contenders: Sequence[str],
    measured: Measurement,
    skipped: Mapping[str, str],
) -> list[Row]:
    rows: list[Row] = []
    for who in contenders:
        both: list[Row] = []
        for shape, cell in pair.items():
            row: Row = {"cell": name, "contender": who, "shape": shape, **describe(cell)}
            timing = measured.timings.get(f"{who} {shape}")
            if timing is None:
                row["skipped"] = skipped[f"{who} {shape}"]
            else:
                row |= describe_timing(timing)
                row["tflops"] = cell.operations / timing.median_ms / 1e9
                row |= dict(measured.clocks)
            both.append(row)
        special, plain = both
        if "skipped" not in special and "skipped" not in plain:
            special["to_plain"] = _number(special, "tflops") / _number(plain, "tflops")
            special["faster"] = _number(plain, "median_ms") / _number(special, "median_ms")
        rows += both
    return rows


def _number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, float)
    return value


def _shown(row: Row) -> str:
    if "to_plain" not in row:
        return "-"
    return f"{number(row['to_plain'], '.3f')} ({number(row['faster'], '.2f')}x)"
