"""What a run of the GPU tests leaves behind: where it ran, every case, and what was not run."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import result_file

Record = list[dict[str, Any]]

# Facts about a system that may differ between two runs on it.
_OF_ONE_RUN: Final = frozenset({"visible_devices", "triton_cache"})


def write(target: Path, about: dict[str, Any], record: Record) -> None:
    """Write the record of one run; `about` says which part of the tests it was."""
    document = {
        **about,
        "forced_architecture": os.environ.get("FLASHVAR_FORCE_ARCH"),
        **_environment(),
        **summary(record),
        "cases": record,
    }
    result_file.write(target, document)


def backend_of(case: Mapping[str, Any]) -> str:
    """The backend whose kernels a case is about; "other" where it is about none alone."""
    if "backend" in case:
        return str(case["backend"])
    # Older records say it in the names of parametrized cases alone.
    name = case["case"].rpartition("/")[2].partition("::")[2]
    words = name.rpartition("[")[2].removesuffix("]").split("-")
    return next((word for word in ("cuda", "triton") if word in words), "other")


def summary(record: Record) -> dict[str, Any]:
    """Counts by outcome, by file and backend, and by reason of what was not run."""
    by_file: dict[str, Counter[str]] = {}
    for case in record:
        path = case["case"].rpartition("/")[2].partition("::")[0]
        row = f"{path} {backend_of(case)}"
        by_file.setdefault(row, Counter())[case["outcome"]] += 1
    return {
        "counts": dict(Counter(case["outcome"] for case in record)),
        "counts_by_file": {name: dict(counts) for name, counts in sorted(by_file.items())},
        "not_run": dict(Counter(c.get("reason") for c in record if c["outcome"] == "skipped")),
    }


def failures(record: Record) -> str:
    """What failed, the same reason once: how often, and the first cases."""
    by_reason: dict[str, list[str]] = {}
    for case in record:
        if case["outcome"] == "failed":
            # Numbers differ from case to case where the reason is one.
            alike = re.sub(r"[0-9][0-9.e+-]*", "N", case.get("reason") or "no reason")
            by_reason.setdefault(alike, []).append(f"{case['case']}: {case.get('reason')}")
    paragraphs = (
        "\n  ".join([f"{len(cases)} x {reason}", *cases[:4]])
        for reason, cases in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    )
    return "\n".join(paragraphs)


def merge(parts: list[Path]) -> dict[str, Any]:
    """One document of the shards of one run.

    Raises:
        ValueError: the shards ran other binaries or on different systems.
    """
    documents = [result_file.read(part) for part in parts]
    for document in documents:
        _check_equal(documents[0], document)
    record = sorted(
        (case for document in documents for case in document["cases"]), key=lambda c: c["case"]
    )
    return {
        **documents[0],
        "shard": f"{len(documents)} together",
        "left_to_other_shards": 0,
        "ended_early": any(document["ended_early"] for document in documents),
        **summary(record),
        "cases": record,
    }


def complete(before: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The document of an interrupted run and of one that ran what it had not.

    Raises:
        ValueError: the two runs are of other binaries, another system or other tests.
    """
    _check_equal(before, rest, "chosen")
    record = sorted([*before["cases"], *rest["cases"]], key=lambda case: case["case"])
    return {
        **before,
        "runs": before.get("runs", 1) + 1,
        "ended_early": rest["ended_early"],
        **summary(record),
        "cases": record,
    }


def failed_files(record: Record) -> list[str]:
    """The test files in which a case failed."""
    return sorted({_file(case) for case in record if case["outcome"] == "failed"})


def replace_failed(before: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """The document `before` with its failed files as they ran in `again`, and what had failed.

    Raises:
        ValueError: the two runs are of other binaries or another system.
    """
    _check_equal(before, again)
    files = failed_files(before["cases"])
    kept = [case for case in before["cases"] if _file(case) not in files]
    record = sorted(kept + again["cases"], key=lambda case: case["case"])
    failed = [case for case in before["cases"] if case["outcome"] == "failed"]
    history = {
        "files": files,
        "had_failed": [f"{case['case']}: {case.get('reason')}" for case in failed],
    }
    return {
        **before,
        "ran_again": [*before.get("ran_again", ()), history],
        **summary(record),
        "cases": record,
    }


def _file(case: Mapping[str, Any]) -> str:
    return str(case["case"]).partition("::")[0]


def _check_equal(one: Mapping[str, Any], other: Mapping[str, Any], *names: str) -> None:
    """Raises ValueError where two runs are of other binaries or systems, or differ by `names`."""
    for name in ("binaries", "system", "forced_architecture", *names):
        expected, found = (_compared(run[name]) for run in (one, other))
        if expected != found:
            raise ValueError(f"{name}: expected {expected} as recorded, found {found}")


def _compared(value: Any) -> Any:
    """What two runs must have in common."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if name not in _OF_ONE_RUN}


def _environment() -> dict[str, Any]:
    from flashvar.binaries import registry
    from flashvar.machine.system import gather

    return {
        "system": asdict(gather()),
        "binaries": [
            {
                "architecture": binary.kind.name,
                "code_kinds": binary.manifest.code_kinds,
                "version": binary.manifest.version,
                "source": asdict(binary.manifest.source),
                "toolkit": asdict(binary.manifest.toolkit),
            }
            for binary in registry.installed().binaries
        ],
    }
