"""Check that wheels and sdists are what they claim to be; no CUDA toolkit needed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flashvar_factory import audit
from flashvar_factory.audit import expectations, source_checks
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.config import schema


def configure(parser: argparse.ArgumentParser) -> None:
    """The wheels, the form of the answer and the limit."""
    parser.add_argument("wheels", nargs="+", type=Path, metavar="FILE", help="wheels and sdists")
    parser.add_argument("--json", action="store_true", help="print a list of reports as JSON")
    parser.add_argument(
        "--budget",
        type=int,
        metavar="BYTES",
        help="largest size of a wheel in bytes "
        f"(default: {expectations.BUDGET:,} for binary wheels)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print a report for each file; AuditError if there is anything against one."""
    expected = _expected(arguments.root, arguments.budget)
    sdists = [path for path in arguments.wheels if path.name.endswith(".tar.gz")]
    reports = [audit.audit(path, expected) for path in arguments.wheels if path not in sdists]
    if arguments.json:
        print(json.dumps([json.loads(report.to_json()) for report in reports], indent=1))
    else:
        print("\n".join(report.text() for report in reports))
    audit.require_sdists({path: source_checks.audit_sdist(path, expected) for path in sdists})
    audit.require(reports)


def _expected(root: Path, budget: int | None) -> Expectations:
    """What the project here expects, if this is the folder of one."""
    file = root / schema.FILE_NAME
    return (
        expectations.of(schema.read(file), budget, root=root)
        if file.is_file()
        else Expectations(budget=budget)
    )
