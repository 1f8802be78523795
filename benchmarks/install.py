"""How long pip takes to install a wheel that is already here: of dist/, and of build/peers/.

Nothing is downloaded, and nothing that a wheel requires is installed. Each goes into an empty
folder, the first time to fill the file cache. `pip download --no-deps --dest build/peers
PACKAGE==VERSION` puts the others there; benchmarks/peer_sizes.toml has their versions.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

from benchmarks.environment import ROOT
from benchmarks.report import BenchmarkError, Options, Report, Row, chosen

_FOLDERS: Final = (ROOT / "dist", ROOT / "build" / "peers")
_ROUNDS: Final = 3
_PIP: Final = (
    *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
    *("--no-deps", "--no-index", "--target"),
)


def run(options: Options) -> Report:
    """Installs every wheel, or those whose file names match.

    Raises:
        BenchmarkError: there is none, or pip refuses one.
    """
    wheels = {path.name: path for folder in _FOLDERS for path in sorted(folder.glob("*.whl"))}
    if not wheels:
        raise BenchmarkError("expected wheels in dist/, found none: run `nox -s wheels -- sm90`")
    rows = [_row(wheels[name]) for name in chosen(list(wheels), options.only)]
    return Report(
        rows=rows,
        columns=("wheel (s)", "median", "CPU", "MB"),
        lines=[
            (
                str(row["wheel"]),
                *(f"{row[key]:.1f}" for key in ("median_s", "cpu_s", "megabytes")),
            )
            for row in rows
        ],
    )


def _row(wheel: Path) -> Row:
    distribution, version = wheel.name.split("-")[:2]
    _ = _seconds(wheel)
    times = [_seconds(wheel) for _ in range(_ROUNDS)]
    return {
        "wheel": wheel.name,
        "distribution": distribution.replace("_", "-"),
        "version": version,
        "median_s": median(wall for wall, _ in times),
        "cpu_s": median(cpu for _, cpu in times),
        "rounds": _ROUNDS,
        "megabytes": wheel.stat().st_size / 1e6,
    }


def _seconds(wheel: Path) -> tuple[float, float]:
    """Wall clock and CPU time of pip, its start included."""
    with tempfile.TemporaryDirectory() as folder:
        start, before = perf_counter(), _cpu_of_children()
        done = subprocess.run([*_PIP, folder, str(wheel)], capture_output=True, text=True)
        took = perf_counter() - start, _cpu_of_children() - before
    if done.returncode != 0:
        raise BenchmarkError(f"pip refuses {wheel.name}: {done.stderr.strip()[-400:]}")
    return took


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
