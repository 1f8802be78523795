"""Checks that all device code of a wheel is for its one architecture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flashvar.binaries.kinds import Architecture, dotted
from flashvar.binaries.manifest import Manifest
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding, some
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import device_code, fatbin, json_text

_WORDS = {fatbin.SASS: "machine code", fatbin.PTX: "PTX"}
# Bytes of the name of a source file, and of options; ours have 120.
_ENTRY_WORDS = 1024
# PTX 9.0 came with CUDA 13.0, 8.x with 12: of one minor version no PTX is newer than CUDA.
_VERSIONS_APART = 4
_EXTRA = re.compile(r"(?:^|_)(sm[1-9]\d+(?:_cu[1-9]\d*)?)$")


def architecture(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """Machine code, manifest, file name, entry point, label and variants.toml agree."""
    known = expected.architecture(wheel.name)
    for library, manifest in pairs(wheel):
        yield from _machine_code(library, manifest)
        if known is not None and manifest.architecture != known:
            yield _differs(wheel, f"code {known.code} as variants.toml says", manifest)
        yield from _entries(library)
        for source, extra in _names(wheel):
            if extra != manifest.kind.extra.replace("-", "_"):
                yield _differs(wheel, f"code for {extra} as {source} says", manifest)
        for name, folder in wheel.entry_points.items():
            if folder == library.folder and name != manifest.kind.name:
                yield _differs(wheel, f"code for {name} as its entry point says", manifest)
        real = f"{manifest.architecture.extra.removeprefix('sm')}_real"
        for label, values in _variants(wheel):
            if label != wheel.name.variant_label or values != [real]:
                yield _differs(wheel, f"{label}: sm_arch {values} as variant.json says", manifest)


def _machine_code(library: Library, manifest: Manifest) -> Iterator[Finding]:
    code = manifest.architecture.code
    sass = [image for image in library.images if image.kind == fatbin.SASS]
    if not sass:
        yield Finding(
            "architecture", library.path, f"expected machine code for sm_{code}, found none"
        )
    others = [image for image in sass if image.code != code]
    leaked = Counter(image.code for image in others if image.functions == ())
    real = Counter(image.code for image in others if image.functions != ())
    for found, count in sorted(real.items()):
        yield Finding(
            "architecture",
            library.path,
            f"expected machine code for sm_{code} alone, found {count} images for sm_{found}; "
            "build it again from an empty directory",
        )
    strange = {image.code for image in library.images if image.kind == fatbin.PTX} - {code}
    if strange:
        yield Finding(
            "architecture",
            library.path,
            f"expected PTX only for sm_{code}, found some for sm_{some(sorted(strange))}",
        )
    for found, count in sorted(leaked.items()):
        yield Finding(
            "architecture",
            library.path,
            f"expected machine code for sm_{code} alone, found {count} images without kernels for "
            f"sm_{found}, the default of nvcc's device link; pass it the same -gencode flags",
        )


def _entries(library: Library) -> Iterator[Finding]:
    """The containers state what is in them: drivers choose an image by its entry."""
    for image in library.images:
        if image.kind not in (fatbin.SASS, fatbin.PTX):
            yield Finding(
                "architecture",
                library.path,
                f"expected machine code or PTX, found an image of kind {image.kind}",
            )
        elif image.entry_code != image.code:
            yield Finding(
                "architecture",
                library.path,
                f"expected a fatbin entry for {image.code}, as its {_WORDS[image.kind]} states, "
                f"found one for {image.entry_code}: drivers choose by the entry",
            )
        elif image.entry_form != image.form:
            yield Finding(
                "architecture",
                library.path,
                f"expected a fatbin entry of version {dotted(image.form)}, as its "
                f"{_WORDS[image.kind]} states, found one of {dotted(image.entry_form)}",
            )
        elif image.entry_flags & ~fatbin.KNOWN or fatbin.USUAL & ~image.entry_flags:
            yield Finding(
                "architecture",
                library.path,
                f"expected the flags of a fatbin entry for 64 bits and Linux, and no unknown ones, "
                f"found {image.entry_flags:#x}",
            )
        elif len(image.entry_words) > _ENTRY_WORDS or device_code.within(image.entry_words):
            yield Finding(
                "architecture",
                library.path,
                "expected a name and options alone in the header of a fatbin entry, found PTX, or "
                f"{len(image.entry_words):,} bytes",
            )
        elif image.functions and image.toolkit is None and not image.before_13:
            yield Finding(
                "architecture",
                library.path,
                "expected the note of ptxas (.note.nv.tkinfo) in machine code of CUDA 13, found "
                "none",
            )
        elif image.differences:
            yield Finding(
                "architecture",
                library.path,
                "expected machine code as ptxas writes it, found "
                f"{some(list(image.differences))}; it is damaged, of a newer toolkit than this "
                "audit knows, or compiled with -lineinfo or -G",
            )


def _names(wheel: Wheel) -> Iterator[tuple[str, str]]:
    """Architectures in the file's name, and what part of it says so."""
    if match := _EXTRA.search(wheel.name.distribution):
        yield "its file name", match[1]
    if match := _EXTRA.fullmatch(wheel.name.variant_label or ""):
        yield "its label", match[1]


