"""The notes of a release: its section of the changelog, its GPU records and its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Final

from flashvar.binaries.manifest import Manifest
from flashvar_factory.config import toml_table
from flashvar_factory.errors import ReleaseError
from flashvar_factory.release.gpu_runs import GpuRun

FILE: Final = "CHANGELOG.md"
_HEADING: Final = re.compile(r"^## +\[?v?(?P<version>[^\]\s]+)\]?(?P<rest>.*)$")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


def changes(root: Path, release: str) -> str:
    """What the changelog says of a version; ReleaseError where there is no dated part of it."""
    path = root / FILE
    lines = toml_table.read(path).splitlines() if path.is_file() else []
    headings = [(at, match) for at, line in enumerate(lines) if (match := _HEADING.match(line))]
    ends = [*(at for at, _ in headings), len(lines)][1:]
    spans = [
        (at, match["rest"], "\n".join(lines[at + 1 : end]).strip())
        for (at, match), end in zip(headings, ends, strict=True)
        if match["version"] == release
    ]
    if len(spans) > 1:
        raise ReleaseError(
            f"{FILE}: expected one heading of {release}, found {len(spans)}; make one part of them"
        )
    for at, rest, text in spans:
        if text and _is_dated(rest):
            return text
        raise ReleaseError(
            f"{FILE}: expected a date in the heading of {release} and text below it, found "
            f"{lines[at]!r}{'' if text else ' and no text'}; ## {release} - 2026-01-31"
        )
    found = ", ".join(match["version"] for _, match in headings) or "none"
    raise ReleaseError(
        f"{FILE}: expected the heading ## {release} - <date>, found headings of {found}; name the "
        "part Unreleased after the version"
    )


def _is_dated(rest: str) -> bool:
    """Whether the rest of a heading has a day that there is."""
    for found in _DATE.findall(rest):
        try:
            date.fromisoformat(found)
        except ValueError:
            continue
        return True
    return False


def text(
    changed: str,
    revision: str,
    records: Mapping[str, Sequence[GpuRun]],
    released: Iterable[Manifest],
    hashes: Mapping[str, str],
) -> str:
    """The notes as Markdown; of what is `released` they say what ran nowhere."""
    lines = [changed, "", "## Tried on", ""]
    lines.append(f"This release is commit {revision}. Its kernels ran on these GPUs:")
    lines.append("")
    for need, found in records.items():
        lines += [f"* {_what(need)}: {_run(need, record)}" for record in found]
    for one in released:
        name, platform = one.kind.name, one.platform
        on_own = (record for record in records.get(name, ()) if record.native)
        if not any(record.platform == platform for record in on_own):
            lines.append(f"* the machine code of {name} for {platform}: on no GPU yet")
    lines += ["", "## Files", "", "```text"]
    lines += [f"{digest}  {name}" for name, digest in sorted(hashes.items())]
    return "\n".join([*lines, "```", ""])


def _what(need: str) -> str:
    return need if need.startswith("sm_") else need.capitalize()


def _run(need: str, record: GpuRun) -> str:
    backend = "cuda" if need.startswith("sm_") else need
    translated = need == record.kind and not record.native
    how = ", whose driver translated its PTX" if translated else ""
    binaries = [one for one in record.binaries if one.kind == need] or record.binaries
    commits = ", ".join(dict.fromkeys((one.revision or "")[:12] for one in binaries))
    of = f" of {', '.join(record.chosen)}" if record.chosen else ""
    return (
        f"{record.passed[backend]:,} tests{of} passed on {record.device}{how}, at commit {commits} "
        f"(`{record.file}`)"
    )
