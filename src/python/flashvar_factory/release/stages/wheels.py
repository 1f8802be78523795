"""Build the sdist, the project's wheel and one wheel per architecture; together they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name

from flashvar.binaries.kinds import BinaryKind
from flashvar_factory.build import wheel
from flashvar_factory.build.self_contained import group_of
from flashvar_factory.config.expand import Build
from flashvar_factory.release import members, merge, publish
from flashvar_factory.release.pipeline import Release
from flashvar_factory.release.steps import Outcome, Step, digests
from flashvar_factory.toolchain import compiled_by
from flashvar_factory.toolchain.nvcc import Toolchain


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step per file, then one that looks at all of them."""
    _remove_others(release)
    sources = {"revision": release.revision, "version": release.version, "tools": group_of("build")}
    for name, make in wheel.makers(release.config, release.root).items():
        yield Step(f"wheels/{name}", sources, partial(_own, release, make))
    for build, compiler in release.builds:
        code, toolkit = build.target.architecture.code, build.target.toolkit
        inputs = {
            **sources,
            "build": [build.platform, code, build.code_kinds, build.distribution],
            "toolkit": None if toolkit is None else vars(toolkit),
            "kernels": [kernel.name for kernel in build.kernels],
            "compilers": compiled_by.facts(compiler),
        }
        name = f"wheels/{build.distribution}-{build.platform}"
        yield Step(name, inputs, partial(_binary, release, build, compiler))
    files = [file for outcome in done.values() for file in outcome.files]
    yield Step("wheels/together", digests(files), partial(_together, release, files))


def _remove_others(release: Release) -> None:
    """Remove what an earlier release of other members left here; ReleaseError where others did."""
    release.wheels.mkdir(parents=True, exist_ok=True)
    publish.remove_halves(release.wheels)
    project = canonicalize_name(release.config.project.name)
    ours = {project, *(member.distribution for member in release.members)}
    for file in release.wheels.iterdir():
        member = members.read(file)
        if member is None or member in release.members or not file.is_file():
            continue
        if member.distribution in ours or _is_of_binary(member.distribution, project):
            file.unlink()
    found = members.complaints(release.wheels.iterdir(), release.members, whole=False)
    members.refuse(found, str(release.wheels), "move them away, or name another --work-dir")


def _is_of_binary(distribution: str, project: str) -> bool:
    """Whether it is the name of a project's binary: `flash-attn` is none of a project `flash`."""
    try:
        BinaryKind.parse(distribution.removeprefix(f"{project}-"))
    except ValueError:
        return False
    return distribution.startswith(f"{project}-")


def _own(release: Release, make: Callable[[Path], Path]) -> Outcome:
    return _outcome(make(release.wheels))


def _binary(release: Release, build: Build, compiler: Toolchain) -> Outcome:
    made = wheel.binary(
        release.config,
        build,
        compiler,
        root=release.root,
        output=release.wheels,
        jobs=release.jobs,
    )
    return _outcome(made)


def _outcome(file: Path) -> Outcome:
    return Outcome(f"{file.name}, {file.stat().st_size:,} bytes", (file,))


def _together(release: Release, files: list[Path]) -> Outcome:
    found = members.complaints(release.wheels.iterdir(), release.members)
    if not found:
        found = merge.projects_extras(files, release.config, release.members)
    members.refuse(found, str(release.wheels), f"remove {release.folder} and release again")
    return Outcome(f"{len(release.members)} files of version {release.version}")
