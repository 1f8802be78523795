"""The probes of Hopper's primitives compile, to the instructions that they are to test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# kernel of tests/gpu/probes: what its machine code has
INSTRUCTIONS = {
    "phases": ("SYNCS.EXCH", "SYNCS.ARRIVE.TRANS64", "SYNCS.PHASECHK.TRANS64", "UBLKCP.S.G"),
    "ring": ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "UBLKCP.S.G"),
    "turns": ("BAR.SYNC", "BAR.ARV"),
    "registers": ("USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC", "ELECT"),
    "load": ("UTMALDG.4D", "UTMALDG.5D"),
    "multiply": ("HGMMA", "WARPGROUP.ARRIVE"),
    "scale": ("UBLKCP.S.G", "UBLKCP.G.S", "UTMACMDFLUSH"),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[str]]]:
    """What ptxas said, and the SASS of every copy of every kernel."""
    triton = pytest.importorskip("triton", reason="cuobjdump is taken from triton's wheel")
    library = tmp_path_factory.mktemp("probes") / "probes.so"
    command = [sys.executable, ROOT / "tests/gpu/build_probes.py", library]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-sass", library], check=True, capture_output=True, text=True)
    code: dict[str, list[str]] = {}
    for text in done.stdout.split("Function : ")[1:]:
        (kernel,) = (name for name in INSTRUCTIONS if re.search(rf"\d{name}[IEP]", text.split()[0]))
        code.setdefault(kernel, []).append(text)
    return built.stdout, code


@pytest.mark.parametrize("kernel", INSTRUCTIONS)
def test_a_probe_has_the_instructions_it_is_for(
    kernel: str, compiled: tuple[str, dict[str, list[str]]]
) -> None:
    copies = compiled[1][kernel]
    assert [one for one in INSTRUCTIONS[kernel] if not all(one in text for text in copies)] == []


def test_probes_keep_their_registers(compiled: tuple[str, dict[str, list[str]]]) -> None:
    said = compiled[0]
    assert set(re.findall(r"\d+ bytes stack frame, \d+ bytes spill stores", said)) == {
        "0 bytes stack frame, 0 bytes spill stores"
    }
    assert "(C75" not in said  # no setmaxnreg is ignored, no wgmma serialized
