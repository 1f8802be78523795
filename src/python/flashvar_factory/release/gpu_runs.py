"""Reads the records of GPU runs: what `nox -s gpu -- --results FILE` wrote.

A record has the device, the binaries with their commit, and the outcome of every test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flashvar.binaries.kinds import Architecture, BinaryKind
from flashvar.errors import FlashvarError
from flashvar_factory.config.schema import Config
from flashvar_factory.inspect import json_text

# By convention of a project, as its sources are.
TESTS: Final = "tests/gpu"
FOLDER: Final = Path(TESTS, "results")
CUDA: Final = "cuda"
TRITON: Final = "triton"
_FINE: Final = ("passed", "skipped")  # outcomes of a test


@dataclass(frozen=True)
class Binary:
    """A binary that was installed during the run."""

    kind: str
    code_kinds: tuple[str, ...]
    version: str
    revision: str | None
    dirty: object  # False if it was built from a commit without changes
    sources: str  # their hash, as manifests have it
    toolkit: str


@dataclass(frozen=True)
class GpuRun:
    """One run of tests/gpu."""

    file: str  # from the root
    device: str
    platform: str
    kind: str  # of the binary that ran: the one made for the device, or the forced one
    forced: bool
    native: bool  # it was made for the device; else its driver translated the PTX
    complete: bool  # no test of what was chosen was left to another run
    chosen: tuple[str, ...]  # pytest arguments that chose a part of the tests; empty: all ran
    seed: int | None  # of random inputs
    passed: Mapping[str, int]  # tests by backend
    tests: Mapping[tuple[str, str], int]  # those by file and backend, but of Triton's kernels
    failed: int
    added_up: bool  # the outcomes of all tests are the sums of those of each file
    binaries: tuple[Binary, ...]

    @property
    def whole(self) -> bool:
        """Whether it is of all tests."""
        return self.complete and not self.chosen

    @property
    def files(self) -> frozenset[str]:
        """Those of tests that passed, those of Triton's kernels aside."""
        return frozenset(file for file, _ in self.tests)


def read(root: Path, config: Config) -> list[GpuRun]:
    """Every record of the checkout, by name; other files of its folder are passed over."""
    return [
        one
        for path in sorted((root / FOLDER).glob("*.json"))
        if path.is_file()
        and (one := _read(path, path.relative_to(root).as_posix(), config)) is not None
    ]


def _read(path: Path, name: str, config: Config) -> GpuRun | None:
    try:
        found = json_text.parse(path.read_bytes(), name)
        system = found["system"]
        device, forced = system["devices"][0], found.get("forced_architecture")
        passed: Counter[str] = Counter()
        total: Counter[str] = Counter()
        tests = {}
        for row, counts in found["counts_by_file"].items():
            file, _, backend = row.rpartition(" ")
            outcomes = _outcomes(counts)
            total += outcomes
            passed[backend] += outcomes["passed"]
            if outcomes["passed"] and backend != TRITON:
                tests[file, backend] = outcomes["passed"]
        stated = _outcomes(found["counts"])
        own = config.made_for(Architecture(*device["capability"]))
        ran = BinaryKind(own) if _text(forced) is None else BinaryKind.parse(forced)
        return GpuRun(
            file=name,
            device=str(device["name"]),
            platform=str(system["platform"]),
            kind=ran.name,
            forced=forced is not None,
            native=ran.architecture.capability == own.capability,
            complete=found.get("left_to_other_shards") == 0
            and not found.get("ended_early")
            and not system["interpreted"],
            chosen=tuple(map(str, found.get("chosen") or ())),
            seed=found.get("seed") if type(found.get("seed")) is int else None,
            passed=passed,
            tests=tests,
            failed=sum(
                count for outcome, count in (stated | total).items() if outcome not in _FINE
            ),
            added_up=stated == total,
            binaries=tuple(map(_binary, found["binaries"])),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, FlashvarError):
        return None  # of another kind of run


def _outcomes(counts: Mapping[str, Any]) -> Counter[str]:
    """How many tests had each outcome."""
    for count in counts.values():
        if type(count) is not int or count < 0:
            raise ValueError(f"expected numbers of tests, found {count!r}")
    return Counter(dict(counts))


def _binary(row: Mapping[str, Any]) -> Binary:
    made = row["source"]
    return Binary(
        kind=str(row["architecture"]),
        code_kinds=tuple(map(str, row["code_kinds"])),
        version=str(row["version"]),
        revision=_text(made["revision"]),
        dirty=made["dirty"],
        sources=str(made["hash"]),
        toolkit=str(row["toolkit"].get("ptxas") or row["toolkit"]["version"]),
    )


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"expected text, found {value!r}")
