"""Tests see no binaries but their own, also where a development build is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
import without_project
from installed import put_wheel

ROOT = Path(__file__).parents[2]
FOUND = """\
import importlib.metadata, json, shutil, sys
found = sorted({one.name for one in importlib.metadata.distributions()})
print(json.dumps([found, shutil.which("flashvar"), shutil.which("other"), sys.prefix]))
"""


def put_distribution(site: Path, name: str, *files: str) -> None:
    """An installed distribution with these files, of which paths begin in `site`."""
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    for file in files:
        (site / file).write_text(f"#!{site.parents[2]}/bin/python\nprint('run')\n")
        (site / file).chmod(0o755)
    record = [f"{info.name}/METADATA,,", f"{info.name}/RECORD,,", *(f"{one},," for one in files)]
    (info / "RECORD").write_text("\n".join(record))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment with the packages of this one, the project and a development build."""
    made = tmp_path / "environment"
    venv.create(made)
    (site,) = made.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(sysconfig.get_path("purelib"))
    put_distribution(site, "other", "other.py", "../../../bin/other")
    (site / "editable.py").write_text("")
    put_distribution(site, "flashvar", "editable.pth", "../../../bin/flashvar")
    (site / "editable.pth").write_text("import sys; sys.editable = True\n")
    build = tmp_path / "build"
    put_wheel(build, replace(fakes.manifest("80"), version="9.9"), "9.9+hdim64")
    (site / "flashvar-dev.pth").write_text(f"{build}\n")
    return made


def site_of(prefix: Path) -> Path:
    (site,) = prefix.glob("lib/python*/site-packages")
    return site


def test_the_environment_has_all_but_the_project(prefix: Path) -> None:
    first = without_project.environment(prefix, site_of(prefix), os.environ)
    made = Path(first["VIRTUAL_ENV"])
    before = {path: path.lstat().st_ino for path in made.rglob("*")}
    environ = without_project.environment(prefix, site_of(prefix), os.environ)
    assert environ == first
    assert {path: path.lstat().st_ino for path in made.rglob("*")} == before
    done = subprocess.run(
        ["python", "-c", FOUND], env=environ, capture_output=True, text=True, check=True
    )
    names, project, other, where = json.loads(done.stdout)
    assert "other" in names
    assert "pytest" in names
    assert [name for name in names if name.startswith("flashvar")] == []
    assert project is None
    assert (other, where) == (str(made / "bin" / "other"), str(made))
    said = subprocess.run([other], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout == "run\n"
    assert Path(other).read_text().startswith(f"#!{made}/bin/python\n")


def test_what_was_installed_meanwhile_is_there_and_what_was_removed_is_not(prefix: Path) -> None:
    site = site_of(prefix)
    environ = without_project.environment(prefix, site, os.environ)
    copy = Path(environ["VIRTUAL_ENV"], site.relative_to(prefix))
    (site / "other.py").unlink()
    (site / "later.py").write_text("")
    without_project.environment(prefix, site, os.environ)
    assert {"other.py", "later.py"}.intersection(path.name for path in copy.iterdir()) == {
        "later.py"
    }


def test_each_environment_has_its_own_compiled_modules(prefix: Path) -> None:
    site = site_of(prefix)
    copy = prefix / without_project.FOLDER / site.relative_to(prefix)
    (copy / "__pycache__").mkdir(parents=True)
    (copy / "__pycache__" / "other.pyc").write_bytes(b"")
    without_project.environment(prefix, site, os.environ)
    (site / "__pycache__").mkdir()
    without_project.environment(prefix, site, os.environ)
    assert [path.name for path in (copy / "__pycache__").iterdir()] == ["other.pyc"]


def test_an_environment_without_the_project_has_nothing_of_it(prefix: Path) -> None:
    site = site_of(prefix)
    assert {path.name for path in without_project.of_project(site)} == {
        "flashvar-dev.pth",
        "flashvar-1.dist-info",
        "editable.pth",
        "flashvar",
    }
    environ = without_project.environment(prefix, site, os.environ)
    copy = Path(environ["VIRTUAL_ENV"], site.relative_to(prefix))
    assert without_project.of_project(copy) == set()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["tests/packaging", "tests/kernels", "tests/unit"], True),
        (["tests/unit/binaries/test_registry.py::test_development_build_is_built_again"], True),
        (["tests/gpu"], False),
        (["tests/gpu/test_attention.py::test_of_a_device"], False),
        ([str(ROOT / "tests" / "gpu"), "tests/unit"], False),
    ],
)
def test_tests_for_a_gpu_are_about_what_is_installed(arguments: list[str], wanted: bool) -> None:
    assert without_project.wanted(arguments, ROOT) == wanted


def test_pytest_runs_there(prefix: Path) -> None:
    """As somebody types it in the environment of build-dev."""
    test = "tests/unit/binaries/test_registry.py::test_development_build_is_built_again"
    command = [str(prefix / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    environ = {name: one for name, one in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
