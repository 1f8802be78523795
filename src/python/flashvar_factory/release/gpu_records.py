"""Finds the records of GPU runs that a release relies on: those of the kernels that are released.

A record is what `nox -s gpu -- --results FILE` wrote: device, binaries with their commit, and the
outcome of every test. It counts as long as nothing that decides the kernels has changed since.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flashvar.binaries.manifest import Manifest
from flashvar.binaries.variant import Architecture, BinaryKind, short_axis
from flashvar.errors import FlashvarError
from flashvar_factory.build import source
from flashvar_factory.config import schema
from flashvar_factory.errors import ReleaseError
from flashvar_factory.inspect import json_text

# By convention of a project, as its sources are.
FOLDER: Final = Path("tests", "gpu", "results")
TRITON: Final = "triton"
_TRITON_SOURCES: Final = "src/python/{project}/backends/triton"
_CUDA: Final = "cuda"
_SHOWN: Final = 3
_FINE: Final = ("passed", "skipped")  # outcomes of a test
_NEVER: Final = "never"  # of manifest.RAN


@dataclass(frozen=True)
class Binary:
    """A binary that was installed during the run."""

    architecture: str  # or the name of its kind
    code_kinds: tuple[str, ...]
    version: str
    revision: str | None
    dirty: object  # False of a binary that is a commit's
    sources: str  # their hash, as manifests have it
    toolkit: str


@dataclass(frozen=True)
class Record:
    """One run of tests/gpu."""

    file: str  # from the root
    device: str
    platform: str
    architecture: str  # whose binary served: the device's own, or the one that was forced
    forced: bool
    native: bool  # its machine code ran; else the driver translated its PTX
    whole: bool  # no part of the tests was left to another run
    passed: Mapping[str, int]  # tests by backend
    files: frozenset[str]  # of tests that passed, those of Triton's kernels aside
    failed: int
    added_up: bool  # the outcomes of all tests are the sums of those of each file
    binaries: tuple[Binary, ...]


@dataclass(frozen=True)
class Need:
    """What has to have run: the binaries of an architecture, or the Triton kernels."""

    name: str
    sources: tuple[str, ...]
    released: tuple[Manifest, ...] = ()  # of the architecture's wheels

    @property
    def ops(self) -> list[str]:
        """What is released, without its direction: attention of attention_fwd."""
        every = {row.op for one in self.released for row in one.kernels}
        return sorted({op.rpartition("_")[0] or op for op in every})

    def concerns(self, record: Record) -> bool:
        """Whether the record is of this."""
        if self.name == TRITON:
            return record.passed.get(TRITON, 0) > 0
        return record.architecture == self.name and record.passed.get(_CUDA, 0) > 0

    def binaries(self, record: Record) -> tuple[Binary, ...]:
        """Those whose commit is that of what ran."""
        if self.name == TRITON:
            return record.binaries
        return tuple(one for one in record.binaries if one.architecture == self.name)


def needs(root: Path, project: str, released: Iterable[Manifest]) -> list[Need]:
    """One for each released binary that `ran` in its manifest; one for Triton's kernels."""
    by_name: dict[str, list[Manifest]] = {}
    for described in released:
        if described.ran != _NEVER:
            by_name.setdefault(described.kind.name, []).append(described)
    built_of = (*source.PARTS, schema.FILE_NAME)
    found = [Need(name, built_of, tuple(every)) for name, every in sorted(by_name.items())]
    triton = _TRITON_SOURCES.format(project=project)
    return [*found, Need(TRITON, (triton,))] if (root / triton).is_dir() else found


def read(root: Path) -> list[Record]:
    """Every record of the checkout, by name; other files of its folder are passed over."""
    return [
        one
        for path in sorted((root / FOLDER).glob("*.json"))
        if path.is_file() and (one := _read(path, path.relative_to(root).as_posix())) is not None
    ]


