"""variant.json of a wheel variant: what an installer would ask, and take, is what was built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fabricated
import pytest
from audited import faults
from fabricated import Wheel

from flashvar_factory.inspect import variant_metadata

PAPER = fabricated.manifest()
FILE = "flashvar_sm80-0.1.0.dist-info/variant.json"
Document = dict[str, Any]

pytestmark = pytest.mark.usefixtures("auditwheel")


def found(folder: Path, text: bytes | None, label: str = "-sm80") -> list[str]:
    """What the check has against a wheel with this document."""
    more = {} if text is None else {FILE: text}
    path = Wheel(PAPER, label=label, more=more).write(folder)
    return [fault for fault in faults(path) if fault.startswith("variant: ")]


def document() -> Document:
    return variant_metadata.content({"sm80": variant_metadata.properties_of(PAPER)})


def test_nothing_against_it(tmp_path: Path) -> None:
    assert found(tmp_path, json.dumps(document()).encode()) == []


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


@pytest.mark.parametrize(
    ("text", "label"),
    [(None, "-sm80"), (b"{}", ""), (b"[]", "-sm80"), (b"{", "-sm80"), (b'{"a": NaN}', "-sm80")],
    ids=["none", "no label", "list", "not JSON", "not a number"],
)
def test_no_document_of_the_label(text: bytes | None, label: str, tmp_path: Path) -> None:
    assert found(tmp_path, text, label)
