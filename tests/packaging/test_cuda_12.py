"""The wheels for drivers of CUDA 12: what nvcc 13 compiles, as machine code of CUDA 12.9."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import pytest

from flashvar.binaries import manifest
from flashvar_factory.audit import facts
from flashvar_factory.build import sbom
from flashvar_factory.config import schema
from flashvar_factory.config.schema import Target

CONFIG = schema.read(Path(__file__).parents[2] / "variants.toml")
OLDER = {
    name: target
    for name, target in CONFIG.targets.items()
    if target.toolkit is not None and platform.machine() in target.platforms
}
every_older = pytest.mark.parametrize("target", OLDER.values(), ids=OLDER)


def folder(unpacked: Path, target: Target) -> Path:
    return unpacked / target.distribution.replace("-", "_")


@every_older
def test_machine_code_is_what_older_drivers_load(target: Target, unpacked: Path) -> None:
    (path,) = folder(unpacked, target).glob("*.so")
    images = facts.read_library(path.name, path.read_bytes(), "").images
    assert images
    # From 10.0 on the format does not tell, but the note of ptxas does.
    told = None if target.architecture.major >= 10 else True
    assert {(one.kind, one.before_13) for one in images} == {("sass", told)}
    assert {one.toolkit for one in images} == {None if told else target.toolkit.version}
    assert "zstd" not in {one.compression for one in images}


@every_older
def test_the_manifest_states_both_toolkits(target: Target, unpacked: Path) -> None:
    assert target.toolkit is not None
    read = manifest.read(folder(unpacked, target) / manifest.FILE_NAME)
    assert read.toolkit.ptxas == target.toolkit.version
    assert read.toolkit.version.startswith("13.")
    assert read.minimum_driver == manifest.MinimumDriver((12, 0), "525")
    assert read.kind == target.kind


@every_older
def test_the_runtime_inside_is_the_older_one(
    target: Target, dist: Path, projects: dict[str, Path]
) -> None:
    """The SBOM has the hash of what was linked in: that is the archive of the older package."""
    assert target.toolkit is not None
    stem = target.distribution.replace("-", "_")
    (wheel,) = dist.glob(f"{stem}-*.whl")
    (text,) = sbom.read(wheel).values()
    (linked,) = [one for one in json.loads(text)["components"] if one["name"] == "cudart-static"]
    folders = f"toolkit-cu*-{target.toolkit.version}-{target.toolkit.runtime_version}-*"
    (archive,) = (projects[target.kind.name] / "build").glob(f"{folders}/lib/libcudart_static.a")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert linked["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert linked["version"] == "12.9"
