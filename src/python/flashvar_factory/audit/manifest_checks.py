"""Checks that a wheel of the factory holds what its manifests describe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from flashvar.binaries.install_commands import public
from flashvar.binaries.kinds import dotted
from flashvar.binaries.manifest import FILE_NAME, Manifest
from flashvar.errors import FlashvarError, ManifestError
from flashvar.machine.driver import BRANCHES
from flashvar_factory.audit import library_facts
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.audit.manifests import manifests, pairs
from flashvar_factory.build import source
from flashvar_factory.build import wheel as wheels
from flashvar_factory.config import version
from flashvar_factory.config.expand import Build
from flashvar_factory.toolchain import driver

_REVISION = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TOOLKIT = re.compile(r"[0-9]+(\.[0-9]+){2}", re.ASCII)


def manifest(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """Each library has one manifest, which describes it and this wheel."""
    found = manifests(wheel)
    if not found and not wheel.libraries:
        yield Finding(
            "manifest", wheel.path.name, "expected a library and its manifest, found none"
        )
    for folder in sorted({library.folder for library in wheel.libraries} - set(found)):
        yield Finding("manifest", f"{folder}/{FILE_NAME}", "expected a manifest, found none")
    for name, folder in wheel.entry_points.items():
        if folder not in found:
            yield Finding(
                "manifest", f"{folder}/{FILE_NAME}", f"expected {name}'s manifest, found none"
            )
    for folder, manifest in found.items():
        where = f"{folder}/{FILE_NAME}"
        if isinstance(manifest, ManifestError):
            yield Finding("manifest", where, f"{manifest}; build it again")
            continue
        beside = [library for library in wheel.libraries if library.folder == folder]
        for what, wanted, value in _rows(wheel, manifest, beside, expected):
            if wanted != value:
                yield Finding("manifest", where, f"expected {what} {wanted}, found {value}")
        if manifest.to_json() != wheel.manifests[folder]:
            yield Finding(
                "manifest",
                where,
                "expected the text that the factory writes, found other spaces or another order",
            )


def _rows(
    wheel: Wheel, manifest: Manifest, beside: list[Library], expected: Expectations
) -> Iterator[tuple[str, object, object]]:
    """What has to be equal: of the library (or its name), and of the manifest."""
    library = manifest.library
    files = [one.path.rpartition("/")[2] for one in beside]
    yield "libraries beside it", [library.file], files
    for one in beside:
        yield f"bytes of {library.file}", one.size, library.bytes
        yield f"sha256 of {library.file}", one.sha256, library.sha256
        yield "platform", f"linux_{one.dynamic.machine}", manifest.platform
        tag = wheels.tag(one.dynamic.machine).rpartition("-")[2]
        yield "tag", tag, tag if tag in wheel.platforms else ".".join(wheel.platforms)
    if expected.is_variant(wheel.name):  # it of the project has the project's version
        yield "version", wheel.name.version, public(manifest.version)
    else:
        yield "version", wheel.name.version, manifest.version
        yield "distribution", wheel.name.distribution, manifest.distribution.replace("-", "_")


def derived(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The manifest agrees with the library, the toolkit, variants.toml and the checkout."""
    for library, manifest in pairs(wheel):
        where = f"{library.folder}/{FILE_NAME}"
        for what, wanted, value in _derived(library, manifest, expected):
            if wanted != value:
                yield Finding("derived", where, f"expected {what} {wanted}, found {value}")


