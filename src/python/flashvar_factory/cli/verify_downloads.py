"""Verify wheels that were downloaded, without a network: hashes, audit, SBOM, attestations."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar.errors import ConfigurationError
from flashvar_factory.audit import expectations
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.config import schema
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive
from flashvar_factory.release import downloaded
from flashvar_factory.release.attestations import Publisher
from flashvar_factory.release.downloaded import Trusted


def configure(parser: argparse.ArgumentParser) -> None:
    """The wheels, and what they are compared with."""
    parser.add_argument("wheels", nargs="+", type=Path, metavar="FILE", help="wheels")
    parser.add_argument(
        "--hashes",
        type=Path,
        metavar="PATH",
        help="a list of SHA-256 hashes, as sha256sum writes it, or the folder of an index",
    )
    parser.add_argument(
        "--publisher",
        metavar="OWNER/REPOSITORY:WORKFLOW.yml",
        help="who must have attested each file, in FILE.publish.attestation or FILE.provenance "
        "next to it",
    )
    parser.add_argument(
        "--require",
        nargs="+",
        default=[],
        choices=downloaded.CHECKS,
        metavar="CHECK",
        help=f"fail if one of these checks cannot be made ({', '.join(downloaded.CHECKS)}); by "
        "default that is reported; --publisher requires attestation",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print what each check found; the exit code is that of the first error."""
    missing = [path for path in arguments.wheels if not path.is_file()]
    if missing:
        raise ConfigurationError(f"{missing[0]}: expected a file, found none; correct the path")
    try:
        names = {path: archive.parse_name(path.name) for path in arguments.wheels}
    except PackagingError as error:
        raise ConfigurationError(f"{error}; name wheels alone") from error
    hashes = None if arguments.hashes is None else downloaded.listed(arguments.hashes)
    publisher = None if arguments.publisher is None else Publisher.parse(arguments.publisher)
    file = arguments.root / schema.FILE_NAME
    stated = Expectations(spills=True)  # what a wheel says of itself
    ours = expectations.of(schema.read(file), root=arguments.root) if file.is_file() else stated
    outcomes = {
        path: downloaded.verify(
            path, Trusted(hashes, publisher, ours if ours.concerns(name) else stated)
        )
        for path, name in names.items()
    }
    for path, found in outcomes.items():
        print("\n".join([path.name, *map(str, found)]))
    print(downloaded.BEYOND)
    implied = set() if publisher is None else {"attestation"}
    downloaded.require(outcomes, implied.union(arguments.require))
