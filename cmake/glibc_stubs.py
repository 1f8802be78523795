"""Builds empty shared libraries that export what an older glibc exported.

Linked against these, a library asks for symbol versions that the older glibc has, whatever the
glibc of the machine that compiled it. The stubs are never loaded: at run time the names resolve to
the real libraries. A symbol younger than the list is an error of the linker, not a surprise on a
user's machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Symbol:
    """One exported name, the version it is bound to, the library it lives in."""

    name: str
    version: str
    library: str
    is_object: bool


def parse(text: str) -> list[Symbol]:
    """Reads lines of `symbol version library [object]`; `#` starts a comment line."""
    symbols = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        match line.split():
            case [name, version, library]:
                symbols.append(Symbol(name, version, library, is_object=False))
            case [name, version, library, "object"]:
                symbols.append(Symbol(name, version, library, is_object=True))
            case _:
                raise SystemExit(
                    f"glibc_stubs: line {number}: expected `symbol version library [object]`, "
                    f"found {line!r}: correct that line of the symbol list"
                )
    return symbols


def assembly(symbols: list[Symbol]) -> str:
    """Every function at one place of .text, every object at one place of .data."""
    lines = []
    for section, kind, chosen in (
        (".text", "function", [s for s in symbols if not s.is_object]),
        (".data", "object", [s for s in symbols if s.is_object]),
    ):
        lines.append(section)
        for symbol in chosen:
            lines += [f".globl {symbol.name}", f".type {symbol.name}, %{kind}", f"{symbol.name}:"]
        lines.append(".quad 0")
    lines.append('.section .note.GNU-stack,"",%progbits')
    return "\n".join(lines) + "\n"


def version_script(symbols: list[Symbol]) -> str:
    """One node a version, ascending; none says `local: *`, which would hide the nodes before it."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for symbol in symbols:
        nodes[symbol.version].append(symbol.name)
    ordered = sorted(nodes, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    return "".join(f"{version} {{ {'; '.join(nodes[version])}; }};\n" for version in ordered)


def build(library: str, symbols: list[Symbol], compiler: str, output: Path) -> None:
    """Assembles and links `output/library`; it is replaced whole, and only by other content."""
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        source, script, result = (Path(scratch) / name for name in ("stub.s", "stub.map", library))
        source.write_text(assembly(symbols), encoding="utf-8")
        script.write_text(version_script(symbols), encoding="utf-8")
        command = [compiler, "-shared", "-nostdlib", "-s", f"-Wl,-soname,{library}"]
        command += [f"-Wl,--version-script,{script}", str(source), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(
                f"glibc_stubs: {compiler} could not link the stub of {library} (exit code "
                f"{done.returncode}):\n{done.stderr}use a compiler for the CPU of the symbol list"
            )
        stub = output / library
        # A newer file of the same content would make the build link everything again.
        if not stub.exists() or stub.read_bytes() != result.read_bytes():
            result.replace(stub)


def main() -> None:
    """Command line: the symbol list, the compiler, the folder to fill."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--symbols", type=Path, required=True, help="the list, a .syms file")
    parser.add_argument("--compiler", required=True, help="gcc or clang of the target CPU")
    parser.add_argument("--output", type=Path, required=True, help="folder for the stub libraries")
    arguments = parser.parse_args()

    by_library: dict[str, list[Symbol]] = defaultdict(list)
    for symbol in parse(arguments.symbols.read_text(encoding="utf-8")):
        by_library[symbol.library].append(symbol)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for library, symbols in by_library.items():
        build(library, symbols, arguments.compiler, arguments.output)


if __name__ == "__main__":
    main()