def _read(path: Path, name: str) -> Record | None:
    try:
        found = json_text.parse(path.read_bytes(), name)
        system = found["system"]
        device, forced = system["devices"][0], found.get("forced_architecture")
        passed: Counter[str] = Counter()
        total: Counter[str] = Counter()
        files = set()
        for row, counts in found["counts_by_file"].items():
            file, _, backend = row.rpartition(" ")
            outcomes = _outcomes(counts)
            total += outcomes
            passed[backend] += outcomes["passed"]
            if outcomes["passed"] and backend != TRITON:
                files.add(file)
        stated = _outcomes(found["counts"])
        own = Architecture(*device["capability"])
        served = BinaryKind(own) if _text(forced) is None else BinaryKind.parse(forced)
        return Record(
            file=name,
            device=str(device["name"]),
            platform=str(system["platform"]),
            architecture=served.name,
            forced=forced is not None,
            native=served.architecture.capability == own.capability,
            whole=found.get("left_to_other_shards") == 0
            and not found.get("chosen")
            and not found.get("ended_early")
            and not system["interpreted"],
            passed=passed,
            files=frozenset(files),
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
        architecture=str(row["architecture"]),
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


def choose(root: Path, wanted: Sequence[Need]) -> dict[str, list[Record]]:
    """The records that count, by what they show; ReleaseError where something has none."""
    records, found, lacking = read(root), dict[str, list[Record]](), []
    for need in wanted:
        reasons = [(one, why_not(root, need, one)) for one in records if need.concerns(one)]
        found[need.name] = [record for record, reason in reasons if reason is None]
        if not found[need.name]:
            lacking.append(_lacking(root, need, reasons))
    if lacking:
        raise ReleaseError("\n".join(lacking))
    return found


def why_not(root: Path, need: Need, record: Record) -> str | None:
    """Why a record says nothing of what is released; None where it does."""
    return next(_reasons(root, need, record), None)


def _reasons(root: Path, need: Need, record: Record) -> Iterator[str]:
    if record.failed:
        yield f"{record.failed} of its tests failed"
    if not record.whole:
        yield "it is of a part of the tests"
    untried = [name for name in need.ops if not any(map(_tests_of(name).match, record.files))]
    if untried:
        yield f"it ran no test of {', '.join(untried)}"
    if not record.added_up:
        yield "its counts differ from the sum over its files"
    binaries = need.binaries(record)
    if not binaries:
        yield "it names no binary, and so no commit"
    for one in binaries:
        if one.revision is None or one.dirty is not False:
            yield f"its binary of {one.architecture} is of no commit"
            return
        touched = source.touched(root, one.revision, need.sources)
        if touched is None:
            yield f"commit {one.revision} is not in this clone (git fetch --unshallow)"
        elif files := [name for name in touched if source.has_other_code(root, one.revision, name)]:
            more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
            yield f"since its commit {one.revision[:12]} changed {', '.join(files[:_SHOWN])}{more}"
        for described in need.released:
            yield from _differences(one, described, record.platform, other_comments=bool(touched))


def _tests_of(name: str) -> re.Pattern[str]:
    """The files of tests of an op, by convention."""
    return re.compile(f"test_{re.escape(name)}[_.]")


def _differences(
    one: Binary, described: Manifest, platform: str, *, other_comments: bool
) -> Iterator[str]:
    """What the binary that ran and the one that is released do not share."""
    if one.toolkit != described.toolkit.machine_code:
        made = described.toolkit.machine_code
        yield f"its binary is of nvcc {one.toolkit}, the release's of {made}"
    built = (one.version, one.code_kinds, platform)
    if built != (described.version, described.code_kinds, described.platform):
        return  # a build of other parts, e.g. with PTX: its hash covers these
    if not other_comments and one.sources != described.source.hash:
        yield (
            f"its binary is of sources {one.sources[:12]}, the release's of "
            f"{described.source.hash[:12]}"
        )


def _lacking(root: Path, need: Need, reasons: Sequence[tuple[Record, str | None]]) -> str:
    found = "; ".join(f"{record.file}: {reason}" for record, reason in reasons) or "none"
    what = "Triton kernels" if need.name == TRITON else f"the binary of {need.name}"
    return (
        f"{what}: expected a record in {FOLDER.as_posix()} of a GPU run of what is released, found "
        f"{found}; {_renewal(root, need, [record for record, _ in reasons])}, then commit the "
        "record and tag that commit"
    )


def _renewal(root: Path, need: Need, records: Sequence[Record]) -> str:
    """The commands that make the record again, on a machine with a GPU.

    A development build takes some values of the axes in [dev], unless all are asked for.
    """
    partial = schema.read(root / schema.FILE_NAME).dev.axes
    record = records[0] if records else None
    if record is None:
        built, force = ("all" if need.name == TRITON else need.name), ""
        file = (FOLDER / f"a-gpu-{need.name.replace('_', '')}.json").as_posix()
    else:
        ptx = any("ptx" in one.code_kinds for one in record.binaries)
        names = ",".join(dict.fromkeys(one.architecture for one in record.binaries)) or "all"
        built = f"arch={names}{' ptx=1' if ptx else ''}"
        force = f"FLASHVAR_FORCE_ARCH={record.architecture} " if record.forced else ""
        file = record.file
    every = [f"{short_axis(axis)}=all" for axis in partial]
    where = f"on an {record.device}" if record else "on a machine with such a GPU"
    return (
        f"renew it {where}: nox -s build-dev -- {' '.join([built, *every])} && {force}nox -s gpu "
        f"-- --results {file}"
    )
