"""Writes what `flashvar doctor --bench` compares with: `python -m benchmarks.recorded`.

Of the results in this folder, per GPU the newest attention run without a forced architecture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks import result_file
from flashvar.cli.speed import OURS, RECORDED, SCHEMA
from flashvar.ops.attention.spec import SPEC
from flashvar.ops.attention.speed import CELLS, DTYPE, PEERS, SEQLEN, AttentionCell

RESULTS: Final = Path(__file__).with_name("results")
_COMPILED: Final = "flashvar-cuda"


def derive(files: Iterable[Path]) -> dict[str, Any]:
    """The document of `files`."""
    newest: dict[str, dict[str, Any]] = {}
    for file in files:
        run = result_file.read(file)
        environment = run["environment"]
        if run["benchmark"] != "attention" or "FLASHVAR_FORCE_ARCH" in environment["settings"]:
            continue
        found = {cell.name: _rates(run["rows"], cell) for cell in CELLS}
        cells = {name: rates for name, rates in found.items() if OURS in rates}
        device = environment["device"]
        entry = {
            "time": environment["time"],
            "torch": environment["versions"]["torch"],
            "driver": device["driver"],
            "cells": {SPEC.name: cells},
        }
        before = newest.get(device["name"])
        if cells and (before is None or before["time"] < entry["time"]):
            newest[device["name"]] = entry
    return {"schema": SCHEMA, "gpus": dict(sorted(newest.items()))}


def _rates(rows: list[dict[str, Any]], cell: AttentionCell) -> dict[str, float]:
    names = {_COMPILED: OURS, **{name: name for name in PEERS}}
    wanted = {
        "direction": cell.direction,
        "dtype": DTYPE,
        "batch": cell.batch,
        "seqlen": SEQLEN,
        "heads": cell.heads,
        "heads_kv": cell.heads,
        "head_dim": cell.head_dim,
        "causal": True,
    }
    return {
        names[row["contender"]]: round(row["tflops"], 1)
        for row in rows
        if row["contender"] in names
        and "tflops" in row
        and all(row.get(key) == value for key, value in wanted.items())
    }


if __name__ == "__main__":
    document = derive(sorted(RESULTS.glob("*.json")))
    Path(str(RECORDED)).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{RECORDED.name}: {', '.join(document['gpus'])}")
