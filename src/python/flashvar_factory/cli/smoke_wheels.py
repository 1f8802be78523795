"""Install wheels into fresh environments, one per Python found, and try them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flashvar.errors import SmokeError
from flashvar_factory import pythons, schema, smoke


def configure(parser: argparse.ArgumentParser) -> None:
    """What is installed, from where, and into which Pythons."""
    parser.add_argument("--wheels", type=Path, default=Path("dist"))
    parser.add_argument("--index-url", help="install from this index; --wheels says what it has")
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        help="an interpreter, instead of each Python 3.10 or newer found; may be repeated",
    )
    parser.add_argument(
        "--with",
        dest="with_versions",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="e.g. torch==2.8.0, from the configured index; each makes its own environments",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")


def run(arguments: argparse.Namespace) -> None:
    """Print each environment as it is done; SmokeError where one failed."""
    chosen = pythons.named(arguments.python) if arguments.python else pythons.find(os.environ)
    report = smoke.run(
        arguments.root / arguments.wheels,
        root=arguments.root,
        config=schema.read(arguments.root / schema.FILE_NAME),
        pythons=chosen,
        index_url=arguments.index_url,
        with_versions=arguments.with_versions,
    )
    if arguments.json is not None:
        arguments.json.write_text(report.to_json(), encoding="utf-8")
    failed = [check for check in report.checks if check.fault is not None]
    if failed:
        raise SmokeError(
            f"expected wheels that work everywhere, found {len(failed)} of {len(report.checks)} "
            "environments where they do not; see above"
        )
