"""What the distributions without a binary say of themselves: flashvar, and those of packages/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flashvar_factory.audit import declared_metadata
from flashvar_factory.config import toml_table

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, *(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))]
PYTHON = "Programming Language :: Python :: 3."

of_each = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def project(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = toml_table.plain(folder / "pyproject.toml")["project"]
    return table


def test_there_are_several() -> None:
    assert len(FOLDERS) > 1


@of_each
def test_it_has_the_license(folder: Path) -> None:
    assert declared_metadata.license_files(project(folder), folder) == ["LICENSE"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@of_each
def test_its_pythons_are_those_that_run_the_tests(folder: Path) -> None:
    """The oldest, the newest, and those between."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    pythons = workflow["jobs"]["unit"]["strategy"]["matrix"]["python"]
    tested = [int(version.removeprefix("3.")) for version in pythons]
    named = [
        int(one.removeprefix(PYTHON))
        for one in project(folder)["classifiers"]
        if one.startswith(PYTHON)
    ]
    assert named == [*range(min(tested), max(tested) + 1)]
    assert project(folder)["requires-python"] == f">=3.{min(tested)}"
