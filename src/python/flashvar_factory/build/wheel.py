"""Makes wheels: one of every binary distribution, and the pure ones of the project; its sdist."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from flashvar.errors import ConfigurationError
from flashvar_factory.build import binary_project, cmake, process, source
from flashvar_factory.build.binary_project import string
from flashvar_factory.build.configure import BuildPlan, configure, write_if_changed
from flashvar_factory.config import toml_table
from flashvar_factory.config.expand import Build
from flashvar_factory.config.schema import FILE_NAME, Config
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive
from flashvar_factory.toolchain import older_cuda
from flashvar_factory.toolchain.nvcc import Toolchain

FOLDER: Final = "build/wheels"
# What a build imports from the environment that it runs in, in the versions that are there: the
# backend, and what `write-sbom` needs, which CMake calls when it installs.
REQUIRED: Final = ("scikit-build-core", "cyclonedx-python-lib")

# The option of the build frontend, and how the file that it makes ends.
WHEEL: Final = ("--wheel", ".whl")
SDIST: Final = ("--sdist", ".tar.gz")


def tag(machine: str) -> str:
    """The tag of a binary wheel: any Python, glibc 2.28 or newer."""
    return f"py3-none-manylinux_2_28_{machine}"


def binary(
    config: Config,
    build: Build,
    toolchain: Toolchain,
    *,
    root: Path,
    output: Path,
    jobs: int | None,
) -> Path:
    """Build the wheel of one binary distribution into `output`."""
    toolchain = older_cuda.complete(toolchain, build.target.toolkit, root)
    directory = root / FOLDER / build.platform / build.distribution
    with process.locked(directory):
        plan = configure(config, build, toolchain, root=root, directory=directory)
        write_if_changed(directory / "pyproject.toml", pyproject(plan, config, toolchain, root))
        for name in binary_project.license_files(root):
            shutil.copyfile(root / name, directory / name)
        cmake.claim(plan, toolchain, root)
        settings = [f"wheel.tags={tag(build.platform)}", f"build.tool-args=-j{_jobs(jobs)}"]
        return _build(root, directory, directory, build.stem, output, settings)


def has_pure(root: Path) -> bool:
    """Whether the project has a wheel of its own: binary wheels may be all that there is."""
    return (root / "pyproject.toml").is_file()


def packages(config: Config, root: Path) -> dict[str, Path]:
    """The folders of distributions beside the project's own, by name: pure, of its version."""
    owners = {canonicalize_name(config.project.name): f"the project in {FILE_NAME}"}
    for name, target in config.targets.items():
        owners[canonicalize_name(target.distribution)] = f"{name} in {FILE_NAME}"
    found: dict[str, Path] = {}
    for file in sorted((root / "packages").glob("*/pyproject.toml")):
        name = canonicalize_name(str(toml_table.plain(file)["project"]["name"]))
        if name in owners:
            raise ConfigurationError(
                f"{file}: expected a distribution of its own, found {name!r}, that of "
                f"{owners[name]}; rename one"
            )
        owners[name] = str(file)
        found[name] = file.parent
    return found


def makers(config: Config, root: Path) -> dict[str, Callable[[Path], Path]]:
    """What makes each file without a binary, in the folder it is given: by what it is."""
    found: dict[str, Callable[[Path], Path]] = {}
    if has_pure(root):
        found["sdist"] = lambda output: sdist(config, root=root, output=output)
        found["pure"] = lambda output: pure(config, root=root, output=output)
    for name, folder in packages(config, root).items():
        found[name] = partial(_of_package, root, name, folder)
    return found


def _of_package(root: Path, name: str, folder: Path, output: Path) -> Path:
    directory = root / FOLDER / name
    with process.locked(directory):
        return _build(root, folder, directory, name.replace("-", "_"), output, [])


def pure(config: Config, *, root: Path, output: Path) -> Path:
    """Build the wheel of the project itself, which holds no binary, into `output`."""
    return _of_project(config, root, output, WHEEL)


def sdist(config: Config, *, root: Path, output: Path) -> Path:
    """Pack the sources of the project into `output`."""
    return _of_project(config, root, output, SDIST)


def _of_project(config: Config, root: Path, output: Path, kind: tuple[str, str]) -> Path:
    name = config.project.name
    directory = root / FOLDER / name
    with process.locked(directory):
        return _build(root, root, directory, name, output, [], kind)


def pyproject(plan: BuildPlan, config: Config, toolchain: Toolchain, root: Path) -> str:
    """The project of one binary distribution: CMake's output, found by an entry point."""
    defines = "\n".join(
        f"{key} = {string(value)}" for key, value in cmake.definitions(plan, toolchain).items()
    )
    head = binary_project.head(
        plan.build,
        config,
        plan.version,
        requires=REQUIRED,
        licenses=binary_project.license_files(root),
    )
    return f"""\
{head}\
build-dir = {string(cmake.FOLDER)}
cmake.source-dir = {string(root.as_posix())}

[tool.scikit-build.cmake.define]
{defines}
"""


def _jobs(jobs: int | None) -> int:
    return jobs or cmake.processors()


def _build(
    root: Path,
    project: Path,
    directory: Path,
    stem: str,
    output: Path,
    settings: Iterable[str],
    kind: tuple[str, str] = WHEEL,
) -> Path:
    """Run the build frontend on `project`; the one new file, older ones of `stem` removed.

    Until it is whole, the file is in `directory`, where nobody else works.

    Raises:
        ConfigurationError: SOURCE_DATE_EPOCH is no time; nothing was compiled yet.
        PackagingError: the build failed.
    """
    archive.epoch()
    option, ending = kind
    fresh = directory / "made"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "build", option, "--no-isolation", "--outdir", str(fresh)]
    command += [f"-C{setting}" for setting in settings]
    environment = {**os.environ, "PATH": os.pathsep.join([_scripts(), os.environ.get("PATH", "")])}
    committed = source.committed(root)
    if committed is not None:  # the time of every file in the archive
        environment.setdefault("SOURCE_DATE_EPOCH", str(committed))
    done = process.run([*command, str(project)], env=environment)
    made = sorted(fresh.glob(f"*{ending}"))
    if done.returncode != 0 or len(made) != 1:
        raise PackagingError(
            f"{stem}: expected one file, found {len(made)} and exit code {done.returncode} of "
            "the build, see above"
        )
    target = output / made[0].name
    _move(made[0], target)
    # A wheel for another platform is no older one.
    same = target.name.rpartition("-")[2] if kind is WHEEL else ending
    for stale in set(output.glob(f"{stem}-*{same}")) - {target}:
        stale.unlink()
    return target


def _move(made: Path, target: Path) -> None:
    """Move a file to its name at once, also onto another disk, which may be full."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.move(made, partial)
        partial.replace(target)
    except BaseException:  # an interrupt too
        partial.unlink(missing_ok=True)
        raise


def _scripts() -> str:
    """Where cmake and ninja of this Python's environment are."""
    return str(Path(sys.executable).parent)
