"""variant.json of a wheel variant: what an installer would ask, and take, is what was built."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_artifacts
import planted
import pytest
from audited import faults
from fake_artifacts import Wheel

from flashvar_factory.audit import expectations
from flashvar_factory.inspect import archive, variant_metadata

FAKE = fake_artifacts.manifest()
BINARY = ("libflashvar_sm80.so", "manifest.json")
FILE = "flashvar_sm80-0.1.0.dist-info/variant.json"
Document = dict[str, Any]

pytestmark = pytest.mark.usefixtures("auditwheel")


def found(folder: Path, text: bytes | None, label: str = "-sm80") -> list[str]:
    """What the check has against a wheel with this document."""
    more = {} if text is None else {FILE: text}
    path = Wheel(FAKE, label=label, more=more).write(folder)
    return [fault for fault in faults(path) if fault.startswith("variant: ")]


def document() -> Document:
    return variant_metadata.content({"sm80": variant_metadata.properties_of(FAKE)})


def test_nothing_against_it(tmp_path: Path) -> None:
    assert found(tmp_path, variant_metadata.text(document()).encode()) == []


FAULTS: dict[str, tuple[Callable[[Document], object], str]] = {
    "requirement": (
        lambda one: one["providers"]["nvidia"].update(requires=["evil"]),
        "expected providers",
    ),
    "plugin": (
        lambda one: one["providers"]["nvidia"].update({"plugin-api": "evil:Plugin"}),
        "expected providers",
    ),
    "provider": (lambda one: one["providers"].update(evil={}), "expected providers"),
    "priorities": (
        lambda one: one["default-priorities"].update(namespace=["evil"]),
        "expected default-priorities",
    ),
    "older driver": (
        lambda one: one["variants"]["sm80"]["nvidia"].update(cuda_version_lower_bound=["12.0"]),
        "expected variants",
    ),
    "second label": (lambda one: one["variants"].update(sm90={}), "expected variants"),
    "schema": (lambda one: one.update({"$schema": "https://example.org"}), "expected $schema"),
    "key of nobody": (lambda one: one.update(evil=1), "expected evil None, found 1"),
}


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Callable[[Document], object], sentence: str, tmp_path: Path) -> None:
    changed = json.loads(json.dumps(document()))
    plant(changed)
    assert any(sentence in fault for fault in found(tmp_path, json.dumps(changed).encode()))


def test_blanks_are_faults(tmp_path: Path) -> None:
    (fault,) = found(tmp_path, json.dumps(document()).encode())
    assert "expected the text that the factory writes" in fault


@pytest.mark.parametrize("label", ["sm_80", "80", "sm80_cu12", "null", "x", "sm80..."])
def test_label_of_something_else(label: str, tmp_path: Path) -> None:
    properties = variant_metadata.properties_of(FAKE)
    text = variant_metadata.text(variant_metadata.content({label: properties})).encode()
    (fault,) = found(tmp_path, text, f"-{label}")
    assert f"expected the label sm80 of what is in it, found {label}; rename the file" in fault


@pytest.mark.parametrize(
    ("text", "label"),
    [(None, "-sm80"), (b"{}", ""), (b"[]", "-sm80"), (b"{", "-sm80"), (b'{"a": NaN}', "-sm80")],
    ids=["none", "no label", "list", "not JSON", "not a number"],
)
def test_no_document_of_the_label(text: bytes | None, label: str, tmp_path: Path) -> None:
    assert found(tmp_path, text, label)


def variant(checkout: Path, folder: Path, **more: bytes) -> list[str]:
    """What the audit has against the project's wheel with a binary and files more in it."""
    info = "flashvar-0.1.0.dist-info"
    described = replace(planted.described(), version="0.1.0")
    binary = Wheel(described).files()
    tag = "py3-none-manylinux_2_28_x86_64"
    lines = f"Wheel-Version: 1.0\nGenerator: a 1\nRoot-Is-Purelib: false\nTag: {tag}\n"
    metadata = "Metadata-Version: 2.4\nName: flashvar\nVersion: 0.1.0\n"
    properties = variant_metadata.properties_of(described)
    files = {
        "flashvar/__init__.py": b"",
        "flashvar/_version.py": b'__version__ = "0.1.0"\n',
        f"{info}/METADATA": f"{metadata}License-Expression: Apache-2.0\n\n".encode(),
        f"{info}/WHEEL": lines.encode(),
        f"{info}/entry_points.txt": b"",
        f"{info}/variant.json": variant_metadata.document({"sm80": properties}).encode(),
        f"{info}/sboms/flashvar-sm80.cdx.json": binary[planted.SBOM],
        **{f"flashvar/_binaries/sm_80/{f}": binary[f"flashvar_sm80/{f}"] for f in BINARY},
        **more,
    }
    path = folder / f"flashvar-0.1.0-{tag}-sm80.whl"
    archive.write(path, files, info)
    return faults(path, expectations.of(planted.CONFIG, root=checkout))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The sources of such a wheel."""
    root = tmp_path / "checkout"
    pyproject = (
        '[project]\nname = "flashvar"\nversion = "0.1.0"\nlicense = "Apache-2.0"\n'
        '[tool.scikit-build]\nwheel.packages = ["src/python/flashvar"]\n'
    )
    files = {
        "pyproject.toml": pyproject,
        "src/python/flashvar/__init__.py": "",
        "src/python/flashvar/_version.py": '__version__ = "0.1.0"\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_files_beside_the_binary(checkout: Path, tmp_path: Path) -> None:
    assert not any("found others too" in one for one in variant(checkout, tmp_path))
    for name in (
        "flashvar/_binaries/evil.py",
        "flashvar/_binaries/sm_80/evil.py",
        "flashvar/_binaries/sm_90/manifest.json",
        "flashvar-0.1.0.dist-info/sboms/evil.cdx.json",
    ):
        found = variant(checkout, tmp_path, **{name: b"{}"})
        assert any(f"found others too: {name!r}" in one for one in found), found
