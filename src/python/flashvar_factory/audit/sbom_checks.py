"""Checks the SBOM of a wheel against its manifest, its library and its metadata."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from flashvar.binaries.manifest import Manifest
from flashvar_factory.audit import glibc_symbols, sbom_fields
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.build import sbom as documents
from flashvar_factory.build import source
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import json_text

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LINKED = ("cudart-static", "glibc-stubs", "libstdc++")
_DIRTY = {None: "unknown", True: "true", False: "false"}
_FILES = {"cudart-static": "libcudart_static.a", "libstdc++": "libstdc++.a"}
_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_SERIAL = re.compile(r"urn:uuid:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\+00:00", re.ASCII)
_GNU = "GNU-c++"
_VERSION = re.compile(r"\d+(?:\.\d+)+", re.ASCII)
# What GCC writes into each object: "GCC: (Debian 12.2.0-14) 12.2.0".
_GCC = re.compile(rb"GCC: \([^\0]{1,200}\) (\d+\.\d+\.\d+)")
_CLANG = b"clang version"  # the same of Clang, beside the GCC of the C runtime's first objects
# The name of the type of exceptions of other languages, which its unwinder has.
_OF_LIBSTDCXX = b"N10__cxxabiv119__foreign_exceptionE\0"


def sbom(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The SBOM describes this wheel and its library, and lists only known parts."""
    for library, manifest in pairs(wheel):
        where = f"{wheel.info}/sboms/{documents.file_name(manifest.distribution)}"
        content = wheel.files.get(where)
        if content is None:
            yield Finding("sbom", where, "expected an SBOM, found none; build the wheel again")
            continue
        try:
            if len(content) > documents.LIMIT:
                raise PackagingError(
                    f"expected at most {documents.LIMIT:,} bytes, found {len(content):,}"
                )
            document = json_text.parse(content, where)
            if (json.dumps(document, indent=1) + "\n").encode() != content:
                raise PackagingError(
                    "expected the text that the factory writes, found other spaces or characters"
                )
            rows = list(_rows(document, library, manifest, expected))
        except PackagingError as error:
            yield Finding("sbom", where, str(error).removeprefix(f"{where}: "))
            continue
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            yield Finding(
                "sbom", where, f"expected CycloneDX as this factory writes it, found: {error!r}"
            )
            continue
        for what, wanted, found in rows:
            if wanted != found:
                yield Finding("sbom", where, f"expected {what} {wanted!r}, found {found!r}")


def _rows(
    document: Mapping[str, Any], library: Library, manifest: Manifest, expected: Expectations
) -> Iterator[tuple[str, object, object]]:
    """What has to be equal: of the wheel, and of the document."""
    yield "format", ("CycloneDX", "1.6"), (document["bomFormat"], document["specVersion"])
    yield "version of the document", "1", json.dumps(document["version"])
    yield "schema", _SCHEMA, document.get("$schema", _SCHEMA)
    for field, place, is_right, words in (
        ("serialNumber", document, _SERIAL.fullmatch, "urn:uuid: and a UUID"),
        ("timestamp", document["metadata"], _is_time, "a time in UTC, to the second"),
    ):
        if field in place and not is_right(place[field]):
            yield field, words, place[field]
    yield "unknown fields", [], sorted(sbom_fields.strange(document))
    root = document["metadata"]["component"]
    name, version = manifest.distribution, manifest.version
    yield "component", (name, version), (root["name"], root["version"])
    yield "purl", f"pkg:pypi/{name}@{quote(version, safe='')}", root["purl"]
    kinds = root["type"], [one["type"] for one in root["components"]]
    yield "kinds", ("library", ["file"]), kinds
    yield (
        "description",
        f"Machine code for {manifest.architecture.code}, {manifest.platform}",
        root["description"],
    )
    if expected.config is not None:
        license = [{"expression": expected.config.project.license}]
        yield "license", license, root["licenses"]
    commits = [{"uid": manifest.source.revision}] if manifest.source.revision else None
    yield "commits", commits, root.get("pedigree", {}).get("commits")
    yield "number of properties", 2, len(root["properties"])
    properties = {row["name"]: row["value"] for row in root["properties"]}
    wanted = {"source:dirty": _DIRTY[manifest.source.dirty], "source:hash": manifest.source.hash}
    yield "source", wanted, properties
    files = [(one["name"], one["version"], _hashes(one)) for one in root["components"]]
    yield "library", [(manifest.library.file, version, [library.sha256])], files
    yield from _parts({one["name"]: one for one in document["components"]}, library, manifest)
    for one in (root, *root["components"], *document["components"]):
        yield f"bom-ref of {one['name']}", one["name"], one.get("bom-ref")
    names = [one["name"] for one in document["components"]]
    yield "components, each once,", sorted(set(names)), sorted(names)
    inside = sorted({"cudart-static", "libstdc++"} & set(names))
    yield "number of dependencies", len(names) + 1, len(document["dependencies"])
    references = {row["ref"]: row.get("dependsOn", []) for row in document["dependencies"]}
    yield "dependencies", {**{key: [] for key in names}, name: inside}, references


