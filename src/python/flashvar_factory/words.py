"""What did the user ask for? The words of a selection, e.g. `hdim=64,128 arch=native ptx=1`.

A word without `=` is an architecture: `sm89`, `all`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, cast

from flashvar.errors import ConfigurationError
from flashvar_factory.schema import Config
from flashvar_factory.spelling import did_you_mean, listed
from flashvar_factory.toml_table import Value

ALL: Final = "all"
NATIVE: Final = "native"
SHORT: Final = MappingProxyType({"hdim": "head_dim"})  # short word -> axis

ToolkitChoice = Literal["auto", "pypi", "system"]


@dataclass(frozen=True)
class Words:
    """What was said; None or a missing axis where nothing was."""

    architectures: tuple[str, ...] | None = None  # names, or NATIVE among them
    ops: tuple[str, ...] | None = None
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    ptx: bool = False
    jobs: int | None = None
    toolkit: ToolkitChoice = "auto"


def parse(words: Sequence[str], config: Config) -> Words:
    """Read the words; ConfigurationError that lists what is valid on anything else."""
    said: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=") if "=" in word else ("arch", "=", word)
        key = SHORT.get(key, key)
        _check_key(key, word, config)
        if key in said:
            raise ConfigurationError(f"{word}: {key} was said before; separate values by commas")
        said[key] = [part for part in value.split(",") if part]
        if not said[key]:
            raise ConfigurationError(f"{word}: expected a value after {equals!r}, found none")
    return Words(
        architectures=_architectures(said.pop("arch", None), config),
        ops=_chosen("op", said.pop("op", None), config.default_ops),
        ptx=_one("ptx", said.pop("ptx", ["0"]), ("0", "1")) == "1",
        jobs=_jobs(said.pop("jobs", None)),
        toolkit=cast(
            ToolkitChoice,
            _one("toolkit", said.pop("toolkit", ["auto"]), ("auto", "pypi", "system")),
        ),
        axes={axis: _values(axis, parts, config.axes[axis]) for axis, parts in said.items()},
    )


def _check_key(key: str, word: str, config: Config) -> None:
    valid = ["arch", "op", "ptx", "jobs", "toolkit", *config.axes]
    if key not in valid:
        shown = sorted({*valid, *(short for short, axis in SHORT.items() if axis in config.axes)})
        raise ConfigurationError(
            f"{word}: unknown word {key!r}, expected {listed(shown)}{did_you_mean(key, shown)}"
        )


def _architectures(parts: list[str] | None, config: Config) -> tuple[str, ...] | None:
    if parts is None:
        return None
    spellings = {spelling: name for name in config.targets for spelling in _spellings(name, config)}
    if ALL in parts:
        return tuple(config.targets)
    chosen: list[str] = []
    for part in parts:
        name = NATIVE if part == NATIVE else spellings.get(part)
        if name is None:
            valid = [*config.targets, NATIVE, ALL]
            raise ConfigurationError(
                f"unknown architecture {part!r}, expected {listed(valid)}"
                f"{did_you_mean(part, valid)}"
            )
        if name not in chosen:
            chosen.append(name)
    return tuple(chosen)


def _spellings(name: str, config: Config) -> tuple[str, ...]:
    target = config.targets[name]
    return (name, target.architecture.extra, target.architecture.code, target.distribution)


def _values(axis: str, parts: list[str], valid: tuple[Value, ...]) -> tuple[Value, ...]:
    chosen = set(_chosen(axis, parts, [str(value) for value in valid]) or ())
    return tuple(value for value in valid if str(value) in chosen)


def _chosen(key: str, parts: list[str] | None, valid: Sequence[str]) -> tuple[str, ...] | None:
    if parts is None:
        return None
    if parts == [ALL]:
        return tuple(valid)
    for part in parts:
        if part not in valid:
            raise ConfigurationError(
                f"{key}={part}: not built by variants.toml, expected {listed([*valid, ALL])}"
                f"{did_you_mean(part, valid)}"
            )
    return tuple(value for value in valid if value in parts)


def _one(key: str, parts: list[str], valid: Sequence[str]) -> str:
    if len(parts) != 1 or parts[0] not in valid:
        found = ",".join(parts)
        raise ConfigurationError(f"{key}={found}: expected one of {listed(valid)}")
    return parts[0]


def _jobs(parts: list[str] | None) -> int | None:
    if parts is None:
        return None
    if len(parts) != 1 or not parts[0].isdecimal() or int(parts[0]) < 1:
        raise ConfigurationError(f"jobs={','.join(parts)}: expected an integer above 0")
    return int(parts[0])
