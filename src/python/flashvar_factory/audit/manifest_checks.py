"""Does a wheel of the factory hold manifests, and what they say?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flashvar.binaries.manifest import FILE_NAME, Manifest
from flashvar.errors import ManifestError
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.fatbin import SASS
from flashvar_factory.audit.finding import Finding, some
from flashvar_factory.audit.stated import manifests, pairs


def manifest(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """One manifest for each library, which describes it and this wheel."""
    del expected
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
    for folder, stated in found.items():
        where = f"{folder}/{FILE_NAME}"
        if isinstance(stated, ManifestError):
            yield Finding("manifest", where, f"{stated}; build it again")
            continue
        beside = [library for library in wheel.libraries if library.folder == folder]
        for what, wanted, value in _rows(wheel, stated, beside):
            if wanted != value:
                yield Finding("manifest", where, f"expected {what} {wanted}, found {value}")


def _rows(
    wheel: Wheel, stated: Manifest, beside: list[Library]
) -> Iterator[tuple[str, object, object]]:
    """What has to be equal: of the library (or its name), and of the manifest."""
    library = stated.library
    files = [one.path.rpartition("/")[2] for one in beside]
    yield "libraries beside it", [library.file], files
    for one in beside:
        yield f"bytes of {library.file}", one.size, library.bytes
        yield f"sha256 of {library.file}", one.sha256, library.sha256
        yield "platform", f"linux_{one.dynamic.machine}", stated.platform
    if wheel.name.label is not None:  # a variant of the project has the project's version
        yield "version", wheel.name.version, stated.version.partition("+")[0]
    else:
        yield "version", wheel.name.version, stated.version
        yield "distribution", wheel.name.distribution, stated.distribution.replace("-", "_")


def kernels(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The manifest's kernels are the library's: on the host's side, and on the device's."""
    del expected
    for library, stated in pairs(wheel):
        yield from _on_host(library, stated)
        yield from _on_device(library, stated)


def _on_host(library: Library, stated: Manifest) -> Iterator[Finding]:
    named, held = {row.name for row in stated.kernels}, set(library.kernels or ())
    if named - held:
        yield Finding(
            "kernels",
            library.path,
            f"expected {some(sorted(named - held))}, as the manifest says, found no such kernels",
        )
    if held - named:
        yield Finding(
            "kernels",
            library.path,
            f"expected {some(sorted(held - named))} in the manifest, found them missing",
        )


def _on_device(library: Library, stated: Manifest) -> Iterator[Finding]:
    for message in _device_faults(library, stated):
        yield Finding("kernels", library.path, message)


def _device_faults(library: Library, stated: Manifest) -> Iterator[str]:
    held = Counter(function.name for image in library.images for function in image.functions or ())
    claims = Counter(name for row in stated.kernels for name in row.functions)
    closed = sum(image.kind == SASS and image.functions is None for image in library.images)
    if closed:
        yield (
            f"expected device code plain or compressed by zstd, found {closed} images that are "
            "not; compile with --compress-mode=size"
        )
    for row in stated.kernels:
        missing = [name for name in row.functions if name not in held]
        if missing:
            yield f"expected device code of {row.name}, found none of {some(missing)}"
        if not row.functions:
            yield f"expected the device functions of {row.name} in the manifest, found none"
    # What several kernels launch is compiled with each of them.
    shared = sorted(name for name, count in claims.items() if 1 < count != held[name])
    if shared:
        yield (
            f"expected {some(shared)} to be one kernel's, or in an image of each that launches it, "
            "found more kernels in the manifest"
        )
    strange = sorted(set(held) - set(claims))
    if strange:
        yield f"expected no device code but the manifest's kernels, found {some(strange)}"
