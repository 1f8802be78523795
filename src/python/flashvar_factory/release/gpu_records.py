"""Finds the records of GPU runs that a release relies on: those of the kernels that are released.

A record of all tests counts as long as only files of single ops changed since its commit
(own_sources.py; neither comments count as changes, nor files of families that the binary does not
include). For each such op there must be a record of that op's tests:

* all of its test files ran, none in part, without a failure, and in each at least as many tests
  passed,
* the binary has the same architecture, nvcc and platform, and ran in the same way: natively, or
  translated from PTX,
* since the commit of that record, neither the op's own files changed nor any file of no single op.

Any other change of `RecordNeed.sources` makes a record stale, and so does an unknown or dirty
commit of its binary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar.binaries.kinds import short_axis
from flashvar.binaries.manifest import Manifest
from flashvar_factory.build import source
from flashvar_factory.config import schema
from flashvar_factory.config.names import op_of
from flashvar_factory.errors import ReleaseError
from flashvar_factory.release import gpu_runs, own_sources
from flashvar_factory.release.gpu_runs import CUDA, FOLDER, TRITON, Binary, GpuRun

_TRITON_SOURCES: Final = "src/python/{project}/backends/triton"
_SHOWN: Final = 3
# Of manifest.RAN.
_OWN: Final = "own"
_NEVER: Final = "never"


@dataclass(frozen=True)
class RecordNeed:
    """What has to have run: the binaries of an architecture, or the Triton kernels."""

    name: str
    sources: tuple[str, ...]
    released: tuple[Manifest, ...] = ()  # of the architecture's wheels

    @property
    def ops(self) -> list[str]:
        """The ops of the released functions."""
        return sorted({op_of(row.function) for one in self.released for row in one.kernels})

    def concerns(self, record: GpuRun) -> bool:
        """Whether the record is of this."""
        if self.name == TRITON:
            return record.passed.get(TRITON, 0) > 0
        return record.kind == self.name and record.passed.get(CUDA, 0) > 0

    def binaries(self, record: GpuRun) -> tuple[Binary, ...]:
        """The binaries in the record that ran."""
        if self.name == TRITON:
            return record.binaries
        return tuple(one for one in record.binaries if one.kind == self.name)


def needs(root: Path, project: str, released: Iterable[Manifest]) -> list[RecordNeed]:
    """One for each released binary that `ran` in its manifest; one for Triton's kernels."""
    by_name: dict[str, list[Manifest]] = {}
    for manifest in released:
        if manifest.ran != _NEVER:
            by_name.setdefault(manifest.kind.name, []).append(manifest)
    built_of = (*source.PARTS, schema.FILE_NAME)
    found = [RecordNeed(name, built_of, tuple(every)) for name, every in sorted(by_name.items())]
    triton = _TRITON_SOURCES.format(project=project)
    return [*found, RecordNeed(TRITON, (triton,))] if (root / triton).is_dir() else found


@dataclass(frozen=True)
class Since:
    """What differs between a commit and HEAD, of the sources of a need."""

    touched: bool  # comments too, and files of foreign families
    by_op: Mapping[str, tuple[str, ...]]  # files with other code that are one op's alone, by op
    common: tuple[str, ...]  # the others with other code
    tests: tuple[str, ...]  # the files of tests of the commit
    tests_now: tuple[str, ...]  # and of HEAD


@dataclass(frozen=True)
class RecordResult:
    """Whether a record covers a released binary, and why not."""

    record: GpuRun
    reason: str | None  # why it does not count; None: it counts
    parts: tuple[GpuRun, ...] = ()  # those of single ops that it counts with
    ops_to_rerun: tuple[str, ...] = ()  # ops whose own tests are all that has to run again


def choose(root: Path, wanted: Sequence[RecordNeed]) -> dict[str, list[GpuRun]]:
    """The records that count, by what they show; ReleaseError where something has none."""
    records = gpu_runs.read(root, schema.read(root / schema.FILE_NAME))
    found, lacking = dict[str, list[GpuRun]](), []
    for need in wanted:
        every = results(root, need, records)
        used = {r.file: r for one in every if one.reason is None for r in (one.record, *one.parts)}
        found[need.name] = list(used.values())
        if not used:
            lacking.append(_lacking(root, need, every))
    if lacking:
        raise ReleaseError("\n".join(lacking))
    return found


def results(root: Path, need: RecordNeed, records: Sequence[GpuRun]) -> list[RecordResult]:
    """Whether each record of a need covers what is released, and why not."""
    mine = [one for one in records if need.concerns(one)]
    commits = {binary.revision for one in mine for binary in need.binaries(one)} - {None}
    since = {commit: _since(root, need, commit) for commit in commits if commit is not None}
    return [result(need, one, mine, since) for one in mine]


