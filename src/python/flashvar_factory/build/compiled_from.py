"""Records the sources that filled a CMake folder, and empties it where ninja would miss a change.

Ninja compiles a source again if it is newer than the object. One that was changed by a copy which
keeps times, from an archive, or after the clock went back, is older: the old object would get the
hash of the new sources.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flashvar_factory.build import source

FILE: Final = "compiled_from.json"


def claim(folder: Path, root: Path) -> None:
    """Empty `folder` if a source has other content and no newer time, and record the sources."""
    record = folder.with_name(FILE)
    now = {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for _, path in source.compiled(root)
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    fresh = record.with_suffix(".partial")
    fresh.write_text(json.dumps(now, indent=1), encoding="utf-8")
    why = _missed(record, now, fresh.stat().st_mtime_ns)
    if why is not None and folder.is_dir():
        print(f"{folder}: starts empty: {why}", flush=True)
        shutil.rmtree(folder)
    fresh.replace(record)  # last: after an interrupted removal the change is found again


def _missed(record: Path, now: Mapping[str, str], time: int) -> str | None:
    """What ninja does not see, in words; None if nothing, or if there is no record."""
    try:
        before: dict[str, str] = json.loads(record.read_text(encoding="utf-8"))
        recorded = record.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
    if time < recorded:
        return "the clock went back since the last build"
    for name, digest in now.items():
        if name in before and before[name] != digest and Path(name).stat().st_mtime_ns <= recorded:
            return f"{name} changed, and its time is older than the last build"
    return None
