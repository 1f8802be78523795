"""Describe what a library is made of (CMake calls this when it installs)."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from flashvar.binaries import manifest as manifests
from flashvar_factory.build import sbom
from flashvar_factory.inspect import archive


def configure(parser: argparse.ArgumentParser) -> None:
    """The manifest, what was linked, and the folder to write to."""
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--license", required=True, help="SPDX expression of the distribution")
    parser.add_argument("--compiler", nargs=2, required=True, metavar=("ID", "VERSION"))
    parser.add_argument("--cudart", type=Path, required=True)
    parser.add_argument("--libstdcxx", type=Path)
    parser.add_argument("--glibc-symbols", type=Path)
    parser.add_argument("--glibc", default="", help="the version of those symbols")
    parser.add_argument("--output", type=Path, required=True)


def run(arguments: argparse.Namespace) -> None:
    """Write the document."""
    manifest = manifests.read(arguments.manifest)
    compiler, compiler_version = arguments.compiler
    release = ".".join(manifest.toolkit.machine_code.split(".")[:2])
    link = sbom.Link(
        compiler,
        compiler_version,
        cudart=_part(arguments.cudart, release),
        libstdcxx=_part(arguments.libstdcxx, compiler_version) if arguments.libstdcxx else None,
        glibc=_part(arguments.glibc_symbols, arguments.glibc) if arguments.glibc_symbols else None,
    )
    text = sbom.document(manifest, link, arguments.license, archive.epoch())
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / sbom.file_name(manifest.distribution)).write_text(text, encoding="utf-8")


def _part(path: Path, version: str) -> sbom.Part:
    return sbom.Part(path.name, version, hashlib.sha256(path.read_bytes()).hexdigest())