def _since(root: Path, need: RecordNeed, revision: str) -> Since | None:
    """None for a commit that is not in the checkout."""
    every = source.touched(root, revision, need.sources)
    if every is None:
        return None
    foreign = foreign_sources(root, need, every) if every else set()
    touched = [name for name in every if name not in foreign]
    other = [name for name in touched if source.has_other_code(root, revision, name)]
    own_of = owners(root, need, touched) if other else {}
    ops = {own_of[name] for name in other if name in own_of}
    return Since(
        touched=bool(every),
        by_op={op: tuple(name for name in other if own_of.get(name) == op) for op in sorted(ops)},
        common=tuple(name for name in other if name not in own_of),
        tests=tuple(source.files(root, revision, gpu_runs.TESTS)),
        tests_now=tuple(source.files(root, "HEAD", gpu_runs.TESTS)),
    )


def foreign_sources(root: Path, need: RecordNeed, touched: Iterable[str] = ()) -> set[str]:
    """The sources of families none of whose files the binaries of a need include."""
    targets = schema.read(root / schema.FILE_NAME).targets
    if need.name not in targets:
        return set()
    lines = source.lines(root, own_sources.INCLUDES, need.sources)
    names = {*source.files(root, "HEAD", *need.sources), *touched}
    families = {target.family for target in targets.values()}
    others = own_sources.other_families(names, lines, targets[need.name].family, families)
    of_families = own_sources.of_families(names, lines, families)
    return {name for name, family in of_families.items() if family in others}


def owners(root: Path, need: RecordNeed, touched: Iterable[str] = ()) -> dict[str, str]:
    """The op of each source that is one op's alone; generated sources include launchers."""
    ops = need.ops
    if not ops:
        return {}
    lines = source.lines(root, own_sources.INCLUDES, need.sources)
    declared = schema.read(root / schema.FILE_NAME).ops
    included = own_sources.includes(lines, ops) | {
        own_sources.Include(op_of(name), f"{op.launcher}.cuh") for name, op in declared.items()
    }
    # A file that is gone may be what a line meant.
    names = {*source.files(root, "HEAD", *need.sources), *touched}
    return own_sources.owners(names, included, ops)


def result(
    need: RecordNeed, record: GpuRun, records: Iterable[GpuRun], since: Mapping[str, Since | None]
) -> RecordResult:
    """What a record says, with others for the ops that changed since its commit."""
    reason = next(_reasons(need, record, since), None)
    if reason is not None:
        return RecordResult(record, reason)
    changed: dict[str, tuple[str, ...]] = {}
    for binary in need.binaries(record):
        found = since[binary.revision or ""]
        changed |= found.by_op if found else {}
    others = [one for one in records if one is not record]
    parts, rerun, said = list[GpuRun](), [], []
    for op, files in changed.items():
        tried = [
            (one, next(_reasons_of_part(need, one, op, record, since), None))
            for one in others
            if any(map(_tests_of(op).match, one.files))
        ]
        counted = [one for one, why in tried if why is None]
        parts += counted
        if not counted:
            rerun.append(op)
            why_not = "; ".join(f"{one.file}: {why}" for one, why in tried) or "none"
            said.append(
                f"{_shown(files)}, which only {op} uses, changed after its commit: a record of the "
                f"tests of {op} is enough, found {why_not}"
            )
    return RecordResult(record, "; ".join(said) or None, tuple(parts), tuple(rerun))


def _reasons(need: RecordNeed, record: GpuRun, since: Mapping[str, Since | None]) -> Iterator[str]:
    """Why a record does not count, whatever other records there are."""
    if record.failed:
        yield f"{record.failed} of its tests failed"
    if not record.whole:
        yield "it did not run all tests"
    untried = [name for name in need.ops if not any(map(_tests_of(name).match, record.files))]
    if untried:
        yield f"it ran no test of {', '.join(untried)}"
    if not record.native and any(one.ran == _OWN for one in need.released):
        yield f"the driver translated its PTX, and variants.toml says ran = {_OWN!r}"
    yield from _reasons_of_run(need, record, since, ())


def _reasons_of_part(
    need: RecordNeed, part: GpuRun, op: str, whole: GpuRun, since: Mapping[str, Since | None]
) -> Iterator[str]:
    """Why a record does not stand for the tests of an op in place of an older one of all tests."""
    if part.failed:
        yield f"{part.failed} of its tests failed"
    if not part.complete:
        yield "it did not run all tests that were chosen"
    if (part.native, part.platform) != (whole.native, whole.platform):
        how, how_whole = (
            f"{'natively' if one.native else 'translated'} on {one.platform}"
            for one in (part, whole)
        )
        yield f"it ran otherwise than {whole.file}: expected {how_whole}, found {how}"
    for row, count in whole.tests.items():
        # Random cases that cover all pairs of options are a few more or fewer with another seed.
        needed = count // 2 if row[0].endswith("_random.py") else count
        if _tests_of(op).match(row[0]) and part.tests.get(row, 0) < needed:
            yield f"{part.tests.get(row, 0)} tests of {' '.join(row)} passed, {count} before"
    yield from _reasons_of_run(need, part, since, (op,))
    if part.chosen:
        found = [since[one.revision or ""] for one in need.binaries(part)]
        every = {name for one in found if one for name in one.tests}
        mine = {name for name in every if _tests_of(op).match(name.rpartition("/")[2])}
        if lacking := mine - set(part.chosen):
            yield f"{_shown(sorted(lacking))} was not chosen"
        # A binary may be tested by files that came after its commit.
        every |= {name for one in found if one for name in one.tests_now}
        if len(set(part.chosen) & every) < len(part.chosen):
            words = " ".join(part.chosen)
            yield f"what was chosen is not just files of its commit or of HEAD, once each: {words}"