def _parts(
    found: Mapping[str, Mapping[str, Any]], library: Library, manifest: Manifest
) -> Iterator[tuple[str, object, object]]:
    """The components: what is linked in, and what compiled and linked it."""
    toolkit = manifest.toolkit
    compilers = sorted(name for name in found if name.endswith("-c++"))
    ptxas = {} if toolkit.ptxas is None else {"ptxas": toolkit.ptxas}
    wanted = {toolkit.compiler, "cudart-static", *compilers[:1], *ptxas}
    optional = {"libstdc++", "glibc-stubs"} & found.keys()
    yield "components", sorted(wanted | optional), sorted(found)
    yield "number of C++ compilers", 1, len(compilers)
    symbols = glibc_symbols.file_name(manifest.platform.removeprefix("linux_"))
    for name, one in found.items():
        yield f"kind, license and purl of {name}", _fixed(one), _stated(one)
        words = one.get("description"), one.get("scope")
        yield f"description and scope of {name}", _words(name, symbols), words
    comment = b"\0".join(bytes(one.content) for one in library.file.named(".comment"))
    made_by = _GCC.findall(comment)
    if made_by and _CLANG not in comment:
        yield "C++ compiler, as the library's .comment says,", [_GNU], compilers
    if _OF_LIBSTDCXX in bytes(library.file.data):
        yield "libstdc++, which is in the library,", "listed", _listed("libstdc++" in found)
    for name in compilers:
        version = found[name]["version"]
        if _VERSION.fullmatch(version) is None:
            yield f"version of {name}", "numbers and dots", version
        if made_by and name == _GNU and version.encode() not in made_by:
            found_in = ", ".join(sorted({one.decode() for one in made_by}))
            yield f"version of {name}, as the library's .comment says,", found_in, version
    yield toolkit.compiler, toolkit.version, found[toolkit.compiler]["version"]
    for name, version in ptxas.items():
        if name in found:
            yield name, version, found[name]["version"]
    release = ".".join(toolkit.machine_code.split(".")[:2])
    yield "cudart-static", release, found["cudart-static"]["version"]
    for name in sorted({"cudart-static", *optional}):
        hashes = _hashes(found[name])
        if [*map(_is_sha256, hashes)] != [True]:
            yield f"hashes of {name}", "one SHA-256", hashes
    if "libstdc++" in found:
        compiler = found[compilers[0]]["version"] if compilers else None
        yield "libstdc++", compiler, found["libstdc++"]["version"]
    listed = source.HOME / source.CMAKE / symbols
    if "glibc-stubs" in found and listed.is_file():
        digest = hashlib.sha256(listed.read_bytes()).hexdigest()
        yield (
            "glibc-stubs",
            ("2.28", [digest]),
            (
                found["glibc-stubs"]["version"],
                _hashes(found["glibc-stubs"]),
            ),
        )


def _fixed(component: Mapping[str, Any]) -> tuple[object, ...]:
    """What follows from the name and the version of a component."""
    name, version = component["name"], component["version"]
    kind = "library" if name in _LINKED else "application"
    licensed: list[object] = []
    if name in ("cudart-static", "nvcc", "ptxas"):
        licensed = [{"license": {"name": documents.NVIDIA}}]
    elif name == "libstdc++":
        licensed = [{"expression": documents.GCC}]
    purl = f"pkg:generic/{quote(name, safe='')}@{quote(version, safe='')}" if licensed else None
    return kind, licensed, purl


def _words(name: str, symbols: str) -> tuple[str | None, str | None]:
    """The description of a component, and its scope; `symbols` is what stubs are made of."""
    if name == "glibc-stubs":
        return documents.stubs(symbols), "excluded"
    if name in _FILES:
        return documents.linked(_FILES[name]), None
    return documents.DESCRIPTIONS.get("C++" if name.endswith("-c++") else name), "excluded"


def _stated(component: Mapping[str, Any]) -> tuple[object, ...]:
    return component.get("type"), component.get("licenses", []), component.get("purl")


def _hashes(component: Mapping[str, Any]) -> list[str]:
    """The SHA-256 of a component; of other hashes their kind, which nobody expects."""
    rows = component.get("hashes", [])
    return [row["content"] if row["alg"] == "SHA-256" else row["alg"] for row in rows]


def _listed(listed: bool) -> str:
    return "listed" if listed else "not listed"


def _is_time(text: str) -> bool:
    """Whether it is a time in UTC, to the second, of a day that there is."""
    try:
        return _TIME.fullmatch(text) is not None and bool(datetime.fromisoformat(text))
    except ValueError:
        return False


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None
