"""Makes wheel variants: the project's wheel with one binary embedded, for installers that choose.

Experimental, as PEP 825 and PEP 850 are. Labels and properties follow from the manifests of the
binaries, so variants.toml stays the only list of architectures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashvar.binaries import manifest as manifests
from flashvar.binaries.install_commands import public
from flashvar.binaries.manifest import Manifest
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive, variant_metadata
from flashvar_factory.inspect.variant_metadata import Properties


@dataclass(frozen=True)
class Binary:
    """A binary wheel that becomes the content of a variant."""

    wheel: Path
    tag: str
    files: Mapping[str, bytes]  # of its package, by bare name
    sboms: Mapping[str, bytes]  # by bare name
    manifest: Manifest

    @property
    def variant_label(self) -> str:
        """`smXY`, `smXY_cuN`: the last part of the variant wheel's file name."""
        return self.manifest.kind.extra.replace("-", "_")

    @property
    def properties(self) -> Properties:
        """What a machine must have: the architecture's machine code, and a driver that takes it.

        Providers know the capability alone, `90_real` also where the code is `90a`.
        """
        return variant_metadata.properties_of(self.manifest)


def write(wheels: Path, output: Path, project: str) -> list[Path]:
    """Write the variant wheels of `project` and their index of labels; the paths of all files.

    `wheels` holds the project's own wheel and the binary ones, as `nox -s wheels` leaves them.
    """
    plain, binaries = release(wheels, project)
    name = archive.parse_name(plain.name)
    properties = {binary.variant_label: binary.properties for binary in binaries}
    _check_consistent(binaries, properties)
    output.mkdir(parents=True, exist_ok=True)
    variants = [path for path in output.glob(f"{project}-*.whl") if _is_variant(path)]
    for stale in (*variants, *output.glob(f"{project}-*-variants.json")):
        stale.unlink()
    files = archive.read(plain)
    made = [_write_wheel(output, files, name, variant_metadata.NULL, {}, None)]
    made += [
        _write_wheel(output, files, name, binary.variant_label, binary.properties, binary)
        for binary in binaries
    ]
    listed = output / f"{name.distribution}-{name.version}-variants.json"
    listed.write_text(
        variant_metadata.document({**properties, variant_metadata.NULL: {}}), encoding="utf-8"
    )
    return [*made, listed]


def release(wheels: Path, project: str) -> tuple[Path, list[Binary]]:
    """The project's own wheel in a folder, and the binary ones of its version.

    Raises:
        PackagingError: one is missing, there twice, or of another version.
    """
    plain = _plain(wheels, project)
    found = sorted(wheels.glob(f"{project}_*.whl"))
    # A wheel for any platform holds no binary.
    binaries = [
        _binary(path) for path in found if not archive.parse_name(path.name).tag.endswith("-any")
    ]
    if not binaries:
        raise PackagingError(
            f"{wheels}: expected wheels of binaries beside {plain.name}, found none; "
            "nox -s wheels -- all"
        )
    seen: dict[tuple[str, str], Path] = {}
    for binary in binaries:
        _check_version(binary, archive.parse_name(plain.name).version)
        other = seen.setdefault((binary.variant_label, binary.tag), binary.wheel)
        if other != binary.wheel:
            raise PackagingError(
                f"{wheels}: expected one wheel of each binary, found {other.name} and "
                f"{binary.wheel.name}; keep one of them in the folder"
            )
    return plain, binaries


def _is_variant(wheel: Path) -> bool:
    return archive.parse_name(wheel.name).variant_label is not None


def _plain(wheels: Path, project: str) -> Path:
    named = sorted(wheels.glob(f"{project}-*.whl"))
    found = [path for path in named if not _is_variant(path)]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise PackagingError(
            f"{wheels}: expected one wheel of {project} itself, found {names}; "
            "nox -s wheels -- all makes it where the project has a pyproject.toml"
        )
    return found[0]


def _binary(wheel: Path) -> Binary:
    files = archive.read(wheel)
    found = [name for name in files if re.fullmatch(rf"[^/]+/{manifests.FILE_NAME}", name)]
    if len(found) != 1:
        raise PackagingError(
            f"{wheel}: expected one <package>/{manifests.FILE_NAME}, found {len(found)}"
        )
    package = found[0].partition("/")[0]
    return Binary(
        wheel,
        archive.parse_name(wheel.name).tag,
        _below(files, rf"{re.escape(package)}/"),
        _below(files, r"[^/]+\.dist-info/sboms/"),
        manifests.parse(archive.text(files[found[0]], f"{wheel}: {found[0]}")),
    )


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    """The files of a folder, given as a pattern, by their bare names."""
    matches = ((re.match(rf"{folder}([^/]+)$", name), data) for name, data in files.items())
    return {match[1]: data for match, data in matches if match}


def _check_version(binary: Binary, version: str) -> None:
    found = public(binary.manifest.version)
    if found != public(version):
        raise PackagingError(
            f"{binary.wheel}: expected version {version}, the project's own, found {found}; "
            "nox -s wheels -- all"
        )


def _check_consistent(binaries: Sequence[Binary], properties: Mapping[str, Properties]) -> None:
    """One label means one thing, for every platform that it is built for."""
    for binary in binaries:
        label = binary.variant_label
        if properties[label] != binary.properties:
            raise PackagingError(
                f"{binary.wheel}: expected {label} to mean {properties[label]} on "
                f"every platform, found {binary.properties}; build all with one toolkit"
            )


def _write_wheel(
    output: Path,
    plain: Mapping[str, bytes],
    name: archive.Name,
    label: str,
    properties: Properties,
    binary: Binary | None,
) -> Path:
    info = f"{name.distribution}-{name.version}.dist-info"
    files = {
        **plain,
        f"{info}/variant.json": variant_metadata.document({label: properties}).encode(),
    }
    tag = name.tag
    if binary is not None:
        tag = binary.tag
        folder = f"{name.distribution}/_binaries/{binary.manifest.kind.name}"
        files |= {f"{folder}/{file}": data for file, data in binary.files.items()}
        files |= {f"{info}/sboms/{file}": data for file, data in binary.sboms.items()}
        files[f"{info}/WHEEL"] = _retagged(files[f"{info}/WHEEL"], tag)
    path = output / f"{name.distribution}-{name.version}-{tag}-{label}.whl"
    archive.write(path, files, info)
    return path


def _retagged(wheel: bytes, tag: str) -> bytes:
    """WHEEL of a wheel for one platform."""
    kept = [
        line
        for line in archive.text(wheel, "WHEEL").splitlines()
        if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))
    ]
    return "\n".join([*kept, "Root-Is-Purelib: false", f"Tag: {tag}", ""]).encode()
