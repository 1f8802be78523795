"""What `import flashvar` adds to a bare interpreter, and whether it drags torch or triton in."""

from __future__ import annotations

import subprocess
import sys
from statistics import median, quantiles
from typing import Final

from benchmarks.report import BenchmarkError, Options, Report, Row, chosen

_STATEMENTS: Final = ("import flashvar",)
_HEAVY: Final = ("torch", "triton", "numpy")
_ROUNDS: Final = 25
# Timed inside of the new interpreter: the time that starting one takes varies more than the import.
_CODE: Final = """\
import time
start, cpu = time.perf_counter(), time.process_time()
{statement}
print(1000 * (time.perf_counter() - start), 1000 * (time.process_time() - cpu))
import sys
print(*sys.modules)
"""


def run(options: Options) -> Report:
    """Imports in fresh interpreters, after one import that fills the file cache.

    Raises:
        BenchmarkError: when the import fails.
    """
    rows = [_statement(name) for name in chosen(_STATEMENTS, options.only)]
    return Report(
        rows=rows,
        columns=("statement (ms)", "median", "low", "high", "CPU", "heavy modules"),
        lines=[
            (
                str(row["statement"]),
                *(f"{row[key]:.1f}" for key in ("median_ms", "low_ms", "high_ms", "cpu_ms")),
                str(row["heavy_modules"] or "none"),
            )
            for row in rows
        ],
    )


def _statement(statement: str) -> Row:
    _, _, modules = _fresh(statement)
    times = [_fresh(statement)[:2] for _ in range(_ROUNDS)]
    milliseconds = [wall for wall, _ in times]
    fifths = quantiles(milliseconds, n=5, method="inclusive")
    return {
        "statement": statement,
        "median_ms": median(milliseconds),
        "low_ms": fifths[0],
        "high_ms": fifths[-1],
        "cpu_ms": median(cpu for _, cpu in times),
        "rounds": _ROUNDS,
        "heavy_modules": " ".join(name for name in _HEAVY if name in modules),
    }


def _fresh(statement: str) -> tuple[float, float, list[str]]:
    """Milliseconds of the statement in a new interpreter, of them on the CPU; what is loaded."""
    code = _CODE.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise BenchmarkError(
            f"expected {statement!r} to succeed, it ended with {done.returncode}: "
            f"{' '.join(last)}: install flashvar or set PYTHONPATH=src/python"
        )
    times, modules = done.stdout.splitlines()
    wall, cpu = map(float, times.split())
    return wall, cpu, modules.split()
