"""Kernels have used what ldmatrix reads from a buffer before they release it to the next TMA load.

ptxas moves an arrival on an mbarrier to right after the last ldmatrix, whose values may still be on
their way: then TMA may overwrite them. It was seen where several processes share a GPU.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from test_wheels import AT_ONCE, TARGETS, cuobjdump, library, rows_of

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)\s*([^;]*);")
# Registers that an operand stands for.
_SIZES = {"HMMA": 4, "HGMMA": 4}


def registers(operand: str, size: int) -> set[int]:
    found = re.match(r"-?\|?R(\d+)", operand.strip())
    return set() if found is None else set(range(int(found[1]), int(found[1]) + size))


def early_arrivals(sass: str) -> list[str]:
    """The arrivals before which values of ldmatrix were not used, in code without branches."""
    unused: dict[int, int] = {}  # register -> number of its ldmatrix
    early = []
    for number, (address, operation, text) in enumerate(_INSTRUCTION.findall(sass)):
        name, operands = operation.split(".")[0], text.split(",")
        used = {x for one in operands[1:] for x in registers(one, _SIZES.get(name, 1))}
        done = {unused[x] for x in used & unused.keys()}
        unused = {x: of for x, of in unused.items() if of not in done}
        if operation.startswith("SYNCS.ARRIVE") and unused:
            early.append(address)
        if name == "LDSM":
            unused |= dict.fromkeys(registers(operands[0], 4), number)
        elif name in ("BRA", "EXIT", "MEMBAR", "FENCE"):
            unused = {}
    return early


def sass(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines))


_LOAD, _USE = "LDSM.16.M88.4 R44, [R59+0x800]", "HMMA.16816.F32.BF16 R28, R44, R18, R28"
_ARRIVE = "@!P6 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R6+URZ+0x20], RZ"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((_LOAD, _USE, _ARRIVE), []),
        ((_LOAD, _ARRIVE, _USE), ["0010"]),
        ((_LOAD, _LOAD.replace("R44", "R40"), _USE, _ARRIVE), ["0030"]),
        ((_LOAD, "HMMA.16816.F32 R0, R0, R44, R0", _ARRIVE), []),
        ((_LOAD, "@P0 BRA 0x5f0", _ARRIVE), []),  # what follows a branch is not looked at
        ((_ARRIVE, _LOAD, _USE), []),
    ],
)
def test_early_arrivals_are_found(lines: tuple[str, ...], found: list[str]) -> None:
    assert early_arrivals(sass(*lines)) == found


def test_values_of_ldmatrix_are_used_before_buffers_are_released(unpacked: Path) -> None:
    target = TARGETS.get("sm_90")
    if target is None:
        pytest.skip("no wheel of sm_90 is built on this processor")
    names = sorted({name for row in rows_of(unpacked, target) for name in row.functions})
    loading, early = 0, {}
    for start in range(0, len(names), AT_ONCE):
        some = ",".join(names[start : start + AT_ONCE])
        command = [cuobjdump(), "-sass", "-fun", some, library(unpacked, target)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for text in done.stdout.split("Function : ")[1:]:
            loading += "UTMALDG" in text and "LDSM" in text
            if found := early_arrivals(text):
                early[text.split()[0]] = found
    assert loading
    assert early == {}
