"""The report of a release, as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flashvar_factory.release import members
from flashvar_factory.release.pipeline import Release, files_of
from flashvar_factory.release.steps import Outcome, digest

SCHEMA: Final = 2
NAME: Final = "report"
_COLUMNS: Final = ("bytes", "kind", "kernels", "file", "results")


def document(release: Release, done: Mapping[str, Outcome]) -> dict[str, Any]:
    """The release as plain data; the same files and findings give the same document."""
    built = {(build.kind.name, build.platform) for build, _ in release.builds}
    everything = {
        (name, platform)
        for name, target in release.config.targets.items()
        for platform in target.platforms
    }
    return {
        "schema": SCHEMA,
        "project": release.config.project.name,
        "version": release.version,
        "revision": release.revision,
        "missing": [
            *(f"wheel of {name} for {platform}" for name, platform in sorted(everything - built)),
            *(f"other kernels of {one.distribution}" for one in release.members if one.partial),
        ],
        "files": [_file(file, done) for file in files_of(done)],
        "steps": [
            {"name": name, "summary": one.summary, "facts": one.facts} for name, one in done.items()
        ],
    }


def _file(file: Path, done: Mapping[str, Outcome]) -> dict[str, Any]:
    member = members.read(file)
    row: dict[str, Any] = {
        "file": file.name,
        "bytes": file.stat().st_size,
        "sha256": digest(file),
        "distribution": member.distribution if member else None,
        "platform": member.platform if member else None,
        "results": {
            name.partition("/")[0]: one.summary
            for name, one in done.items()
            if one.facts.get("file") == file.name
        },
    }
    manifest = members.manifest_of(file)
    if manifest is not None:
        row |= {
            "kind": manifest.kind.name,
            "code": manifest.architecture.code,
            "code_kinds": list(manifest.code_kinds),
            "toolkit": f"{manifest.toolkit.compiler} {manifest.toolkit.machine_code}",
            "driver": manifest.minimum_driver.display,
            "library_bytes": manifest.library.bytes,
            "kernels": [kernel.name for kernel in manifest.kernels],
        }
    return row


def text(found: Mapping[str, Any]) -> str:
    """The document for a terminal."""
    lines = [f"{found['project']} {found['version']}, commit {found['revision']}", ""]
    lines += _aligned([_COLUMNS, *(_row(file) for file in found["files"])])
    lines += ["", *(f"{file['sha256']}  {file['file']}" for file in found["files"])]
    lines += ["", *(f"{step['name']}: {step['summary']}" for step in found["steps"])]
    lines += ["", summary(found)]
    return "\n".join(lines) + "\n"


def summary(found: Mapping[str, Any]) -> str:
    """The last sentence."""
    if found["missing"]:
        lacking = ", ".join(found["missing"])
        return f"Every requested file is checked; not requested, and not here: {lacking}."
    return "Every file of variants.toml is here and checked."


def _row(file: Mapping[str, Any]) -> tuple[str, ...]:
    results = "; ".join(f"{stage}: {text}" for stage, text in file["results"].items())
    kernels = str(len(file["kernels"])) if "kernels" in file else "-"
    size = f"{file['bytes']:,}"
    return size, file.get("kind", "-"), kernels, file["file"], results or "-"


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
