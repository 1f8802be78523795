"""Writes wheels as a repository of Hugging Face's `kernels`, which loads it without installing.

`build/torch-cuda` has the project's package with every binary in it, among which the package's own
loader chooses; `build/torch-cpu` has the package alone. Neither is tied to a version of torch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Final

from flashvar.errors import ConfigurationError
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive
from flashvar_factory.release import variants

FOLDER: Final = "build"
_METADATA: Final = "metadata.json"
_INIT: Final = "__init__.py"


def write(
    wheels: Path, output: Path, project: str, *, modules: Sequence[str], version: int
) -> list[Path]:
    """Write the repository; the folders of its builds.

    Args:
        wheels: The project's own wheel and the binary ones, as `nox -s wheels` leaves them.
        output: The repository; what an earlier call left in its `build` is replaced.
        project: The name of the project and of its package.
        modules: Whose public names the kernel has.
        version: Of the kernel; the branch of the Hub that it goes to is `v<version>`.

    Raises:
        PackagingError: a wheel is missing, or two are not of one release; or a folder of that name
            is there which no earlier call wrote.
        ConfigurationError: a module is not in the package.
    """
    plain, binaries = variants.release(wheels, project)
    files = archive.read(plain)
    license_name = str(archive.metadata(plain).license_expression)
    package = {name: data for name, data in files.items() if name.startswith(f"{project}/")}
    for module in modules:
        path = module.replace(".", "/")
        if not {f"{path}.py", f"{path}/{_INIT}"} & package.keys():
            raise ConfigurationError(
                f"--module {module}: expected a module of {plain.name}, found none of that name"
            )
    embedded = {
        f"{project}/_binaries/{one.manifest.kind.name}/{file}": data
        for one in binaries
        for file, data in one.files.items()
    }
    if len(embedded) != sum(len(one.files) for one in binaries):
        raise PackagingError(
            f"{wheels}: expected one wheel for each architecture, found those of several "
            "platforms; keep those of one in the folder"
        )
    release = archive.parse_name(plain.name).version
    init = _init(project, release, modules).encode()
    builds = {"cuda": {**package, **embedded}, "cpu": package}
    folders = {backend: output / FOLDER / f"torch-{backend}" for backend in builds}
    for folder in folders.values():
        _check_replaceable(folder, project)
    for backend, folder in folders.items():
        contents = {_INIT: init, **builds[backend]}
        metadata = _metadata_of(project, license_name, version, backend, contents)
        text = json.dumps(metadata, indent=2) + "\n"
        _replace(folder, {**contents, _METADATA: text.encode()})
    return list(folders.values())


def _check_replaceable(folder: Path, project: str) -> None:
    """PackagingError where a folder is there that is no earlier build of the project."""
    is_link = folder.is_symlink()  # neither removed nor written through
    if not is_link and (not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))):
        return
    try:
        found = json.loads((folder / _METADATA).read_text(encoding="utf-8"))["id"]
        is_ours = not is_link and found.startswith(f"_{project}_")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise PackagingError(
            f"{folder}: expected an earlier build of {project} or none, found something else, "
            "which stays as it is; name another --output"
        )


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder anew; an earlier one is removed once all files are written."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name, data in files.items():
            file = partial / PurePosixPath(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
    except BaseException:  # an interrupt too
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _metadata_of(
    project: str, license_name: str, version: int, backend: str, files: Mapping[str, bytes]
) -> dict[str, Any]:
    """`metadata.json`: no architectures, for Triton runs on those that no binary is made for."""
    hashes = {name: hashlib.sha256(data).digest() for name, data in sorted(files.items())}
    identity = hashlib.sha256(b"".join(hashes.values())).hexdigest()
    return {
        "name": project.replace("_", "-"),
        "id": f"_{project}_{backend}_{identity[:16]}",
        "version": version,
        "license": license_name,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(one).decode() for name, one in hashes.items()},
        },
    }


def _init(project: str, release: str, modules: Sequence[str]) -> str:
    template = resources.files("flashvar_factory") / "data" / "hf_kernel.py.in"
    text = template.read_text(encoding="utf-8")
    values = {"project": project, "release": release, "modules": repr(list(modules))}
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
