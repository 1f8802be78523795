"""What the audit has against a wheel of a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from unittest.mock import patch

from fake_artifacts import Wheel
from planted import Plant, expected

from flashvar_factory import audit
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.inspect import cubin

Fault = tuple[Wheel | Plant, str]  # how it is planted, and a part of the sentence that reports it
SECONDS = 20  # for what is to be refused at once: the audit of a whole wheel takes 0.1 s


def faults(path: Path, project: Expectations | None = None) -> list[str]:
    """Its findings as sentences, each of a check that the report lists."""
    with patch.object(cubin, "read", _read_once):
        report = audit.audit(path, project)
    assert {finding.check for finding in report.findings} <= set(report.checks)
    return [str(finding) for finding in report.findings]


@cache
def _of_bytes(
    data: bytes, where: str, read: Callable[..., cubin.Cubin] = cubin.read
) -> cubin.Cubin:
    return read(memoryview(data), where)


def _read_once(data: memoryview, where: str) -> cubin.Cubin:
    """What reading it gives: most wheels of these tests hold the same device code."""
    return _of_bytes(bytes(data), where)


def rows(**tables: Mapping[str, Fault]) -> dict[str, Fault]:
    """The faults of several tables, each under its table's name and its own."""
    return {
        f"{table}: {name}": fault
        for table, found in tables.items()
        for name, fault in found.items()
    }


def check_found_at_once(plant: Wheel | Plant, sentence: str, folder: Path) -> None:
    """The audit finds the fault, says so in one line that prints, and does not hang."""
    path = plant.write(folder) if isinstance(plant, Wheel) else plant(folder)
    began = time.process_time()
    found = faults(path, expected())
    assert any(sentence in fault for fault in found), found
    assert time.process_time() - began < SECONDS
    assert all(fault.isprintable() for fault in found)
