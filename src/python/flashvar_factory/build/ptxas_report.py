"""Keeps the report of ptxas beside each object, as a compiler launcher, and parses it.

As `python -S -E ptxas_report.py nvcc ... -Xptxas=-v -o X.o` it runs the command, writes what ptxas
prints to X.o.ptxas, shows warnings and errors only, and fails where ptxas dropped what the kernel
is written around. Standard library only, and few imports: it starts once per object.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple

SUFFIX = ".ptxas"

# C7508: setmaxnreg ignored; C7510: wgmma serialized. Both are "info" to ptxas and slow to us.
_FATAL = re.compile(r"\(C75(08|10)\)")
# Everything that -Xptxas=-v adds: remarks, and the indented line of sizes under one of them.
_REMARK = re.compile(r"ptxas info\s*:|\s+\d+ bytes stack frame|\s*$")

_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>[^']+)' for '(?P<code>[^']+)'")
_SIZES = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")


class Usage(NamedTuple):
    """The kernels of an object, and the most that any of them needs, per thread."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    functions: tuple[str, ...]  # mangled, sorted


def parse(report: str) -> Usage | None:
    """Read a kept report; None when it names no kernel."""
    functions = {match["symbol"] for match in _ENTRY.finditer(report)}
    registers = [int(match["registers"]) for match in _REGISTERS.finditer(report)]
    sizes = list(_SIZES.finditer(report))
    if not functions or not registers or not sizes:
        return None
    return Usage(
        registers=max(registers),
        spill_bytes=max(max(int(size["stores"]), int(size["loads"])) for size in sizes),
        stack_bytes=max(int(size["stack"]) for size in sizes),
        functions=tuple(sorted(functions)),
    )


def launch(command: list[str]) -> int:
    """Run a compile command; its exit code, or 1 where ptxas reports what must not be."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    report = done.stdout.decode(errors="replace")
    fatal = [line for line in report.splitlines() if _FATAL.search(line)]
    shown = [line for line in report.splitlines() if not _REMARK.match(line)]
    for line in shown + fatal:
        print(line, file=sys.stderr)
    output = command[command.index("-o") + 1] if "-o" in command else None
    if done.returncode != 0 or output is None:
        return done.returncode
    if fatal:
        os.unlink(output)  # noqa: PTH108, pathlib takes as long to import as all else here
        print("error: the kernel is written around what ptxas dropped here", file=sys.stderr)
        return 1
    with open(output + SUFFIX, "w", encoding="utf-8") as file:  # noqa: PTH123, as above
        file.write(report)
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