def _derived(
    library: Library, manifest: Manifest, expected: Expectations
) -> Iterator[tuple[str, object, object]]:
    """The name of a fact, the fact, and what the manifest states."""
    yield "ABI, as the library returns it,", library_facts.abi(library, manifest), manifest.abi
    stated = (manifest.architecture.name, manifest.version, manifest.source.hash)
    info = library_facts.build_info(library)
    yield "architecture, version and source hash, as the library states them,", info, stated
    toolkits = sorted({image.toolkit for image in library.images if image.toolkit is not None})
    if toolkits:
        yield "toolkit, as the device code states it,", toolkits, [manifest.toolkit.machine_code]
    versions = sorted({divmod(one.api, 10) for one in library.images if one.api is not None})
    machine_code = manifest.toolkit.machine_code
    if versions and _TOOLKIT.fullmatch(machine_code):
        wanted_version = [dotted(_release(machine_code))]
        yield "CUDA, as the device code states it,", [*map(dotted, versions)], wanted_version
    yield "compiler", "nvcc", manifest.toolkit.compiler
    toolkit, compiler = manifest.toolkit.machine_code, manifest.toolkit.version
    if _TOOLKIT.fullmatch(compiler) is None:
        yield "compiler's version", "three numbers", compiler
    elif _TOOLKIT.fullmatch(toolkit) and _release(compiler) < _release(toolkit):
        yield "compiler's version", f"{toolkit} or newer", compiler
    if _TOOLKIT.fullmatch(toolkit):
        major, minor = _release(toolkit)
        known = {image.before_13 for image in library.images} - {None}
        formats = sorted("CUDA 12" if before_13 else "CUDA 13" for before_13 in known)
        if formats:
            wanted = ["CUDA 12" if major < 13 else "CUDA 13"]
            yield "format of the device code to be that of", wanted, formats
        if (major, minor) >= min(BRANCHES):
            oldest = driver.minimum((major, minor), manifest.code_kinds)
            yield "minimum driver of that toolkit", oldest, manifest.minimum_driver
        else:
            yield "toolkit", f"{dotted(min(BRANCHES))} or newer", toolkit
    else:
        yield "toolkit", "three numbers", toolkit
    for name in sorted({one.compression for one in library.images if one.compression is not None}):
        opened_by = driver.OPENS.get(name, (0, 0))
        if manifest.minimum_driver.cuda < opened_by:
            wanted_cuda = f"{dotted(opened_by)} or newer, which decompresses {name}"
            yield (
                "CUDA version of the minimum driver",
                wanted_cuda,
                dotted(manifest.minimum_driver.cuda),
            )
    revision, dirty = manifest.source.revision, manifest.source.dirty
    if revision is not None and _REVISION.fullmatch(revision) is None:
        yield "revision to be", "the hash of a commit", revision
    if (revision is None) != (dirty is None):
        yield "dirty to be", "null" if revision is None else "true or false", dirty
    if expected.revision is not None:
        yield "revision and dirty", (expected.revision, False), (revision, dirty)
    if expected.config is not None:
        yield from _configured(manifest, expected)


def _release(toolkit: str) -> tuple[int, int]:
    """Major and minor of a toolkit's version."""
    major, minor = (int(part[:6]) for part in toolkit.split(".")[:2])
    return major, minor


def _configured(manifest: Manifest, expected: Expectations) -> Iterator[tuple[str, object, object]]:
    config = expected.config
    assert config is not None
    yield "project", config.project.name, manifest.project
    yield "ABI of variants.toml", config.project.abi, manifest.abi
    target = config.targets.get(manifest.kind.name)
    if target is None:
        return
    made_by = None if target.toolkit is None else target.toolkit.version
    yield "ptxas of variants.toml", made_by, manifest.toolkit.ptxas
    yield "ran (where its kernels have run, by variants.toml)", target.ran, manifest.ran
    yield "torch of variants.toml", config.project.torch, manifest.torch
    yield "distribution", target.distribution, manifest.distribution
    build = Build(
        replace(target, architecture=manifest.architecture),
        manifest.code_kinds,
        tuple(library_facts.kernel(row) for row in manifest.kernels),
        manifest.platform.removeprefix("linux_"),
        config.project.torch,
    )
    if build.platform not in target.platforms:
        yield (
            "platform to be",
            f"one of variants.toml's ({', '.join(target.platforms)})",
            build.platform,
        )
    yield "family", [target.family], sorted({row.family for row in manifest.kernels})
    release = public(manifest.version)
    if expected.root is not None:
        release = version.read(config, expected.root)
    try:
        labeled = version.of_build(release, build, config)
    except FlashvarError as error:
        labeled = str(error)
    yield "version with the label of its kernels", labeled, manifest.version
    if expected.root is not None:
        yield from _sources(manifest, build, expected)


def _sources(
    manifest: Manifest, build: Build, expected: Expectations
) -> Iterator[tuple[str, object, object]]:
    """The hash of the sources, where the checkout is at the wheel's commit, unchanged."""
    assert expected.root is not None
    revision, dirty = source.stated(expected.root)
    made_of = (manifest.source.revision, manifest.source.dirty)
    if revision is None or dirty or made_of != (revision, False):
        return
    identity = source.identity(build, manifest.version, manifest.toolkit, lineinfo=False)
    found = source.digest(expected.root, identity)
    yield "source hash of that commit", found, manifest.source.hash