def _reasons_of_run(
    need: RecordNeed, record: GpuRun, since: Mapping[str, Since | None], ops: Collection[str]
) -> Iterator[str]:
    """Why the binary that ran is not the released one in what is common and in these ops."""
    if not record.added_up:
        yield "its counts differ from the sum over its files"
    binaries = need.binaries(record)
    if not binaries:
        yield "it names no binary, and so no commit"
    for one in binaries:
        if one.revision is None or one.dirty is not False:
            yield f"its binary of {one.kind} was not built from a commit without changes"
            return
        found = since[one.revision]
        if found is None:
            yield f"commit {one.revision} is not in this clone (git fetch --unshallow)"
        elif files := [*found.common, *itertools.chain(*(found.by_op.get(op, ()) for op in ops))]:
            yield f"{_shown(files)} changed after its commit {one.revision[:12]}"
        other_comments = found is not None and found.touched
        for manifest in need.released:
            yield from _differences(one, manifest, record.platform, other_comments=other_comments)


def _shown(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return f"{', '.join(files[:_SHOWN])}{more}"


def _tests_of(name: str) -> re.Pattern[str]:
    """The files of tests of an op, by convention."""
    return re.compile(f"test_{re.escape(name)}[_.]")


def _differences(
    one: Binary, manifest: Manifest, platform: str, *, other_comments: bool
) -> Iterator[str]:
    """What the binary that ran and the one that is released do not share."""
    if one.toolkit != manifest.toolkit.machine_code:
        made = manifest.toolkit.machine_code
        yield f"its binary was made by nvcc {one.toolkit}, the release's by {made}"
    built = (one.version, one.code_kinds, platform)
    if built != (manifest.version, manifest.code_kinds, manifest.platform):
        return  # a build of other parts, e.g. with PTX: its hash covers these
    if not other_comments and one.sources != manifest.source.hash:
        yield (
            f"its binary was made from sources {one.sources[:12]}, the release's from "
            f"{manifest.source.hash[:12]}"
        )


def _lacking(root: Path, need: RecordNeed, every: Sequence[RecordResult]) -> str:
    found = "; ".join(f"{one.record.file}: {one.reason}" for one in every) or "none"
    what = "Triton kernels" if need.name == TRITON else f"the binary of {need.name}"
    partly = next((one for one in every if one.ops_to_rerun), None)
    if partly is None:
        renewed = _renewal(root, need, every[0].record if every else None)
    else:
        renewed = "; ".join(_renewal(root, need, partly.record, op) for op in partly.ops_to_rerun)
    return (
        f"{what}: expected a record in {FOLDER.as_posix()} of a GPU run of what is released, found "
        f"{found}; {renewed}, then commit the record and tag that commit"
    )


def _renewal(root: Path, need: RecordNeed, record: GpuRun | None, op: str | None = None) -> str:
    """The commands that make a record again, or one of an op's tests, on a machine with a GPU.

    A development build takes some values of the axes in [dev], unless all are asked for.
    """
    partial = schema.read(root / schema.FILE_NAME).dev.axes
    if record is None:
        built, force = ("all" if need.name == TRITON else need.name), ""
        file = (FOLDER / f"a-gpu-{need.name.replace('_', '')}.json").as_posix()
    else:
        ptx = any("ptx" in one.code_kinds for one in record.binaries)
        names = ",".join(dict.fromkeys(one.kind for one in record.binaries)) or "all"
        built = f"arch={names}{' ptx=1' if ptx else ''}"
        force = f"FLASHVAR_FORCE_ARCH={record.kind} " if record.forced else ""
        file = record.file
    words = [file]
    if record and op:
        tests = source.files(root, "HEAD", gpu_runs.TESTS)
        mine = [name for name in tests if _tests_of(op).match(name.rpartition("/")[2])]
        # Its seed decides how many random cases there are.
        seed = [] if record.seed is None else [f"--seed {record.seed}"]
        words = [f"{file.removesuffix('.json')}-{op}.json", *seed, f"--backend {CUDA}", *mine]
    every = [f"{short_axis(axis)}=all" for axis in partial]
    where = f"on an {record.device}" if record else "on a machine with such a GPU"
    return (
        f"renew it {where}: nox -s build-dev -- {' '.join([built, *every])} && {force}nox -s gpu "
        f"-- --results {' '.join(words)}"
    )
