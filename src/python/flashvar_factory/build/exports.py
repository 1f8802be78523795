"""Checks that a linked library exports its functions: the build hides what is not marked."""

from __future__ import annotations

import json
from pathlib import Path

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import dynamic, elf


def check(plan_json: Path, library: Path) -> None:
    """BuildError, with the line to add, when a function of the ABI is not exported."""
    plan = json.loads(plan_json.read_text(encoding="utf-8"))
    ops = {row["op"] for row in plan["kernels"]}
    names = {f"{plan['project']}_{name}" for name in ("abi_version", "build_info", *ops)}
    exported = dynamic.read(elf.parse(library.read_bytes(), library), str(library)).exported
    if missing := sorted(names - set(exported)):
        raise BuildError(
            f"{library}: expected the exported functions {', '.join(missing)}, found "
            f"{', '.join(exported) or 'none'}; declare each with default visibility:\n"
            f'  extern "C" __attribute__((visibility("default"))) ... {missing[0]}(...);'
        )
