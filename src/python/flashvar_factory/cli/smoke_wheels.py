"""Install wheels into fresh environments, one per Python found, and try them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from flashvar_factory import index
from flashvar_factory.cli import target_pythons
from flashvar_factory.config import schema
from flashvar_factory.errors import SmokeError
from flashvar_factory.index import serve
from flashvar_factory.release import smoke


def configure(parser: argparse.ArgumentParser) -> None:
    """What is installed, from where, and into which Pythons."""
    parser.add_argument(
        "--wheels", type=Path, default=Path("dist"), help="folder of wheels (default: dist)"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--index-url", help="install from this index, which has the files of --wheels"
    )
    source.add_argument(
        "--serve",
        action="store_true",
        help="make an index of the wheels and install from it over HTTP",
    )
    target_pythons.add_argument(parser)
    parser.add_argument(
        "--with",
        dest="with_versions",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="also install this, e.g. torch==2.8.0; repeated, each has its own environments",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print each environment as it is done; SmokeError where one failed."""
    chosen = target_pythons.read(arguments)
    wheels = arguments.root / arguments.wheels
    with _served(wheels) if arguments.serve else nullcontext(arguments.index_url) as index_url:
        report = smoke.run(
            wheels,
            root=arguments.root,
            config=schema.read(arguments.root / schema.FILE_NAME),
            pythons=chosen,
            index_url=index_url,
            with_versions=arguments.with_versions,
        )
    if arguments.json is not None:
        arguments.json.write_text(report.to_json(), encoding="utf-8")
    failed = [check for check in report.checks if check.error is not None]
    if failed:
        raise SmokeError(
            f"expected wheels that work everywhere, found {len(failed)} of {len(report.checks)} "
            "environments where they do not; see above"
        )


@contextmanager
def _served(wheels: Path) -> Iterator[str]:
    """The address of an index of the wheels."""
    with tempfile.TemporaryDirectory(prefix="index-") as folder:
        index.write(wheels, Path(folder, "site"))
        with serve.serving(Path(folder, "site")) as address:
            yield address
