"""Wheels of a release, built once for all tests; how to call the factory; helpers to import."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flashvar_factory.audit import platform_tag
from flashvar_factory.config import schema
from flashvar_factory.config.schema import Config, Target
from flashvar_factory.config.this_machine import PROCESSOR
from flashvar_factory.release import smoke

if TYPE_CHECKING:
    from fake_release import Case

sys.path.insert(0, str(Path(__file__).parent))

Factory = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-wheel",
        action="store_true",
        help="build the wheels of a release with all their kernels, not a sample of these",
    )
    parser.addoption(
        "--network", action="store_true", help="run documented commands that fetch from PyPI"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker build the release while the other one does what needs no file of it.

    Then come the other files that need the release, and last those that work in its project, where
    they keep others waiting.
    """
    here = Path(__file__).parent
    ours = [item for item in items if item.path.parent == here]
    working = dict.fromkeys((item.path for item in ours if _asks(item, "sample")), 3)
    needing = dict.fromkeys((item.path for item in ours if _asks(item, "dist")), 2)
    rank = working | needing | dict.fromkeys([*needing][:1], 0)
    ordered = iter(sorted(ours, key=lambda item: rank.get(item.path, 1)))
    items[:] = [next(ordered) if item.path.parent == here else item for item in items]


def _asks(item: pytest.Item, fixture: str) -> bool:
    """Whether a test has a fixture, be it by way of another one."""
    return fixture in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session", autouse=True)
def known_compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Projects with the same compilers ask these once in a run: that takes CMake four seconds."""
    folder = of_all_workers(tmp_path_factory) / "compilers"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KNOWN_COMPILERS", str(folder))
        patch.setenv("CMAKE_TOOLCHAIN_FILE", str(Path(__file__).with_name("known_compilers.cmake")))
        yield


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def projects(request: pytest.FixtureRequest) -> dict[str, Path]:
    """The project of each target: this one, or copies with fewer kernels.

    The copies lie in build/, so that what did not change is not compiled again by a later run.
    """
    from checkout import alone, committed_copy
    from release_sample import PARTS

    if request.config.getoption("every_wheel", default=False):
        return dict.fromkeys(here(schema.read(ROOT / "variants.toml")), ROOT)
    found = {}
    for folder, part in PARTS.items():
        copy = ROOT / "build" / folder
        with alone(copy):
            committed_copy(copy, {"variants.toml": part.variants().encode()}, part.without)
        found |= {
            name: copy for name in here(schema.read(copy / "variants.toml")) if name in part.targets
        }
    return found


def here(config: Config) -> Iterator[str]:
    """The targets of this machine's processor."""
    return (name for name, one in config.targets.items() if PROCESSOR in one.platforms)


@pytest.fixture(scope="session")
def sample(projects: dict[str, Path]) -> Path:
    """The project with every op, which builds the wheels without a binary too."""
    return next(iter(projects.values()))


@pytest.fixture(scope="session")
def configs(projects: dict[str, Path]) -> dict[str, Config]:
    """What the project of each target builds."""
    return {name: schema.read(root / "variants.toml") for name, root in projects.items()}


@pytest.fixture(autouse=True)
def _in_the_sample(request: pytest.FixtureRequest) -> None:
    """Skip what is asked of a binary that the sample lacks."""
    callspec = getattr(request.node, "callspec", None)
    target = None if callspec is None else callspec.params.get("target")
    if not isinstance(target, Target):
        return
    if target.kind.name not in request.getfixturevalue("projects"):
        pytest.skip("not in the sample of a release: nox -s every-wheel builds it")


@pytest.fixture(scope="session")
def factory() -> Factory:
    """`factory(root, *arguments)` runs `python -m flashvar_factory` there, its own or this one."""

    def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        home = root if (root / "src" / "python").is_dir() else ROOT
        environ = {**os.environ, "PYTHONPATH": str(home / "src" / "python")}
        environ.pop("PYTHONUNBUFFERED", None)  # in what order is said what must not depend on it
        return subprocess.run(
            [sys.executable, "-m", "flashvar_factory", "--root", str(root), *arguments],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


@pytest.fixture(scope="session")
def dist(
    factory: Factory, projects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the wheels of a release; objects of an earlier run are used again."""
    from checkout import alone

    run = of_all_workers(tmp_path_factory)  # the first worker builds
    folder = run / "dist"
    of_project: dict[Path, list[str]] = {}
    for name, root in projects.items():
        of_project.setdefault(root, []).append(name)
    with alone(next(iter(of_project))):
        if not folder.is_dir():
            for root, names in of_project.items():
                done = factory(root, "wheels", *names, "--output", str(run / "unfinished"))
                assert done.returncode == 0, done.stdout[-5000:]
            (run / "unfinished").rename(folder)
    return folder


@pytest.fixture(scope="session")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every binary wheel unpacked into one folder, as an installer would."""
    folder = tmp_path_factory.mktemp("unpacked")
    for wheel in dist.glob("flashvar_*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A fake release."""
    import fake_release

    return fake_release.make(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def on_paper() -> Iterator[None]:
    """The library needs nothing that auditwheel could name; one installer, and no real torch."""
    policy = platform_tag.Policy("manylinux_2_17_x86_64", ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform_tag, "ask", lambda wheel, name, brought: policy)
        patch.setattr(smoke, "INSTALLERS", ("uv",))  # pip takes seconds
        patch.delenv("PIP_FIND_LINKS", raising=False)
        yield


@pytest.fixture
def case(made: Case, tmp_path: Path) -> Case:
    """A copy of it, to plant a fault in."""
    import fake_release

    return fake_release.clone(made, tmp_path)


@pytest.fixture
def case_files(made: Case, tmp_path: Path) -> Case:
    """A copy of its files, to plant a fault in these alone: a clone takes as long as a check."""
    import fake_release

    return fake_release.copied(made, tmp_path)
