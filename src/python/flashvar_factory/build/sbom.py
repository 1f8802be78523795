"""The SBOM of a binary wheel: a CycloneDX document in its `.dist-info/sboms/` (PEP 770)."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flashvar.binaries.manifest import Manifest
from flashvar_factory.errors import PackagingError, ToolchainError
from flashvar_factory.inspect import archive, json_text
from flashvar_factory.inspect.plain_text import plain

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

# Names are bom-refs too: one document never holds two of one name.
NVIDIA: Final = "CUDA Toolkit End User License Agreement"
GCC: Final = "GPL-3.0-or-later WITH GCC-exception-3.1"
# What a document says of what is not in the library, by the name in it.
DESCRIPTIONS: Final = MappingProxyType(
    {
        "nvcc": "Compiled the device code",
        "ptxas": "Made the machine code",
        "C++": "Compiled the host code, and linked",
    }
)
# Bytes of a document; ours has 3,000. Validators take the square of the time for a longer one.
LIMIT: Final = 1 << 16
_SHOWN: Final = 300  # letters of an error
_AGAIN: Final = "build it again with nox -s wheels"
_FOLDER = re.compile(r"[^/]+\.dist-info/sboms/(?P<name>[^/]+\.cdx\.json)")


@dataclass(frozen=True)
class Part:
    """A file that the linker read."""

    name: str
    version: str
    sha256: str  # hex


@dataclass(frozen=True)
class Link:
    """What went into the library beside the project's own objects."""

    compiler: str  # of C++, e.g. "GNU"
    compiler_version: str
    cudart: Part  # the static CUDA runtime
    libstdcxx: Part | None  # the static C++ library; None where the link was a plain one
    glibc: Part | None  # the list of symbols that stubs were made of; None as well


class Listed(NamedTuple):
    """What a list of components shows of one."""

    name: str
    version: str
    scope: str
    sha256: str  # hex; empty where none is stated


def file_name(distribution: str) -> str:
    """The name of its document in `.dist-info/sboms/`."""
    return f"{distribution}.cdx.json"


def linked(file: str) -> str:
    """The description of a static library."""
    return f"{file}, linked statically"


def stubs(file: str) -> str:
    """The description of stubs that were made of a list of symbols."""
    return f"Made of {file}: the oldest glibc that will do"


def document(manifest: Manifest, link: Link, license_expression: str, epoch: int) -> str:
    """The document: the same text for the same arguments; `epoch` in seconds is its time."""
    try:
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.output import make_outputter
        from cyclonedx.schema import OutputFormat, SchemaVersion
    except ImportError as error:
        raise ToolchainError(
            f"expected cyclonedx-python-lib beside the build backend, found: {error}; "
            "pip install --group build"
        ) from error
    root = _wheel(manifest, license_expression)
    inside, outside = _inside(manifest, link), _outside(manifest, link)
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, repr((manifest, link, license_expression))),
        metadata=BomMetaData(component=root, timestamp=datetime.fromtimestamp(epoch, timezone.utc)),
        components=[*inside, *outside],
    )
    bom.register_dependency(root, inside)
    outputter = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
    return str(outputter.output_as_string(indent=1)) + "\n"


def read(wheel: Path) -> dict[str, str]:
    """The documents in a wheel by file name; none in a wheel for every platform.

    PackagingError when one is no valid CycloneDX, or when a binary wheel lacks it.
    """
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from cyclonedx.validation import make_schemabased_validator

    validator = make_schemabased_validator(OutputFormat.JSON, SchemaVersion.V1_6)
    documents = _documents(archive.read(wheel), wheel)
    if not documents and not archive.parse_name(wheel.name).tag.endswith("-any"):
        raise PackagingError(f"{wheel}: expected .dist-info/sboms/*.cdx.json, found none; {_AGAIN}")
    for name, text in documents.items():
        where = f"{wheel}: {name}"
        try:
            stated = json_text.parse(text.encode(), where)
            error: object = validator.validate_str(text)
            if error is None and stated["specVersion"] != SchemaVersion.V1_6.to_version():
                error = stated["specVersion"]  # which no schema fixes
        except PackagingError as broken:
            raise PackagingError(f"{broken}; {_AGAIN}") from None
        except (ValueError, RecursionError) as broken:
            error = broken
        if error is not None:
            # Behind its first lines the error repeats the schema and the whole document.
            found = " ".join(str(error).partition("\n\n")[0].split())[:_SHOWN]
            raise PackagingError(f"{where}: expected CycloneDX 1.6, found: {found}; {_AGAIN}")
    return documents


