"""The tiles that `flashvar tune` measured, stored in one JSON file of the user's cache folder.

    {"schema": 1, "machines": {"<flashvar> / <triton> / <device>": {"forward 64": [128, 64, 4, 3]}}}

Tiles of other versions or devices stay in the file but are not used. A file that cannot be read is
ignored, with one line in the log. If the folder cannot be written, tiles are not stored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from flashvar._version import __version__
from flashvar.backends.triton.attention.tiles import Tile

try:
    import fcntl
except ImportError:  # not Unix: replacing the file is still atomic, merging is not
    fcntl = None  # type: ignore[assignment]

_SCHEMA: Final = 1
_FILE: Final = "tuned.json"
_log: Final = logging.getLogger("flashvar")


def path() -> Path | None:
    """The file, in FLASHVAR_CACHE_DIR or the user's cache folder; None without a home folder."""
    named, caches = (os.environ.get(name) for name in ("FLASHVAR_CACHE_DIR", "XDG_CACHE_HOME"))
    try:
        if named:
            return Path(named).expanduser() / _FILE
        # The specification of XDG_CACHE_HOME says to ignore a relative path.
        folder = Path(caches) if caches and Path(caches).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return folder / "flashvar" / _FILE


def machine(triton: str | None, device: str) -> str:
    """The key of measurements: versions of flashvar and Triton, and the name of the device."""
    return f"{__version__} / {triton} / {device}"


def key(direction: str, size: int) -> str:
    """The key of a kernel's tile; `size` is the larger padded head dim."""
    return f"{direction} {size}"


@cache
def tiles_of(name: str) -> Mapping[str, Tile]:
    """The tiles measured for one machine, by `key`; read once per process."""
    file = path()
    document = {} if file is None else _read(file)
    return {what: Tile(*numbers) for what, numbers in document.get(name, {}).items()}


def keep(name: str, found: Mapping[str, Tile]) -> Path | None:
    """Merge measurements into the file; returns its path, or None if it cannot be written."""
    file = path()
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            machines = _read(file)
            mine = {what: list(tile) for what, tile in found.items()}
            machines[name] = {**machines.get(name, {}), **mine}
            _replace(file, {"schema": _SCHEMA, "machines": machines})
    except OSError as error:
        _log.info("tuned tiles are not kept: %s", error)
        return None
    tiles_of.cache_clear()
    return file


def _read(file: Path) -> dict[str, dict[str, list[int]]]:
    """The machines in a file; empty if the file is missing or not valid."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            raise ValueError(f"expected schema {_SCHEMA}, found {document['schema']!r}")
        machines: dict[str, dict[str, list[int]]] = document["machines"]
        for tiles in machines.values():
            for numbers in tiles.values():
                _check(numbers)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s is ignored, run `flashvar tune` to write it anew: %s", file, error)
        return {}
    return machines


def _check(numbers: Any) -> None:
    if not isinstance(numbers, list) or len(numbers) != len(Tile._fields):
        raise ValueError(f"expected {len(Tile._fields)} numbers of a tile, found {numbers!r}")
    rows_q, rows_kv, warps, stages = numbers
    powers = all(type(one) is int and one > 0 and one.bit_count() == 1 for one in numbers[:3])
    small = powers and 16 <= rows_q <= 256 and 16 <= rows_kv <= 256 and warps <= 16
    if not small or type(stages) is not int or not 1 <= stages <= 8:
        raise ValueError(f"expected the numbers of a tile, found {numbers!r}")


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """A lock: only one process at a time reads, merges and writes."""
    with file.with_suffix(".lock").open("a", encoding="utf-8") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _replace(file: Path, document: dict[str, Any]) -> None:
    """Replace the file atomically: readers see either the old file or the new one."""
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        temporary = Path(folder) / file.name
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
