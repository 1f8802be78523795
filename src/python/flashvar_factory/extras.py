"""Which extras has the project? One per architecture, `all` of these, and `cli`.

A plugin of its build backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flashvar_factory import schema, version

# What the commands draw tables and progress with, where it is there.
_CLI: Final = {"cli": ["rich>=13.7"]}


def extras(config: schema.Config, release: str) -> dict[str, list[str]]:
    """Extra -> requirements: the binary distributions of exactly this version; cli."""
    found = {
        target.architecture.extra: [f"{target.distribution}=={release}; {_marker(target)}"]
        for target in config.targets.values()
    }
    return {**found, "all": [requirement for one in found.values() for requirement in one], **_CLI}


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
