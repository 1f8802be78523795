"""torch's context_parallel on flashvar, from the records of tests/gpu/context_parallel.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks import result_file
from rates import NONE, day_and_commit
from support import RESULTS
from tables import table

_MEMORY: Final = re.compile(r" \d+GB.*")


def what_ran(root: Path) -> str:
    """One row per record: the cases with flashvar active, and those that its kernels computed."""
    rows = []
    for file, document in _records(root):
        cases = [case for case in document["cases"] if case["mode"] != "plain"]
        right = sum(case["right"] for case in cases)
        ours = sum(case["right"] and case["forwards_of_flashvar"] > 0 for case in cases)
        origin = day_and_commit(file, document["environment"], RESULTS)
        rows.append((_devices(document), f"{right} of {len(cases)}", ours, origin))
    return table(("GPUs", "right", "of these on flashvar's kernels", "run"), rows)


def times(root: Path) -> str:
    """Milliseconds of a forward with its backward: a row per record and rotation of the keys."""
    problems, origins, names = {}, [], {}
    found: list[tuple[str, str, dict[str, float]]] = []
    for file, document in _records(root):
        measured, devices = document["forward_and_backward"], _devices(document)
        problems[measured["problem"]] = None
        origins.append(f"{devices}: {day_and_commit(file, document['environment'], RESULTS)}")
        by: dict[str, dict[str, float]] = {}
        for one in measured["times"]:
            names[one["attention"]] = None
            by.setdefault(one["rotation"], {})[one["attention"]] = one["milliseconds"]
        found += [(devices, rotation, spent) for rotation, spent in by.items()]
    rows = [
        (devices, f"`{rotation}`", *(f"{spent[n]:.1f}" if n in spent else NONE for n in names))
        for devices, rotation, spent in found
    ]
    made = table(("GPUs", "rotation of the keys", *names), rows)
    return f"Milliseconds, medians: {'; '.join(problems)}. {'; '.join(origins)}.\n\n{made}"


def _records(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((root / RESULTS).glob("*.json")):
        found = result_file.read(path)
        if "forward_and_backward" in found:
            yield path.name, found


def _devices(document: dict[str, Any]) -> str:
    name = document["environment"]["device"]["name"].removeprefix("NVIDIA ")
    return f"{document['ranks']} {_MEMORY.sub('', name)}"
