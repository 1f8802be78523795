"""Chooses the container that cibuildwheel builds in: the official image, else one made here.

Every wheel links against stubs of glibc 2.28, so a container is not what makes it run on old
systems. It is the independent second build: published wheels come from an image that others can
fetch too, and are loaded there. The image made here runs the same steps where no registry can be
reached; without it, a mistake in them would first be seen in a release.
"""

from __future__ import annotations

import os
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar_factory.toolchain import container_image

ENGINES: Final = ("docker", "podman")
REGISTRY: Final = "https://quay.io/v2/"  # of the official images
# Settings of podman for a machine that is a container itself, with fewer rights.
CONFIGURATION: Final = """\
[containers]
netns = "host"
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]

[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
"""
PROCESSES: Final = 4096


@dataclass(frozen=True)
class Facts:
    """What this machine offers."""

    engine: str | None  # of ENGINES
    registry: bool  # whether the official image can be had
    missing: tuple[str, ...]  # what making an image here needs and the machine lacks


@dataclass(frozen=True)
class Choice:
    """What is used, or why nothing can be."""

    engine: str = ""
    made_here: bool = False
    why_not: str = ""


def gather(environ: Mapping[str, str]) -> Facts:
    """Look at PATH, the user and the registry."""
    path = environ.get("PATH", "")
    engine = next((name for name in ENGINES if shutil.which(name, path=path)), None)
    missing = [
        tool for tool in ("podman", "runc", "debootstrap") if not shutil.which(tool, path=path)
    ]
    if os.geteuid() != 0:
        missing.append("root")
    if platform.machine() != "x86_64":
        missing.append("an x86_64 processor")
    return Facts(engine, engine is not None and _answers(REGISTRY), tuple(missing))


def choose(facts: Facts) -> Choice:
    """The official image where it can be had; else one of Debian's packages, under podman."""
    if facts.engine is not None and facts.registry:
        return Choice(facts.engine)
    if not facts.missing:
        return Choice("podman", made_here=True)
    found = f"{facts.engine}, which does not" if facts.engine else "neither"
    return Choice(
        why_not=f"expected docker or podman that reaches {REGISTRY}, found {found}; to make an "
        f"image here instead, this is missing: {', '.join(facts.missing)} (apt-get install podman "
        "runc debootstrap)"
    )


def settings(choice: Choice, folder: Path) -> dict[str, str]:
    """The environment variables of cibuildwheel; makes the image and podman's configuration."""
    if not choice.made_here:
        return {"CIBW_CONTAINER_ENGINE": choice.engine}
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "containers.conf"
    configuration.write_text(_configuration(), encoding="utf-8")
    environment = {"CONTAINERS_CONF": str(configuration)}
    image = container_image.ensure(folder, environment)
    certificates = f"/{container_image.CERTIFICATES}"
    return {
        **environment,
        "CIBW_CONTAINER_ENGINE": "podman; disable_host_mount: true",
        "CIBW_MANYLINUX_X86_64_IMAGE": image,
        # The machine's own, which may know a proxy's.
        "CIBW_ENVIRONMENT_LINUX": f"SSL_CERT_FILE={certificates} PIP_CERT={certificates}",
    }


def _configuration() -> str:
    import resource

    # A process cannot raise the limit of a container above its own.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return CONFIGURATION.format(files=files, processes=PROCESSES)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError as error:
        return error.code == 401  # a registry that asks for a login
    except OSError:
        return False
    return True
