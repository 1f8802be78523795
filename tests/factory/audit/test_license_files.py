"""The license texts of a project's own wheel and sdist: the audit knows what the backend packs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from audited import faults
from committed import commit_all

from flashvar_factory.audit import expectations, source_checks
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.config import schema

ROOT = Path(__file__).parents[3]
CONFIG = schema.read(ROOT / "variants.toml")
PYPROJECT = """\
[build-system]
requires = ["scikit-build-core>=1.1"]
build-backend = "scikit_build_core.build"

[project]
name = "flashvar"
version = "1.0"
license = "Apache-2.0"
{project}

[tool.scikit-build]
wheel.cmake = false
wheel.packages = ["src/flashvar"]
{backend}
"""
BUILD = """\
from scikit_build_core import build
build.build_wheel("dist")
build.build_sdist("dist")
"""
# What pyproject.toml states, and the texts that a wheel then has of LICENSE, NOTICE.txt and
# docs/LICENSE.
STATED = {
    "nothing": ("", "", ["LICENSE", "NOTICE.txt"]),
    "names": ('license-files = ["LICENSE"]', "", ["LICENSE"]),
    "patterns": ('license-files = ["**/LICEN[CS]E*"]', "", ["LICENSE", "docs/LICENSE"]),
    "none": ("license-files = []", "", []),
    "the backend's own setting": ("", 'wheel.license-files = ["NOTICE*"]', ["NOTICE.txt"]),
}

pytestmark = pytest.mark.usefixtures("auditwheel")


def built(folder: Path, project: str, backend: str) -> Path:
    """A project with three texts; its wheel and its sdist are in its dist/."""
    files = {
        "pyproject.toml": PYPROJECT.format(project=project, backend=backend),
        CONFIG.project.version_file: '__version__ = "1.0"\n',
        "src/flashvar/__init__.py": "",
        ".gitignore": "/dist/\n",
        **dict.fromkeys(("LICENSE", "NOTICE.txt", "docs/LICENSE"), "Apache\n"),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    commit_all(folder)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def expected(folder: Path) -> Expectations:
    return expectations.of(CONFIG, root=folder)


@pytest.mark.parametrize(("project", "backend", "texts"), STATED.values(), ids=STATED)
def test_what_the_backend_packs(
    project: str, backend: str, texts: list[str], tmp_path: Path
) -> None:
    folder = built(tmp_path, project, backend)
    (wheel,) = folder.glob("dist/*.whl")
    (sdist,) = folder.glob("dist/*.tar.gz")
    assert faults(wheel, expected(folder)) == []
    assert source_checks.audit_sdist(sdist, expected(folder)) == []
    for name in texts:
        (folder / name).write_text("another\n", encoding="utf-8")
    found = "; ".join(faults(wheel, expected(folder)))
    assert [name for name in texts if f"licenses/{name}'" in found] == texts
