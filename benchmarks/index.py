"""How long the package index of a thousand wheels takes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.report import BenchmarkError, Options, Report, Row, chosen

_WHEELS: Final = {"1000-wheels-1MB": (1000, 1_000_000), "1000-wheels-10kB": (1000, 10_000)}
_PROJECTS: Final = 20
_ROUNDS: Final = 3


def run(options: Options) -> Report:
    """Makes the wheels, then the index of them, from a warm file cache.

    Raises:
        BenchmarkError: when the factory cannot be imported.
    """
    rows = [_case(name) for name in chosen(tuple(_WHEELS), options.only)]
    return Report(
        rows=rows,
        columns=("index", "median (s)", "MB"),
        lines=[
            (str(row["case"]), f"{row['median_s']:.2f}", f"{row['megabytes']:.0f}") for row in rows
        ],
    )


def _case(name: str) -> Row:
    try:
        from flashvar_factory import index
        from flashvar_factory.inspect import archive
    except ImportError as error:
        raise BenchmarkError(f"{error}: set PYTHONPATH=src/python") from error

    count, size = _WHEELS[name]
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder, "dist")
        wheels.mkdir()
        for number in range(count):
            stem = f"kernels{number % _PROJECTS}-1.{number}"
            metadata = (
                f"Metadata-Version: 2.1\nName: {stem.partition('-')[0]}\nVersion: 1.{number}\n"
            )
            files = {
                f"{stem}.dist-info/METADATA": metadata.encode(),
                "kernels/library.so": os.urandom(size),  # machine code is compressed already
            }
            archive.write(wheels / f"{stem}-py3-none-any.whl", files, f"{stem}.dist-info")
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            index.write(wheels, Path(folder, "site"))
            seconds.append(time.perf_counter() - start)
    return {
        "case": name,
        "median_s": median(seconds),
        "rounds": _ROUNDS,
        "wheels": count,
        "megabytes": count * size / 1e6,
    }
