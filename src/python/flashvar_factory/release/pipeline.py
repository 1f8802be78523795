"""Runs the stages of a release one after the other: all of them or no release."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from flashvar_factory.config.expand import Build
from flashvar_factory.config.schema import Config
from flashvar_factory.errors import ReleaseError
from flashvar_factory.release import steps
from flashvar_factory.release.members import Member
from flashvar_factory.release.pythons import Python
from flashvar_factory.release.steps import Outcome, Step
from flashvar_factory.toolchain.nvcc import Toolchain

FOLDER: Final = "build/release"


@dataclass(frozen=True)
class Release:
    """What is to be released, and from what."""

    config: Config
    root: Path
    folder: Path  # where stages work and keep what they made
    version: str
    revision: str
    builds: tuple[tuple[Build, Toolchain], ...]
    members: tuple[Member, ...]
    selection: Mapping[str, tuple[str, ...]]  # platform -> selection arguments of `wheels`
    pythons: tuple[Python, ...] = ()  # to install into
    jobs: int | None = None

    @property
    def wheels(self) -> Path:
        """The folder of the release's files, until they are checked."""
        return self.folder / "wheels"


class Stage(Protocol):
    """A module of `stages`; its key in `STAGES` is what people read."""

    def steps(self, release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
        """What to do; `done` holds the outcomes of the steps before, by name."""


def run(release: Release, stages: Mapping[str, Stage]) -> dict[str, Outcome]:
    """Every step of every stage, in order; the first error ends the release.

    ReleaseError where a file changed after its step made it: a check may have read other bytes.
    """
    done: dict[str, Outcome] = {}
    made: list[Step] = []
    for number, (name, stage) in enumerate(stages.items(), start=1):
        print(f"[{number}/{len(stages)}] {name}", flush=True)
        for step in stage.steps(release, done):
            outcome = steps.recall(step, release.folder)
            began = time.monotonic()
            how = "done before"
            if outcome is None:
                print(f"  {step.name} ...", flush=True)
                outcome = steps.perform(step, release.folder)
                how = f"{time.monotonic() - began:.1f} s"
            print(f"  {step.name}: {outcome.summary} ({how})", flush=True)
            done[step.name] = outcome
            made.append(step)
    changed = [step.name for step in made if steps.recall(step, release.folder) is None]
    if changed:
        raise ReleaseError(
            f"expected the files of {', '.join(changed)} as they were made, found others: "
            "something changed them during the checks; release again"
        )
    return done


def files_of(done: Mapping[str, Outcome]) -> tuple[Path, ...]:
    """The files that the stage `wheels` made, in their order."""
    return tuple(
        file for name, one in done.items() if name.startswith("wheels/") for file in one.files
    )


def wheels_of(done: Mapping[str, Outcome]) -> tuple[Path, ...]:
    """The wheels among them."""
    return tuple(file for file in files_of(done) if file.suffix == ".whl")
