"""Builds development binaries: unpacked wheels in build/dev/site, found like installed ones.

Also makes them part of this Python environment, and shows that they load.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Final

from flashvar.binaries import loader, registry
from flashvar.binaries import manifest as manifests
from flashvar.errors import BinaryError
from flashvar_factory.build import cmake, process
from flashvar_factory.build.configure import BuildPlan, configure, write_if_changed
from flashvar_factory.config.expand import Build
from flashvar_factory.config.schema import Config
from flashvar_factory.toolchain import older_cuda
from flashvar_factory.toolchain.nvcc import Toolchain

FOLDER: Final = "build/dev"


def site(root: Path) -> Path:
    """The folder that stands for site-packages."""
    return root / FOLDER / "site"


def build(
    config: Config, build: Build, toolchain: Toolchain, *, root: Path, jobs: int | None
) -> Path:
    """Compile one binary and put it in `site`; the directory that holds library and manifest.

    The manifest is removed first and comes back last: what an interrupted build leaves is not
    taken for a binary.
    """
    toolchain = older_cuda.complete(toolchain, build.target.toolkit, root)
    directory = root / FOLDER / build.kind.name
    with process.locked(directory):
        plan = configure(config, build, toolchain, root=root, directory=directory, lineinfo=True)
        package = site(root) / build.stem
        (package / manifests.FILE_NAME).unlink(missing_ok=True)
        built = cmake.build(plan, toolchain, root=root, jobs=jobs)
        cmake.install(built, site(root))
        _write_dist_info(plan, config, site(root))
        _link(built / "compile_commands.json", root / "build" / "compile_commands.json")
    return package


def link_into_environment(site: Path, project: str) -> Path:
    """Put `site` on the path of this environment; the .pth file that does it."""
    path = Path(sysconfig.get_path("purelib"), f"{project}-dev.pth")
    write_if_changed(path, f"{site}\n")
    return path


def check_loads(package: Path) -> str:
    """Open the library of a built binary, as its manifest describes it; one line about it."""
    manifest = manifests.read(package / manifests.FILE_NAME)
    path = package / manifest.library.file
    try:  # dlopen of a damaged file may end the process
        loader.content_of(path, manifest)
    except BinaryError as error:
        raise BinaryError(f"{package}: {error}; build or install it again") from None
    try:
        if manifest.torch is not None:
            importlib.import_module("torch")  # brings the library that this one is linked with
        library = ctypes.CDLL(str(path))
        abi = getattr(library, f"{manifest.project}_abi_version")
        info = getattr(library, f"{manifest.project}_build_info")
    except (OSError, AttributeError, ImportError) as error:
        raise BinaryError(f"{path}: expected a library that loads, found: {error}") from error
    info.restype = ctypes.c_char_p
    stamp = json.loads(info().decode())
    if (abi(), stamp["architecture"]) != (manifest.abi, manifest.architecture.name):
        raise BinaryError(
            f"{path}: expected ABI {manifest.abi} for {manifest.architecture.name}, found ABI "
            f"{abi()} for {stamp['architecture']}; delete the build directory"
        )
    return (
        f"{path.name} loads: ABI {abi()}, {stamp['architecture']}, {stamp['version']}, "
        f"{len(manifest.kernels)} kernels, {manifest.library.bytes:,} bytes"
    )


def _write_dist_info(plan: BuildPlan, config: Config, where: Path) -> None:
    """What importlib.metadata reads of an installed wheel: name, version, entry point."""
    build = plan.build
    folder = where / f"{build.stem}-{plan.version}.dist-info"
    for stale in where.glob(f"{build.stem}-*.dist-info"):
        if stale != folder:
            shutil.rmtree(stale)
    metadata = f"Metadata-Version: 2.1\nName: {build.distribution}\nVersion: {plan.version}\n"
    entry = f"[{config.project.name}.binaries]\n{build.kind.name} = {build.stem}\n"
    write_if_changed(folder / "INSTALLER", f"{registry.DEVELOPMENT}\n")
    write_if_changed(folder / "METADATA", metadata)
    write_if_changed(folder / "entry_points.txt", entry)


def _link(target: Path, link: Path) -> None:
    """Make `link` a relative symbolic link to `target`, replacing what was there at once."""
    fresh = target.with_suffix(".link")  # beside the target, where no other build works
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    fresh.replace(link)
