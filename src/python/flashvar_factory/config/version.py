"""The version of a build: the project's own, plus a local label for anything but a release."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from flashvar.binaries.kinds import Kernel
from flashvar.errors import ConfigurationError
from flashvar_factory.config import labels, toml_table
from flashvar_factory.config.expand import Build, Selection, expand
from flashvar_factory.config.schema import Config

_ASSIGNMENT = re.compile(r"""^__version__ = ["'](?P<version>[^"']+)["']$""", re.MULTILINE)


def read(config: Config, root: Path) -> str:
    """`__version__` of the project's version file."""
    path = root / config.project.version_file
    found = _ASSIGNMENT.findall(toml_table.read(path)) if path.is_file() else []
    if len(found) != 1:
        raise ConfigurationError(
            f'{path}: expected one line __version__ = "...", found {len(found) or "none"}'
        )
    try:
        release = Version(found[0])
    except ValueError as error:  # InvalidVersion, or a number of 5,000 digits
        raise ConfigurationError(
            f"{path}: expected a version such as 1.2.3, found: {error}"
        ) from None
    # Manifests and requirements repeat it as text, and a label marks what is no release.
    if found[0] != release.public:
        raise ConfigurationError(
            f"{path}: expected the version as {release.public!r}, found {found[0]!r}"
        )
    return release.public


def of_build(version: str, build: Build, config: Config) -> str:
    """`version`, with a PEP 440 local label such as `+hdim64.bf16` for a subset or for PTX."""
    everything = Selection((build.kind.name,), config.default_ops, {})
    (full,) = expand(config, everything)
    label = _parts(build.kernels, full.kernels, labels.in_full(config.ops))
    if "ptx" in build.code_kinds:
        label.append(labels.PTX)
    return f"{version}+{'.'.join(label)}" if label else version


def _parts(
    kernels: tuple[Kernel, ...], full: tuple[Kernel, ...], in_full: frozenset[str]
) -> list[str]:
    """Parts of a label: the functions if some are missing; each axis's values if they differ."""
    label: list[str] = []
    functions = sorted({kernel.function for kernel in kernels})
    if set(functions) != {kernel.function for kernel in full}:
        label += map(labels.of_function, functions)
    for axis in dict.fromkeys(axis for kernel in full for axis in kernel.words):
        there, usual = _values(kernels, axis), _values(full, axis)
        if any(values != usual.get(function) for function, values in there.items()):
            label += dict.fromkeys(
                labels.of_value(kernel, axis, in_full) for kernel in kernels if axis in kernel.words
            )
    return label


def _values(kernels: tuple[Kernel, ...], axis: str) -> dict[str, set[str]]:
    """The values of `axis` that each function has, e.g. hdim64."""
    found: dict[str, set[str]] = {}
    for kernel in kernels:
        if axis in kernel.words:
            found.setdefault(kernel.function, set()).add(kernel.words[axis])
    return found
