"""How many bytes the wheels in dist/ are: as downloaded, as installed, and their libraries."""

from __future__ import annotations

import zipfile
from typing import Final

from benchmarks.environment import ROOT
from benchmarks.report import BenchmarkError, Options, Report, Row, chosen

_DIST: Final = ROOT / "dist"


def run(options: Options) -> Report:
    """Measures every wheel, or those whose file names match."""
    wheels = {path.name: path for path in sorted(_DIST.glob("*.whl"))}
    if not wheels:
        raise BenchmarkError("expected wheels in dist/, found none: run `nox -s wheels -- all`")
    rows: list[Row] = []
    for name in chosen(list(wheels), options.only):
        with zipfile.ZipFile(wheels[name]) as archive:
            entries = archive.infolist()
        libraries = [entry for entry in entries if entry.filename.endswith(".so")]
        rows.append(
            {
                "wheel": name,
                "distribution": name.partition("-")[0].replace("_", "-"),
                "version": name.split("-")[1],
                "platform": name.removesuffix(".whl").rpartition("-")[2],
                "bytes": wheels[name].stat().st_size,
                "installed_bytes": sum(entry.file_size for entry in entries),
                "library_bytes": sum(entry.file_size for entry in libraries),
                "library_compressed_bytes": sum(entry.compress_size for entry in libraries),
            }
        )
    return Report(
        rows=rows,
        columns=("wheel (bytes)", "download", "installed", "library"),
        lines=[
            (
                str(row["wheel"]),
                f"{row['bytes']:,}",
                f"{row['installed_bytes']:,}",
                f"{row['library_bytes']:,}",
            )
            for row in rows
        ],
    )
