"""Build everything once more, elsewhere: the bytes are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from flashvar_factory.release import members, reproduce
from flashvar_factory.release.pipeline import Release, files_of
from flashvar_factory.release.steps import Outcome, Step, digests


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step per platform."""
    for platform in release.selection:
        files = [file for file in files_of(done) if _is_for(platform, file)]
        work = partial(_build_again, release, platform, files)
        yield Step(f"reproduce/{platform}", digests(files), work)


def _is_for(platform: str, file: Path) -> bool:
    member = members.read(file)
    return member is not None and (
        member.platform in (members.ANY, members.SDIST) or member.platform.endswith(platform)
    )


def _build_again(release: Release, platform: str, files: Sequence[Path]) -> Outcome:
    compiler = next(one for build, one in release.builds if build.platform == platform)
    folder = release.folder / f"again-{platform}"
    again = reproduce.build_again(
        release.selection[platform], compiler, root=release.root, folder=folder
    )
    reproduce.require(files, again.iterdir(), f"they are in {release.wheels} and {again}")
    return Outcome(f"{len(files)} files built twice are the same bytes")