def components(text: str) -> list[Listed]:
    """The components of a valid document: it may leave out everything but their names."""
    return [
        Listed(
            plain(one["name"]),
            plain(one.get("version", "")),
            one.get("scope", "inside"),
            next((row["content"] for row in one.get("hashes", ()) if row["alg"] == "SHA-256"), ""),
        )
        for one in json.loads(text).get("components", ())
    ]


def _documents(files: Mapping[str, bytes], wheel: Path) -> dict[str, str]:
    found = {}
    for path, data in files.items():
        match = _FOLDER.fullmatch(path)
        if match is None:
            continue
        where = f"{wheel}: {match['name']}"
        if len(data) > LIMIT:
            raise PackagingError(
                f"{where}: expected at most {LIMIT:,} bytes, found {len(data):,}; {_AGAIN}"
            )
        found[match["name"]] = archive.text(data, where)
    return found


def _wheel(manifest: Manifest, license_expression: str) -> Component:
    """The distribution that the document describes."""
    from cyclonedx.model.component import Commit, ComponentType, Pedigree

    source = manifest.source
    return _component(
        manifest.distribution,
        manifest.version,
        ComponentType.LIBRARY,
        license_expression=license_expression,
        purl=("pypi", manifest.distribution),
        description=f"Machine code for {manifest.architecture.code}, {manifest.platform}",
        pedigree=Pedigree(commits=[Commit(uid=source.revision)]) if source.revision else None,
        properties={
            "source:hash": source.hash,
            "source:dirty": {None: "unknown", True: "true", False: "false"}[source.dirty],
        },
        components=[
            _component(
                manifest.library.file,
                manifest.version,
                ComponentType.FILE,
                sha256=manifest.library.sha256,
            )
        ],
    )


def _inside(manifest: Manifest, link: Link) -> list[Component]:
    """What is in the shared library."""
    from cyclonedx.model.component import ComponentType

    found = [
        _component(
            "cudart-static",
            link.cudart.version,
            ComponentType.LIBRARY,
            license_name=NVIDIA,
            sha256=link.cudart.sha256,
            purl=("generic", "cudart-static"),
            description=linked(link.cudart.name),
        )
    ]
    if link.libstdcxx is not None:
        found.append(
            _component(
                "libstdc++",
                link.libstdcxx.version,
                ComponentType.LIBRARY,
                license_expression=GCC,
                sha256=link.libstdcxx.sha256,
                purl=("generic", "libstdc++"),
                description=linked(link.libstdcxx.name),
            )
        )
    return found


def _outside(manifest: Manifest, link: Link) -> list[Component]:
    """What made it, and what it was linked against without a copy of it."""
    from cyclonedx.model.component import ComponentScope, ComponentType

    toolkit = manifest.toolkit
    found = [
        _component(
            toolkit.compiler,
            toolkit.version,
            ComponentType.APPLICATION,
            license_name=NVIDIA,
            purl=("generic", toolkit.compiler),
            description=DESCRIPTIONS["nvcc"],
            scope=ComponentScope.EXCLUDED,
        ),
        _component(
            f"{link.compiler}-c++",
            link.compiler_version,
            ComponentType.APPLICATION,
            description=DESCRIPTIONS["C++"],
            scope=ComponentScope.EXCLUDED,
        ),
    ]
    if toolkit.ptxas is not None:
        found.append(
            _component(
                "ptxas",
                toolkit.ptxas,
                ComponentType.APPLICATION,
                license_name=NVIDIA,
                purl=("generic", "ptxas"),
                description=DESCRIPTIONS["ptxas"],
                scope=ComponentScope.EXCLUDED,
            )
        )
    if link.glibc is not None:
        found.append(
            _component(
                "glibc-stubs",
                link.glibc.version,
                ComponentType.LIBRARY,
                sha256=link.glibc.sha256,
                description=stubs(link.glibc.name),
                scope=ComponentScope.EXCLUDED,
            )
        )
    return found


def _component(
    name: str,
    version: str,
    kind: Any,
    *,
    license_expression: str | None = None,
    license_name: str | None = None,
    sha256: str | None = None,
    purl: tuple[str, str] | None = None,
    properties: Mapping[str, str] | None = None,
    components: Sequence[Component] = (),
    **more: Any,
) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
    from packageurl import PackageURL

    licensed = [LicenseExpression(license_expression)] if license_expression else []
    named = [DisjunctiveLicense(name=license_name)] if license_name else []
    return Component(
        name=name,
        version=version,
        type=kind,
        bom_ref=name,
        licenses=[*licensed, *named],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
        purl=PackageURL(purl[0], name=purl[1], version=version) if purl else None,
        properties=[Property(name=key, value=value) for key, value in (properties or {}).items()],
        components=components,
        **more,
    )
