"""Fake wheels of every architecture and toolkit of variants.toml pass the audit."""

from __future__ import annotations

from pathlib import Path

import fake_artifacts
import pytest
from audited import faults
from fake_artifacts import Image, Wheel
from planted import VARIANTS

from flashvar.binaries.manifest import Manifest
from flashvar_factory.audit import expectations

pytestmark = pytest.mark.usefixtures("auditwheel")
TARGETS = [name for name, target in VARIANTS.targets.items() if "x86_64" in target.platforms]


def found_in(name: str, described: Manifest, images: list[Image], folder: Path) -> list[str]:
    stem = VARIANTS.targets[name].distribution.replace("-", "_")
    wheel = Wheel(described, fake_artifacts.library(described, *images), stem)
    return faults(wheel.write(folder), expectations.of(VARIANTS))


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_against_a_wheel_without_a_fault(name: str, tmp_path: Path) -> None:
    described = fake_artifacts.complete(VARIANTS, name)
    images = fake_artifacts.images(described.architecture.code, described)
    assert found_in(name, described, images, tmp_path) == []


# From 10.0 on the format of both toolkits is the same.
@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("sm_90", "expected format of the device code to be that of"),
        ("sm_100", "expected toolkit, as the device code states it,"),
    ],
)
@pytest.mark.parametrize(("own", "other"), [("", "-cu12"), ("-cu12", "")])
def test_machine_code_of_the_other_toolkit(
    architecture: str, own: str, other: str, sentence: str, tmp_path: Path
) -> None:
    described = fake_artifacts.complete(VARIANTS, architecture + own)
    images = fake_artifacts.images(
        described.architecture.code, fake_artifacts.complete(VARIANTS, architecture + other)
    )
    found = found_in(architecture + own, described, images, tmp_path)
    assert any(sentence in fault for fault in found), found
