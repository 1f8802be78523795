"""The SBOMs of a release agree on what is linked into its libraries."""

from __future__ import annotations

import json
from pathlib import Path

import fake_artifacts
import pytest

from flashvar_factory.errors import ReleaseError
from flashvar_factory.release import checks


def document(digest: str) -> str:
    """The SBOM of a wheel whose CUDA runtime has this hash."""
    sbom = fake_artifacts.sbom_of(fake_artifacts.manifest())
    for one in sbom["components"]:
        if one["name"] == "cudart-static":
            one["hashes"][0]["content"] = digest * 64
    return json.dumps(sbom)


def test_one_runtime_for_each_platform() -> None:
    checks.require_same_parts(
        [
            (Path("a.whl"), "linux_x86_64", document("1")),
            (Path("b.whl"), "linux_x86_64", document("1")),
            (Path("c.whl"), "linux_aarch64", document("2")),
        ]
    )


def test_two_runtimes_of_one_version() -> None:
    with pytest.raises(ReleaseError, match=r"one hash of cudart-static 13\.0 .* in b\.whl"):
        checks.require_same_parts(
            [
                (Path("a.whl"), "linux_x86_64", document("1")),
                (Path("b.whl"), "linux_x86_64", document("2")),
            ]
        )
