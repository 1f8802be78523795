"""Runs a step of a release, unless it is done: with the same inputs, and its files still there.

A finished step has a file in DONE, so an interrupted release goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flashvar_factory.build import source

DONE: Final = "done"
_PIECE: Final = 1 << 20  # bytes of a file that are hashed at a time


@dataclass(frozen=True)
class Outcome:
    """What a step made and found."""

    summary: str  # one line for people
    files: tuple[Path, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # as JSON has them


@dataclass(frozen=True)
class Step:
    """One piece of work, and everything that its outcome depends on."""

    name: str
    inputs: Mapping[str, Any]  # as JSON has them
    run: Callable[[], Outcome]


def recall(step: Step, folder: Path) -> Outcome | None:
    """The outcome of the step in `folder`, None where it must be done."""
    try:
        done = json.loads(_path(step, folder).read_text(encoding="utf-8"))
        files = {Path(name): sha256 for name, sha256 in done["files"].items()}
        if done["inputs"] != identity(step):
            return None
        outcome = Outcome(done["summary"], tuple(files), done["facts"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None  # none, or half of one
    there = all(file.is_file() and digest(file) == sha256 for file, sha256 in files.items())
    return outcome if there else None


def perform(step: Step, folder: Path) -> Outcome:
    """Do the step, and write its file in `folder`."""
    path = _path(step, folder)
    path.unlink(missing_ok=True)
    outcome = step.run()
    done = {
        "step": step.name,
        "inputs": identity(step),
        "summary": outcome.summary,
        "files": {str(file): digest(file) for file in outcome.files},
        "facts": outcome.facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return outcome


def identity(step: Step) -> str:
    """The hash of the inputs, and of the factory that works on them."""
    text = json.dumps([step.name, step.inputs, source.factory()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hex."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def digests(files: Iterable[Path]) -> dict[str, str]:
    """The hashes of files by their names: what the outcome of looking at them depends on."""
    return {file.name: digest(file) for file in files}


def _path(step: Step, folder: Path) -> Path:
    return folder / DONE / f"{step.name}.json"
