"""The bill of materials of a binary wheel: complete, valid, and the same every time."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_wheels
import pytest
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation import make_schemabased_validator
from fakes import manifest

from flashvar.binaries.manifest import SourceRevision
from flashvar_factory.build import sbom, wheel
from flashvar_factory.build.sbom import Link, Part
from flashvar_factory.build.self_contained import group_of
from flashvar_factory.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = manifest("90a")
LINK = Link(
    "GNU",
    "12.2.0",
    cudart=Part("libcudart_static.a", "13.0", "1" * 64),
    libstdcxx=Part("libstdc++.a", "12.2.0", "2" * 64),
    glibc=Part("glibc-2.28-x86_64.syms", "2.28", "3" * 64),
)
PLAIN = replace(LINK, libstdcxx=None, glibc=None)
EPOCH = 1700000000
PLACE = "flashvar_sm90-0.1.0.dist-info/sboms/flashvar-sm90.cdx.json"


def document(link: Link = LINK, **changes: Any) -> Any:
    text = sbom.document(replace(MANIFEST, **changes), link, "Apache-2.0", EPOCH)
    return json.loads(text)


@pytest.mark.parametrize("link", [LINK, PLAIN], ids=["manylinux", "plain"])
def test_the_librarys_own_validator_takes_it(link: Link) -> None:
    validator = make_schemabased_validator(OutputFormat.JSON, SchemaVersion.V1_6)
    assert validator.validate_str(sbom.document(MANIFEST, link, "Apache-2.0", EPOCH)) is None


@pytest.mark.parametrize(
    ("name", "version", "digest", "scope"),
    [
        ("nvcc", "13.0.88", None, "excluded"),
        ("GNU-c++", "12.2.0", None, "excluded"),
        ("cudart-static", "13.0", "1" * 64, None),
        ("libstdc++", "12.2.0", "2" * 64, None),
        ("glibc-stubs", "2.28", "3" * 64, "excluded"),
    ],
)
def test_component(name: str, version: str, digest: str | None, scope: str | None) -> None:
    (found,) = (one for one in document()["components"] if one["name"] == name)
    assert found["version"] == version
    assert found.get("scope") == scope
    hashes = [{"alg": "SHA-256", "content": digest}] if digest else []
    assert found.get("hashes", []) == hashes


def test_the_wheel_itself() -> None:
    found = document()["metadata"]
    described = found["component"]
    assert (described["name"], described["version"]) == ("flashvar-sm90", "0.1.0")
    assert described["purl"] == "pkg:pypi/flashvar-sm90@0.1.0"
    assert described["licenses"] == [{"expression": "Apache-2.0"}]
    assert described["pedigree"]["commits"] == [{"uid": "0" * 40}]
    (library,) = described["components"]
    assert library["name"] == "libflashvar_sm90.so"
    assert library["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]
    assert found["timestamp"] == "2023-11-14T22:13:20+00:00"


def test_what_is_inside_is_a_dependency() -> None:
    depends = {row["ref"]: row.get("dependsOn") for row in document()["dependencies"]}
    assert depends["flashvar-sm90"] == ["cudart-static", "libstdc++"]


def test_a_plain_link_brings_no_archives() -> None:
    names = {component["name"] for component in document(PLAIN)["components"]}
    assert names == {"nvcc", "GNU-c++", "cudart-static"}


@pytest.mark.parametrize(
    ("dirty", "said"), [(None, "unknown"), (True, "true"), (False, "false")], ids=str
)
def test_source(dirty: bool | None, said: str) -> None:
    found = document(source=SourceRevision(None, dirty, "4" * 64))["metadata"]["component"]
    assert "pedigree" not in found
    assert {row["name"]: row["value"] for row in found["properties"]} == {
        "source:dirty": said,
        "source:hash": "4" * 64,
    }


def test_the_serial_number_is_that_of_the_content() -> None:
    assert document() == document()
    assert document()["serialNumber"] != document(PLAIN)["serialNumber"]
    assert document()["serialNumber"] != document(version="0.1.1")["serialNumber"]


def put(folder: Path, files: dict[str, bytes], tag: str = fake_wheels.PLATFORM) -> Path:
    return fake_wheels.put(folder, "flashvar_sm90", "0.1.0", f"py3-none-{tag}", files)


def test_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = sbom.document(MANIFEST, LINK, "Apache-2.0", EPOCH)
    path = put(tmp_path, {PLACE: text.encode()})
    assert sbom.read(path) == {"flashvar-sm90.cdx.json": text}
    assert main(["sbom", str(path)]) == 0
    assert "inside    libstdc++      12.2.0" in capsys.readouterr().out


def test_a_wheel_is_where_the_shell_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `audit` and `verify`: the folder of a project has nothing to do with it."""
    path = put(tmp_path, {PLACE: sbom.document(MANIFEST, LINK, "Apache-2.0", EPOCH).encode()})
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["--root", "project", "sbom", path.name]) == 0
    assert "inside    libstdc++      12.2.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", r"expected CycloneDX 1\.6, found: 'bomFormat' is a required property"),
        (
            '{"bomFormat": "CycloneDX"}',
            r"expected CycloneDX 1\.6, found: 'specVersion' is a required property",
        ),
        (
            '{"bomFormat": "CycloneDX", "specVersion": "1.5"}',
            r"expected CycloneDX 1\.6, found: 1\.5",
        ),
        ("no JSON", "expected JSON, found: Expecting value.*"),
        (" " * sbom.LIMIT + "{}", "expected at most 65,536 bytes, found 65,538"),
    ],
    ids=["nothing", "half", "older", "no JSON", "long"],
)
def test_invalid_document(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the file once, and the document in it once."""
    path = put(tmp_path, {PLACE: text.encode()})
    assert main(["sbom", str(path)]) != 0
    where = re.escape(f"flashvar_factory sbom: {path}: flashvar-sm90.cdx.json: ")
    assert re.fullmatch(
        f"{where}{words}; build it again with nox -s wheels\n", capsys.readouterr().err
    )


@pytest.mark.parametrize("files", [{}, {PLACE.replace("sboms", "other"): b"{}"}])
def test_a_binary_wheel_without(
    files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sbom", str(put(tmp_path, files))]) == 5
    assert "expected .dist-info/sboms/*.cdx.json, found none" in capsys.readouterr().err


SHORT = {
    "nothing": ({}, "CycloneDX 1.6, without a serial number"),
    "no version": ({"components": [{"type": "library", "name": "a"}]}, "inside    a"),
    "two hashes": (
        {
            "components": [
                {
                    "type": "library",
                    "name": "a",
                    "hashes": [
                        {"alg": "MD5", "content": "0" * 32},
                        {"alg": "SHA-256", "content": "1" * 64},
                    ],
                }
            ]
        },
        "1" * 16,
    ),
    "control characters": (
        {"components": [{"type": "library", "name": "a\x1b[2J\nb"}]},
        r"a\x1b[2J\nb",
    ),
}


@pytest.mark.parametrize(("fields", "line"), SHORT.values(), ids=SHORT)
def test_a_valid_document_that_says_little(
    fields: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", **fields})
    assert main(["sbom", str(put(tmp_path, {PLACE: text.encode()}))]) == 0
    assert line in capsys.readouterr().out


def test_a_pure_wheel_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sbom", str(put(tmp_path, {}, "any"))]) == 0
    assert "no binary in it" in capsys.readouterr().out


def test_what_wheels_are_built_with_is_pinned_once() -> None:
    document = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    pins = {pin.partition("==")[0].partition("[")[0]: pin for pin in group_of("build")}
    assert set(wheel.REQUIRED) <= set(pins)
    assert pins["scikit-build-core"] in document["build-system"]["requires"]
