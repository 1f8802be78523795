"""How long the audit of one wheel takes, for every wheel in dist/."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.environment import ROOT
from benchmarks.report import BenchmarkError, Options, Report, Row, chosen

_DIST: Final = ROOT / "dist"
_ROUNDS: Final = 3


def run(options: Options) -> Report:
    """Audits every wheel, or those whose file names match: the whole command, Python's start too.

    Raises:
        BenchmarkError: when there are no wheels, or the audit of one cannot be made.
    """
    wheels = {path.name: path for path in sorted(_DIST.glob("*.whl"))}
    if not wheels:
        raise BenchmarkError("expected wheels in dist/, found none: run `nox -s wheels -- all`")
    rows = [_case(wheels[name]) for name in chosen(list(wheels), options.only)]
    return Report(
        rows=rows,
        columns=("wheel", "median (s)", "MB", "kernels", "findings"),
        lines=[
            (
                str(row["wheel"]),
                f"{row['median_s']:.2f}",
                f"{row['megabytes']:.1f}",
                str(row["kernels"]),
                str(row["findings"]),
            )
            for row in rows
        ],
    )


def _case(wheel: Path) -> Row:
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        found = _audit(wheel)
        seconds.append(time.perf_counter() - start)
    return {
        "wheel": wheel.name,
        "median_s": median(seconds),
        "rounds": _ROUNDS,
        "megabytes": wheel.stat().st_size / 1e6,
        "kernels": sum(row["kernels"] for row in found["ledger"]),  # device functions
        "findings": len(found["findings"]),
    }


def _audit(wheel: Path) -> dict[str, Any]:
    """What the command says of the wheel, as it does in JSON."""
    command = [sys.executable, "-m", "flashvar_factory", "--root", str(ROOT), "audit", "--json"]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=False)
    try:
        (report,) = json.loads(done.stdout)
    except ValueError as error:
        raise BenchmarkError(
            f"expected an audit of {wheel.name}, it ended with {done.returncode}: set "
            f"PYTHONPATH=src/python, pip install what nox -s audit has. {done.stderr.strip()}"
        ) from error
    return dict(report)
