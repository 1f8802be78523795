"""Puts the files of all shards together, when they are exactly one release."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashvar_factory.config.schema import Config
from flashvar_factory.release import members, publish
from flashvar_factory.release.members import Member
from flashvar_factory.release.steps import digest


def merge(
    shards: Sequence[Path], output: Path, config: Config, expected: Sequence[Member]
) -> list[Path]:
    """Copy every file of `shards` into `output`; ReleaseError when they do not make a whole."""
    found = [f"{shard}: expected a folder of a shard" for shard in shards if not shard.is_dir()]
    files = [file for shard in shards if shard.is_dir() for file in sorted(shard.iterdir())]
    found += members.complaints(files, expected)
    if not found:
        found += projects_extras(files, config, expected)
    publish.remove_halves(output)
    if output.is_dir() and output.resolve() not in {shard.resolve() for shard in shards}:
        found += members.complaints(output.iterdir(), expected, whole=False)
    members.refuse(
        found, str(output), "build each shard again with the same arguments, then merge these"
    )
    output.mkdir(parents=True, exist_ok=True)
    merged = []
    for file in files:
        target = output / file.name
        if target.resolve() != file.resolve():
            publish.copy(file, output, digest(file))
        merged.append(target)
    return merged


def projects_extras(files: Sequence[Path], config: Config, expected: Sequence[Member]) -> list[str]:
    """The complaints about the extras of the project's own wheel, where it is among `files`."""
    pure = (file for file in files if (one := members.read(file)) and one.platform == members.ANY)
    return [line for file in pure for line in members.extras_complaints(file, config, expected)]
