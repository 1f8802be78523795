"""The extras of the project: one per binary, `all` of these, and `cli`.

An installer ignores an extra that does not exist, so each usual name of a binary is an extra. Names
are normalized, as installers look them up: `sm_89` is `sm-89` (PEP 685). `8.9` and `90a` are left
out: most pips before 26 take such a name for a version, and then cannot install the project at all.
A plugin of the build backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from flashvar_factory.config import schema, version

_ALL: Final = ("all", "cuda", "gpu")  # for drivers of an older CUDA: "all-cu12", ...
# The commands draw tables and progress with rich if it is installed.
_CLI: Final = {"cli": ["rich>=13.7"]}


def extras(config: schema.Config, release: str) -> dict[str, list[str]]:
    """Extra -> requirements: the binary distributions of exactly this version; cli."""
    found: dict[str, list[str]] = {}
    every: dict[str, list[str]] = {name: [] for name in _ALL}
    for target in config.targets.values():
        requirement = f"{target.distribution}=={release}; {_marker(target)}"
        older = "" if target.toolkit is None else f"-cu{target.toolkit.cuda}"
        for name in _ALL:
            every.setdefault(f"{name}{older}", []).append(requirement)
        for kind in target.kinds:
            names = map(canonicalize_name, kind.spellings)
            found |= {name: [requirement] for name in names if not _is_version(name, older)}
    return {**found, **every, **_CLI}


def _is_version(name: str, older: str) -> bool:
    """Whether a name is a version, or one with the suffix of an older CUDA."""
    try:
        _ = Version(name.removesuffix(older))
    except InvalidVersion:
        return False
    return True


def _marker(target: schema.Target) -> str:
    """Where its wheels are made for; elsewhere the extra installs nothing more."""
    machines = " or ".join(f'platform_machine == "{name}"' for name in target.platforms)
    return f'sys_platform == "linux" and ({machines})'


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, dict[str, list[str]]]:
    """The hook of scikit-build-core's [[tool.dynamic-metadata]]; it runs in the project's root."""
    if settings:
        raise ValueError(f"expected no settings, found {sorted(settings)}")
    root = Path.cwd()
    config = schema.read(root / schema.FILE_NAME)
    return {"optional-dependencies": extras(config, version.read(config, root))}