def _variants(wheel: Wheel) -> list[tuple[str, object]]:
    """The labels of variant.json, each with its values of nvidia :: sm_arch."""
    text = wheel.metadata("variant.json")
    if text is None:
        return []
    try:
        rows: dict[str, Any] = json_text.parse(text.encode(), "variant.json")["variants"]
        return [(label, row.get("nvidia", {}).get("sm_arch")) for label, row in rows.items()]
    except (PackagingError, KeyError, TypeError, AttributeError):
        return [("variant.json", "unreadable")]


def _differs(wheel: Wheel, wanted: str, manifest: Manifest) -> Finding:
    found: Architecture = manifest.architecture
    return Finding(
        "architecture",
        wheel.path.name,
        f"expected {wanted}, found code {found.code} ({found.name}); rename or build again",
    )


def ptx(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """No PTX in a release; elsewhere it is there if and only if the manifest says so."""
    del expected
    for library, manifest in pairs(wheel):
        count = sum(image.kind == fatbin.PTX for image in library.images)
        is_release = "+" not in wheel.name.version
        for form in sorted({one.embedded for one in library.images if one.embedded is not None}):
            if is_release or form != "PTX":
                yield Finding(
                    "ptx",
                    library.path,
                    f"expected no {form.removeprefix('a ')} embedded in machine code, found some; "
                    "compile without -G and --source-in-ptx",
                )
        if count and (is_release or "ptx" not in manifest.code_kinds):
            wanted = "no PTX in a release" if is_release else "no PTX, as the manifest says"
            yield Finding(
                "ptx",
                library.path,
                f"expected {wanted}, found {count} images of it, which drivers compile at first "
                "use on other devices; build without ptx=1 and -virtual architectures",
            )
        if count and not is_release:
            yield from _same_kernels(library, manifest)
        if not count and "ptx" in manifest.code_kinds:
            yield Finding("ptx", library.path, "expected PTX, as the manifest says, found none")


def _same_kernels(library: Library, manifest: Manifest) -> Iterator[Finding]:
    """PTX is there for each kernel in machine code, and of a version that its driver compiles."""
    texts = [image for image in library.images if image.kind == fatbin.PTX]
    compiled = [image for image in library.images if image.kind == fatbin.SASS]
    if all(one.kernels is not None for one in texts) and all(
        one.functions is not None for one in compiled
    ):
        wanted = Counter((f.name, f.threads) for one in compiled for f in one.functions or ())
        found = Counter((k.name, k.threads) for one in texts for k in one.kernels or ())
        differing = {name for name, _ in (wanted - found) + (found - wanted)}
        if differing:
            yield Finding(
                "ptx",
                library.path,
                "expected PTX of each kernel in machine code, for the same largest block, found it "
                f"to differ in {some(sorted(differing))}; build it again from an empty directory",
            )
    toolkit = manifest.toolkit.version
    release = [int(part[:6]) for part in toolkit.split(".") if part.isdecimal()]
    newest = (release[0] - _VERSIONS_APART, release[1]) if len(release) > 1 else None
    for form in sorted({one.form for one in texts}):
        if newest is not None and form > newest:
            yield Finding(
                "ptx",
                library.path,
                f"expected PTX of version {dotted(newest)} or older, as {toolkit} writes it, found "
                f"{dotted(form)}, which drivers of that CUDA refuse; build it again",
            )
