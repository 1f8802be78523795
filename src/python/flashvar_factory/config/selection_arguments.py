"""Reads selection arguments, e.g. `hdim=64,128 arch=native ptx=1`.

An argument without `=` is an architecture: `sm89`, `all`; there may be several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from flashvar.binaries.kinds import short_axis
from flashvar.errors import ConfigurationError
from flashvar_factory.config import names
from flashvar_factory.config.axes import BuildAxis
from flashvar_factory.config.names import ALL, NATIVE
from flashvar_factory.config.schema import PLATFORMS, Config
from flashvar_factory.config.suggestions import did_you_mean, listed, suggested
from flashvar_factory.config.toml_table import Value

# Few enough digits for int(), which refuses thousands.
_COUNT: Final = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)

ToolkitChoice = Literal["auto", "pypi", "system"]
CacheChoice = Literal["none", "sccache", "ccache"]


@dataclass(frozen=True)
class SelectionArguments:
    """The arguments; None or a missing axis where nothing was given."""

    targets: tuple[str, ...] | None = None  # names, or NATIVE among them
    ops: tuple[str, ...] | None = None
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)  # (): all by default
    ptx: bool = False
    jobs: int | None = None
    toolkit: ToolkitChoice = "auto"
    platform: str | None = None  # the processor to build for; None: this machine's
    cache: CacheChoice = "none"
    shard: tuple[int, int] = (1, 1)  # the first of one


def parse(arguments: Sequence[str], config: Config) -> SelectionArguments:
    """Read the arguments; ConfigurationError that lists what is valid on anything else."""
    given = _by_key(arguments, config)
    ops = _ops(given.pop("op", None), config)
    axes = {
        axis: _values(axis, given.pop(axis), ops or config.default_ops, config)
        for axis in [key for key in given if key in config.axes]
    }
    _check_together(axes, ops or config.default_ops, config)
    return SelectionArguments(
        targets=_targets(given.pop("arch", None), config),
        ops=ops,
        ptx=_one("ptx", given.pop("ptx", ["0"]), ("0", "1")) == "1",
        jobs=_jobs(given.pop("jobs", None)),
        toolkit=cast(
            ToolkitChoice,
            _one("toolkit", given.pop("toolkit", ["auto"]), ("auto", "pypi", "system")),
        ),
        cache=cast(
            CacheChoice, _one("cache", given.pop("cache", ["none"]), ("none", "sccache", "ccache"))
        ),
        shard=_shard(given.pop("shard", ["1/1"])),
        platform=_platform(given.pop("platform", None)),
        axes=axes,
    )


def _by_key(arguments: Sequence[str], config: Config) -> dict[str, list[str]]:
    """The values of each key; what has no key is an architecture."""
    given: dict[str, list[str]] = {}
    named: list[str] = []
    short = _short(config)
    for index, word in enumerate(arguments):
        key, equals, value = word.partition("=")
        behind = arguments[index + 1 :]
        if not equals:
            _check_bare(word, arguments[index - 1] if index else "", behind, config)
            named.append(word)
            continue
        key = short.get(key, key)
        _check_key(key, word, [*config.axes], [*short])
        if key in given:
            raise ConfigurationError(
                f"{word}: expected {key} once, found it again; separate values by commas"
            )
        given[key] = _parts(value)
        if not given[key]:
            apart = _value_apart(behind)
            fits = apart and all(_is_value(key, part, config) for part in _parts(apart))
            raise ConfigurationError(
                f"{word}: expected a value after {equals!r}, found none"
                f"{suggested(word + apart) if fits else ''}"
            )
        _check_parts(word, given[key])
    if named:
        given["arch"] = [*given.get("arch", []), *(part for word in named for part in _parts(word))]
        _check_parts(" ".join(named), given["arch"])
    return given


def _short(config: Config) -> dict[str, str]:
    """The axes by their shorter names; one that two axes share names neither."""
    shorter = [short_axis(axis) for axis in config.axes]
    return {
        short: axis
        for short, axis in zip(shorter, config.axes, strict=True)
        if short != axis and shorter.count(short) == 1
    }


def _parts(value: str) -> list[str]:
    return [part for part in value.split(",") if part]


def _value_apart(behind: Sequence[str]) -> str:
    """The value in the arguments behind a key, as in `hdim 64`, `hdim = 64` or `hdim =64`."""
    if behind[:1] == ["="]:
        behind = behind[1:]
    value = behind[0].removeprefix("=") if behind else ""
    return "" if "=" in value else value


def _check_bare(word: str, before: str, behind: Sequence[str], config: Config) -> None:
    """Refuse what is no architecture, but a key or another value of the argument before."""
    short = _short(config)
    key, colon, value = word.partition(":")
    key = key.lower()
    if key in {*names.SELECTION, *config.axes, *short}:
        value = value or _value_apart(behind)
        meant = suggested(f"{key}={value}") if value else ""
        found = "a colon" if colon else "no value"
        raise ConfigurationError(f"{word}: expected {key}=VALUE, found {found}{meant}")
    parts = _parts(word)
    if not parts:
        raise ConfigurationError(f"{word}: expected an architecture, found none")
    key, _, value = before.partition("=")
    if value and all(_is_value(short.get(key, key), part, config) for part in parts):
        meant = suggested(f"{before.rstrip(',')},{word}")
        raise ConfigurationError(
            f"{word}: expected an architecture, found a value of {key}; values are separated by "
            f"commas alone{meant}"
        )
    axis = _axis_of(parts, config)
    if axis is not None:
        key = next((shorter for shorter, longer in short.items() if longer == axis), axis)
        raise ConfigurationError(
            f"{word}: expected an architecture, found a value of {key}{suggested(f'{key}={word}')}"
        )


def _axis_of(parts: list[str], config: Config) -> str | None:
    """The first axis that is built with all of these values."""
    for axis, values in config.axes.items():
        if set(parts) <= {str(value) for value in values}:
            return axis
    return None


def _is_value(key: str, part: str, config: Config) -> bool:
    """Whether a key that lists what is compiled takes this value."""
    axes = (axis for op in config.ops.values() for axis in op.axes if axis.name == key)
    ops = {*config.default_ops, *map(names.op_of, config.default_ops)}
    return part in ops if key == "op" else any(axis.parse(part) for axis in axes)


def _check_parts(word: str, parts: list[str]) -> None:
    """Refuse a value that was given twice, and one beside `all`."""
    for part in parts:
        if parts.count(part) > 1:
            raise ConfigurationError(f"{word}: expected each value once, found {part} again")
    if ALL in parts and len(parts) > 1:
        raise ConfigurationError(f"{word}: expected {ALL} alone, found other values beside it")


def _check_key(key: str, word: str, axes: list[str], short: list[str]) -> None:
    valid = [*names.SELECTION, *axes]
    if key not in valid:
        shown = sorted([*valid, *short])
        raise ConfigurationError(
            f"{word}: unknown key {key!r}, expected {listed(shown)}{did_you_mean(key, shown)}"
        )


def _targets(parts: list[str] | None, config: Config) -> tuple[str, ...] | None:
    if parts is None:
        return None
    spellings = {
        spelling: name
        for name, target in config.targets.items()
        for spelling in (*target.spellings, target.distribution)
    }
    if parts == [ALL]:
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
        if name in chosen:
            raise ConfigurationError(f"arch: expected each architecture once, found {name} again")
        chosen.append(name)
    return tuple(chosen)


def _values(axis: str, parts: list[str], ops: Sequence[str], config: Config) -> tuple[Value, ...]:
    """The values that were given, in the order of the axis; () for all that is there by default."""
    kinds = [one for op in ops for one in config.ops[op].axes if one.name == axis]
    if not kinds:
        raise ConfigurationError(
            f"{axis}={','.join(parts)}: expected an axis of op={','.join(ops)}, found another op's"
        )
    if parts == [ALL]:
        return ()
    ranks: dict[Value, tuple[int, ...]] = {}
    for part in parts:
        given = [(kind, value) for kind in kinds if (value := kind.parse(part)) is not None]
        if not given:
            raise ConfigurationError(
                f"{axis}={part}: expected {_limits(axis, ops, config)}, or '{ALL}' for the values "
                f"of variants.toml ({listed(config.axes[axis])}){_suggestion(part, kinds)}"
            )
        kind, value = given[0]
        ranks[value] = kind.rank(value)
    return tuple(sorted(ranks, key=ranks.__getitem__))


def _check_together(
    axes: Mapping[str, tuple[Value, ...]], ops: Sequence[str], config: Config
) -> None:
    """Refuse a value that no op takes together with the values of the other axes."""

    def takes(op: str, name: str, value: Value) -> bool:
        given = {**axes, name: (value,)}
        asked = [(kind, given[kind.name]) for kind in config.ops[op].axes if given.get(kind.name)]
        return name in (kind.name for kind, _ in asked) and all(
            any(map(kind.accepts, values)) for kind, values in asked
        )

    for name, values in axes.items():
        for value in values:
            if not any(takes(op, name, value) for op in ops):
                others = [
                    f"{one}={listed(given)}" for one, given in axes.items() if one != name and given
                ]
                raise ConfigurationError(
                    f"{name}={value}: expected an op that takes it together with "
                    f"{' and '.join(others)}, found none: leave one of them out"
                )


def _suggestion(part: str, kinds: Sequence[BuildAxis]) -> str:
    """The value that is enough for the number that was given, or that is spelled like the word."""
    if any(kind.is_number(part) for kind in kinds):
        enough = [value for kind in kinds if (value := kind.enough(part)) is not None]
        return suggested(str(enough[0])) if enough else ""
    spellings = [spelling for kind in kinds for spelling in kind.spellings]
    return did_you_mean(part, [*spellings, ALL])


def _limits(axis: str, ops: Sequence[str], config: Config) -> str:
    """What an axis takes, with the ops where they differ."""
    kinds = {op: one for op in ops for one in config.ops[op].axes if one.name == axis}
    if all(kind.choices for kind in kinds.values()):
        choices = dict.fromkeys(one for kind in kinds.values() for one in kind.choices)
        return f"one of {listed(choices)}"
    taken: dict[str, list[str]] = {}
    for op, kind in kinds.items():
        taken.setdefault(str(kind), []).append(op)
    if len(taken) == 1:
        return next(iter(taken))
    return "; ".join(f"{limits} ({listed(of)})" for limits, of in taken.items())


def _ops(parts: list[str] | None, config: Config) -> tuple[str, ...] | None:
    if parts is None or parts == [ALL]:
        return None if parts is None else config.default_ops
    chosen: set[str] = set()
    for part in parts:
        found = [op for op in config.default_ops if part in (op, names.op_of(op))]
        if not found:
            ops = dict.fromkeys(map(names.op_of, config.default_ops))
            valid = dict.fromkeys([*ops, *config.default_ops, ALL])
            raise ConfigurationError(
                f"op={part}: not built by variants.toml, expected {listed(valid)}"
                f"{did_you_mean(part, valid)}"
            )
        chosen.update(found)
    return tuple(op for op in config.default_ops if op in chosen)


def _one(key: str, parts: list[str], valid: Sequence[str]) -> str:
    if len(parts) != 1 or parts[0] not in valid:
        found = ",".join(parts)
        raise ConfigurationError(f"{key}={found}: expected one of {listed(valid)}")
    return parts[0]


def _platform(parts: list[str] | None) -> str | None:
    return None if parts is None else _one("platform", parts, PLATFORMS)


def _jobs(parts: list[str] | None) -> int | None:
    if parts is None:
        return None
    if len(parts) != 1 or not _COUNT.fullmatch(parts[0]):
        raise ConfigurationError(f"jobs={','.join(parts)}: expected an integer above 0")
    return int(parts[0])


def _shard(parts: list[str]) -> tuple[int, int]:
    """`2/3` as numbers."""
    found = ",".join(parts)
    part, _, of = found.partition("/")
    if not (_COUNT.fullmatch(part) and _COUNT.fullmatch(of) and int(part) <= int(of)):
        raise ConfigurationError(f"shard={found}: expected i/n with i from 1 to n, e.g. 1/2")
    return int(part), int(of)
