"""The reference of variants.toml, asked from its reader.

The strict reader says in its errors which keys a table may have and what each of them takes. So it
is given this project's file again and again, every time with one value made wrong, one key left
out, or one key too many, and its answers are the reference. MEANING adds what a key is for, DEFAULT
what holds without an optional one; a key that the reader has and they lack, or the other way round,
is an error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tables import table

from flashvar.errors import ConfigurationError
from flashvar_factory.config import expand, schema, toml_table
from flashvar_factory.config.selection_arguments import SelectionArguments

# The names that a user chooses, as the reference writes them.
NAMED: Final = {
    "ops": "<function>",
    "axes": "<axis>",
    "spill_bytes": "<axis>",
    "architectures": "<architecture>",
    "families": "<family>",
    "largest": "<axis>",
    "toolkits": "<toolkit>",
}
MEANING: Final = {
    "schema": "The version of this format.",
    "project.name": "The name of the C++ namespace, the library files and the entry-point group.",
    "project.abi": "What the libraries' `<name>_abi_version()` returns.",
    "project.version_file": 'Holds `__version__ = "..."`: the version of every wheel.',
    "project.license": "The license of the binary wheels.",
    "project.smoke": "A script that `smoke` runs in each environment.",
    "project.torch": "The oldest torch whose stable ABI the libraries call.",
    "defaults.ops": "The ops that are built where a command names none.",
    "defaults.<axis>": "The values an axis is compiled for, in every op that has it.",
    "defaults.<function>.<axis>": "Other values for one function.",
    "ops.<function>.launcher": "The header in a family's folder that launches the function.",
    "ops.<function>.axes.<axis>.choices": "The values, if names: C++ types `<axis>::<name>`.",
    "ops.<function>.axes.<axis>.min": "The smallest value of an axis of integers.",
    "ops.<function>.axes.<axis>.max": "The largest.",
    "ops.<function>.axes.<axis>.step": "From one value to the next.",
    "ops.<function>.axes.<axis>.pairs": 'Whether `"192x128"` is a value: two template arguments.',
    "ops.<function>.spill_bytes": "Bytes that a thread of a released kernel may spill.",
    "ops.<function>.spill_bytes.<axis>.<value>": "The same for kernels of one value.",
    "architectures.<architecture>.code": "What nvcc compiles for.",
    "architectures.<architecture>.family": "The folder of `src/cuda` with its kernels.",
    "architectures.<architecture>.shared_memory": "Bytes of it that a block may have there.",
    "architectures.<architecture>.distribution": "The name of the wheel.",
    "architectures.<architecture>.platforms": "The processors that a wheel is made for.",
    "architectures.<architecture>.also": (
        "Other architectures whose GPUs run the wheel's code; they get its extras."
    ),
    "architectures.<architecture>.ran": (
        "Where its tests have run. `own`: on a GPU of the architecture or of one under `also`; "
        "`ptx`: as PTX on another GPU; `never`. A release needs a GPU record unless it is `never`."
    ),
    "architectures.<architecture>.toolkits.<toolkit>": (
        "One more wheel, made with that toolkit for older drivers; the value is its `ran`."
    ),
    "families.<family>.min": "The lowest code that its sources compile for.",
    "families.<family>.only": "The one code that its sources compile for.",
    "families.<family>.largest.<axis>": "The largest integer that they compile for.",
    "toolkits.<toolkit>.ptx": "The version of PTX that its ptxas reads.",
    "toolkits.<toolkit>.ptxas": "The package of PyPI that has its ptxas.",
    "toolkits.<toolkit>.runtime": "The package that has its CUDA runtime and headers.",
    "dev.architecture": "What a development build takes on a machine without a GPU.",
    "dev.<axis>": "The values of a development build where none are named.",
}
# What holds without a key that is not required.
DEFAULT: Final = {
    "project.smoke": "none",
    "project.torch": "none",
    "defaults.<function>.<axis>": "`defaults.<axis>`",
    "ops.<function>.launcher": "`<function>_launch`",
    "ops.<function>.axes.<axis>.choices": "an axis of integers",
    "ops.<function>.axes.<axis>.pairs": "false",
    "ops.<function>.spill_bytes": "0",
    "ops.<function>.spill_bytes.<axis>.<value>": "0",
    "architectures.<architecture>.platforms": '`["x86_64"]`',
    "architectures.<architecture>.also": "none",
    "architectures.<architecture>.ran": "`never`",
    "architectures.<architecture>.toolkits.<toolkit>": "none",
    "families.<family>.min": "no limit",
    "families.<family>.only": "no limit",
    "families.<family>.largest.<axis>": "no limit",
    "dev.<axis>": "`defaults.<axis>`",
}
# What the reader says of these is about an axis of this project.
_VALUES: Final = frozenset({"defaults.<axis>", "defaults.<function>.<axis>", "dev.<axis>"})
# No key of the format takes a fraction; of the other three, the one of the right type is answered
# with more than the type.
_IMPOSSIBLE: Final = (0.5, 7, "!", ["!"])
_TOO_MANY: Final = "zzz"
# Where such a name is, by the key above it and its place in the dotted key.
_NAMES: Final = {
    ("ops", 1),
    ("axes", 3),
    ("spill_bytes", 3),
    ("architectures", 1),
    ("families", 1),
    ("largest", 3),
    ("toolkits", 1),
    ("toolkits", 3),
}


def keys(root: Path) -> str:
    """Every key: what holds without it, what it takes, and what it is for."""
    document = _document(root)
    found = {name: row for path in _paths(document) for name, row in _asked(document, path)}
    if differing := set(found).symmetric_difference(MEANING):
        raise ValueError(f"expected a MEANING for each key of the reader: {sorted(differing)}")
    optional = {name for name, (needed, _) in found.items() if not needed}
    if differing := optional.symmetric_difference(DEFAULT):
        raise ValueError(f"expected a DEFAULT for each optional key: {sorted(differing)}")
    rows = [
        (f"`{name}`", DEFAULT.get(name, "required"), found[name][1], MEANING[name])
        for name in MEANING
    ]
    return table(("key", "default", "value", "meaning"), rows)


def _document(root: Path) -> dict[str, Any]:
    """This project's file, with an op that has defaults of its own if there is none."""
    text = (root / schema.FILE_NAME).read_text(encoding="utf-8")
    document: dict[str, Any] = dict(toml_table.document(text, schema.FILE_NAME).rest)
    defaults, (op, *_) = document["defaults"], document["ops"]
    axes = document["ops"][op]["axes"]
    defaults.setdefault(op, {axis: defaults[axis] for axis in axes})
    return document


