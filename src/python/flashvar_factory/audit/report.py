"""The report of an audit, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flashvar.binaries.manifest import KernelRow
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.audit.ledger import Key, Row
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.inspect.fatbin import SASS
from flashvar_factory.inspect.plain_text import plain

_UNKNOWN = "not known"


@dataclass(frozen=True)
class Report:
    """The outcome for one wheel."""

    wheel: Wheel
    findings: tuple[Finding, ...]
    ledger: dict[Key, Row]
    budget: int | None  # bytes; None: no limit
    checks: tuple[str, ...]  # the names of the checks that were made

    @property
    def passed(self) -> bool:
        """Whether there is nothing against the wheel."""
        return not self.findings

    @property
    def architectures(self) -> tuple[str, ...]:
        """What its device code is for, e.g. sm_90a, and compute_80 for PTX."""
        return tuple(dict.fromkeys(key.architecture for key in self.ledger if key.kind != "host"))

    @property
    def spilling(self) -> tuple[KernelRow, ...]:
        """The kernels whose threads keep registers in memory, by their manifests."""
        rows = (row for _, manifest in pairs(self.wheel) for row in manifest.kernels)
        return tuple(row for row in rows if row.spill_bytes or row.stack_bytes)

    def to_json(self) -> str:
        """All of it as one document."""
        document = {
            "wheel": self.wheel.path.name,
            "bytes": self.wheel.size,
            "budget": self.budget,
            "passed": self.passed,
            "checks": self.checks,
            "architectures": self.architectures,
            "findings": [vars(finding) for finding in self.findings],
            "libraries": [
                {
                    "path": library.path,
                    "bytes": library.size,
                    "sha256": library.sha256,
                    "machine": library.dynamic.machine,
                    "needed": library.dynamic.needed,
                    "exported": len(library.dynamic.exported),
                    "images": len(library.images),
                }
                for library in self.wheel.libraries
            ],
            "ledger": [_entry(key, row) for key, row in self.ledger.items()],
            "spilling": [
                {
                    "kernel": row.name,
                    "registers": row.registers,
                    "spill_bytes": row.spill_bytes,
                    "stack_bytes": row.stack_bytes,
                }
                for row in self.spilling
            ],
        }
        return json.dumps(document, indent=1) + "\n"

    def text(self) -> str:
        """The same for people."""
        limit = f" of {self.budget:,}" if self.budget is not None else ""
        lines = [
            f"{self.wheel.path.name}: {self.wheel.size:,}{limit} bytes, "
            f"{len(self.wheel.entries)} files, "
            f"device code: {', '.join(self.architectures) or 'none'}"
        ]
        for library in self.wheel.libraries:
            closed = sum(image.kind == SASS and image.functions is None for image in library.images)
            lines.append(
                f"  {plain(library.path)}: {library.size:,} bytes, {library.dynamic.machine}, "
                f"{len(library.images)} images of device code"
                f"{f' ({closed} not decompressed: lz4)' if closed else ''}, "
                f"{len(library.dynamic.exported)} symbols exported, "
                f"needs {plain(', '.join(library.dynamic.needed)) or 'nothing'}"
            )
        if self.ledger:
            lines.append(f"  {'stored':>12} {'code':>12} {'kernels':>8}  of")
            lines += [
                f"  {row.stored:>12,} {row.code:>12,} {row.kernels:>8,}  {_words(key)}"
                for key, row in self.ledger.items()
            ]
        lines += [
            f"  {row.name} spills {row.spill_bytes} bytes of registers and has a stack of "
            f"{row.stack_bytes} bytes, per thread"
            for row in self.spilling
        ]
        lines += [f"  ERROR {finding}" for finding in self.findings]
        result = "passed" if self.passed else f"errors: {len(self.findings)}"
        lines.append(f"  {result} (checked: {', '.join(self.checks)})")
        return "\n".join(lines)


def _entry(key: Key, row: Row) -> dict[str, object]:
    fixed = {"architecture": key.architecture, "kind": key.kind, "op": key.function}
    return {**fixed, **dict(key.axes), **vars(row)}


def _words(key: Key) -> str:
    """A row's key in words."""
    if key.kind == "host":
        return "host code and data"
    axes = [f"{name}={value}" for name, value in key.axes]
    return " ".join([key.architecture, key.kind, key.function or _UNKNOWN, *axes])
