"""Build and check a release, and write a report: if a stage fails, there is no release."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from flashvar.errors import ConfigurationError
from flashvar_factory.build import process
from flashvar_factory.cli import selected, target_pythons
from flashvar_factory.cli.selected import Selected
from flashvar_factory.config import this_machine, version
from flashvar_factory.config.expand import Build
from flashvar_factory.release import checkout, members, pipeline, publish, report
from flashvar_factory.release.pipeline import Release
from flashvar_factory.release.stages import STAGES
from flashvar_factory.toolchain.nvcc import Toolchain


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, where the release works, and where it goes."""
    selected.add_arguments(parser)
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path(pipeline.FOLDER),
        help=f"where it works (default: {pipeline.FOLDER})",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("dist"), help="folder of the files (default: dist)"
    )
    target_pythons.add_argument(parser)


def run(arguments: argparse.Namespace) -> None:
    """Run the stages, with their progress; the report at the end."""
    selection = selected.read(arguments)
    _refuse_what_no_release_is(selection)
    root = arguments.root
    revision = checkout.revision(root)
    builds = tuple(
        (one, compiler) for part in _platforms(selection) for one, compiler in _builds(part)
    )
    selection.require(tuple(one for one, _ in builds))
    expected = members.expected(selection.config, [one for one, _ in builds], root)
    release = Release(
        config=selection.config,
        root=root,
        folder=(root / arguments.work_dir).resolve(),
        version=version.read(selection.config, root),
        revision=revision,
        builds=builds,
        members=expected,
        selection=_selection(arguments.selection, selection),
        pythons=target_pythons.read(arguments),
        jobs=selection.arguments.jobs,
    )
    output = root / arguments.output
    publish.prepare(output, expected)
    with process.locked(release.folder):
        done = pipeline.run(release, STAGES)
        found = report.document(release, done)
        files = [release.wheels / file["file"] for file in found["files"]]
        reports = publish.publish(output, files, found)
    print(report.text(found))
    for path in (*reports, release.folder / "index", release.folder / "variants"):
        print(path)


def _refuse_what_no_release_is(selection: Selected) -> None:
    part, of = selection.arguments.shard
    if of != 1:
        raise ConfigurationError(
            f"shard={part}/{of}: expected a whole release, found a shard; build shards with "
            "`wheels`, and `merge-shards` them"
        )
    if selection.arguments.ptx:
        raise ConfigurationError(
            "ptx=1: expected a release, found PTX, which is compiled at first use on devices that "
            "nobody tried; use `wheels`"
        )


def _selection(given: list[str], selection: Selected) -> dict[str, tuple[str, ...]]:
    """The selection arguments of `wheels`, by platform."""
    rest = tuple(word for word in given if not word.startswith("platform="))
    return {
        platform: (*rest, f"platform={platform}")
        for platform in dict.fromkeys(
            (this_machine.PROCESSOR, selection.arguments.platform or this_machine.PROCESSOR)
        )
    }


def _platforms(selection: Selected) -> list[Selected]:
    """This machine's own platform and, where another was named, that one too."""
    if selection.arguments.platform in (None, this_machine.PROCESSOR):
        return [selection]
    own = dataclasses.replace(selection.arguments, platform=None)
    return [dataclasses.replace(selection, arguments=own), selection]


def _builds(selection: Selected) -> list[tuple[Build, Toolchain]]:
    compiler = selection.compiler()
    return [(one, compiler) for one in selection.whole_release()]