def _paths(table_: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The tables of a document, itself first."""
    yield above
    for key, value in table_.items():
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))


def _asked(
    document: dict[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[str, tuple[bool, str]]]:
    """The keys of one table that are values, as the reader knows them."""
    here = _at(document, path)
    tables = {_general(document, one) for one in _paths(document)}
    for key in _valid_keys(document, path) or list(here):
        name = _general(document, (*path, key))
        if isinstance(here.get(key), dict) or (key not in here and name in tables):
            continue
        if key in document["ops"] and path == ("defaults",):
            continue  # another op, which the file does not mention
        taken = "the axis's values" if name in _VALUES else _taken(document, path, key)
        listed = isinstance(here.get(key), list) and not taken.startswith("a list")
        yield name, (_needed(document, path, key), f"a list: {taken}" if listed else taken)


def _general(document: dict[str, Any], path: tuple[str, ...]) -> str:
    """The dotted key with names of this project left open."""
    ops, axes = document["ops"], {a for op in document["ops"].values() for a in op["axes"]}
    parts: list[str] = []
    for place, part in enumerate(path):
        above = path[place - 1] if place else ""
        if above in NAMED and (above, place) in _NAMES:
            parts.append(NAMED[above])
        elif path[0] in ("defaults", "dev") and place and part in axes:
            parts.append("<axis>")
        elif path[0] == "defaults" and place == 1 and part in ops:
            parts.append("<function>")
        elif place == 4 and path[2] == "spill_bytes":
            parts.append("<value>")
        else:
            parts.append(part)
    return ".".join(parts)


def _at(document: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for part in path:
        document = document[part]
    return document


def _answer(document: dict[str, Any]) -> str | None:
    """What the reader says against a document; None where it takes it."""
    try:
        schema.parse(_as_toml(document))
    except ConfigurationError as error:
        return str(error)
    return None


def _valid_keys(document: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """What the reader lists when a table has a key too many; none where names are free."""
    changed = copy.deepcopy(document)
    _at(changed, path)[_TOO_MANY] = _IMPOSSIBLE[0]
    answer = _answer(changed) or ""
    match = re.search(r"unknown key, expected (.*?)(?:;|$)", answer)
    return re.findall(r"[\w-]+", match[1].replace(" or ", " ")) if match else []


def _needed(document: dict[str, Any], path: tuple[str, ...], key: str) -> bool:
    changed = copy.deepcopy(document)
    if key not in _at(changed, path):
        return False
    del _at(changed, path)[key]
    return f"{key}: expected this key" in (_answer(changed) or "")


def _taken(document: dict[str, Any], path: tuple[str, ...], key: str) -> str:
    """What the reader expects of the key: its most specific answer to a wrong value."""
    dotted = ".".join((*path, key))
    pattern = re.compile(rf"{re.escape(dotted)}: (?:.*, )?expected (.*), found ")
    answers: list[str] = []
    for wrong in _IMPOSSIBLE:
        changed = copy.deepcopy(document)
        _at(changed, path)[key] = wrong
        if match := pattern.search(_answer(changed) or ""):
            answers.append(match[1])
    if not answers:
        raise ValueError(f"{dotted}: expected the reader to refuse one of {_IMPOSSIBLE}")
    answer = next((one for one in answers if one != answers[0]), answers[0])
    return re.sub(r" \([^()]*\)$", "", answer) if key == "license" else answer


def _as_toml(document: dict[str, Any]) -> str:
    """The document as TOML again, every table inline."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in document.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def architectures(root: Path) -> str:
    """What is built for each architecture."""
    config = schema.read(root / schema.FILE_NAME)
    rows = [
        (
            ", ".join(f"`{kind.name}`" for kind in target.kinds),
            f"`{target.distribution}`",
            target.architecture.code,
            f"`{target.family}`",
            f"{target.shared_memory / 1024:.0f} KiB",
            ", ".join(target.platforms),
        )
        for name, target in config.targets.items()
    ]
    heading = ("architecture", "wheel", "code", "family", "shared memory of a block", "processors")
    return table(heading, rows)


def kernels(root: Path) -> str:
    """What a wheel holds, op by op."""
    config = schema.read(root / schema.FILE_NAME)
    everything = expand.select_all(SelectionArguments(platform="x86_64"), config)
    build = expand.expand(config, everything)[0]
    axes = list(dict.fromkeys(axis for op in config.default_ops for axis in config.defaults[op]))
    rows = []
    for op in config.default_ops:
        values = config.defaults[op]
        count = sum(kernel.function == op for kernel in build.kernels)
        compiled = (", ".join(map(str, values.get(axis, ()))) or "-" for axis in axes)
        rows.append((f"`{op}`", *compiled, count))
    return table(("op", *axes, "kernels"), rows)
