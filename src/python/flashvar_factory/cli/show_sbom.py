"""Check the SBOMs in wheels, and list what is in them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flashvar_factory.build import sbom


def configure(parser: argparse.ArgumentParser) -> None:
    """Which wheels; `--json` for the documents themselves."""
    parser.add_argument("wheels", nargs="+", type=Path, metavar="FILE", help="binary wheels")
    parser.add_argument("--json", action="store_true", help="print the documents")


def run(arguments: argparse.Namespace) -> None:
    """Print one line per component."""
    for wheel in arguments.wheels:
        documents = sbom.read(wheel)
        for text in documents.values():
            print(text if arguments.json else _summary(wheel.name, text))
        if not documents and not arguments.json:
            print(f"{wheel.name}: no binary in it")


def _summary(wheel: str, text: str) -> str:
    document = json.loads(text)
    number = document.get("serialNumber", "without a serial number")
    lines = [f"{wheel}: CycloneDX {document['specVersion']}, {number}"]
    for one in sbom.components(text):
        row = (one.scope, one.name, one.version, one.sha256[:16])
        lines.append("  {:<9} {:<14} {:<12} {}".format(*row).rstrip())
    return "\n".join(lines)
