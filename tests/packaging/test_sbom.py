"""Every binary wheel says what it is made of."""

from __future__ import annotations

import json
import platform
import zipfile
from pathlib import Path

import pytest

from flashvar.binaries import manifest
from flashvar_factory.build import sbom
from flashvar_factory.config import schema
from flashvar_factory.config.schema import Target

CONFIG = schema.read(Path(__file__).parents[2] / "variants.toml")
# Those of this machine's processor.
HERE = {
    name: target
    for name, target in CONFIG.targets.items()
    if platform.machine() in target.platforms
}


@pytest.mark.parametrize("target", HERE.values(), ids=HERE)
def test_sbom_describes_the_wheel(target: Target, dist: Path) -> None:
    stem = target.distribution.replace("-", "_")
    (wheel,) = dist.glob(f"{stem}-*.whl")
    ((name, text),) = sbom.read(wheel).items()
    with zipfile.ZipFile(wheel) as archive:
        read = manifest.parse(archive.read(f"{stem}/{manifest.FILE_NAME}").decode())
    assert name == f"{target.distribution}.cdx.json"
    document = json.loads(text)
    described = document["metadata"]["component"]
    assert (described["name"], described["version"]) == (target.distribution, read.version)
    assert described["licenses"] == [{"expression": CONFIG.project.license}]
    (library,) = described["components"]
    assert library["hashes"] == [{"alg": "SHA-256", "content": read.library.sha256}]
    versions = {component["name"]: component["version"] for component in document["components"]}
    assert versions["nvcc"] == read.toolkit.version
    assert {"cudart-static", "libstdc++", "glibc-stubs"} < set(versions)


def test_the_pure_wheel_has_nothing_to_declare(dist: Path) -> None:
    (wheel,) = dist.glob("flashvar-*.whl")
    assert sbom.read(wheel) == {}
