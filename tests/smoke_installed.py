"""Does an installed flashvar work? `python -I smoke_installed.py flashvar flashvar-sm80 ...`

Run in an environment with these distributions and nothing of this checkout. Ends with a message and
exit code 1 where something is wrong; prints what it tried.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata, util
from typing import Any


def check(distributions: list[str]) -> str:
    """What works, in one line; AssertionError for what does not."""
    import flashvar

    assert not {"torch", "triton"} & sys.modules.keys(), "import flashvar imported torch or triton"
    assert flashvar.__version__ == metadata.version("flashvar"), flashvar.__version__
    if "flashvar-factory" in distributions:
        assert util.find_spec("wheel_factory"), "flashvar-factory brings no wheel_factory"
    binaries = [name for name in distributions if name not in ("flashvar", "flashvar-factory")]
    opened = _doctor()
    missing = [name for name in binaries if not any(name in origin for origin in opened)]
    assert not missing, f"doctor opened {opened}, not {missing}"
    return f"flashvar {flashvar.__version__}, {len(binaries)} binaries open, {_reference_call()}"


def _doctor() -> list[str]:
    """Where the binaries come from that doctor opened; it judges them all."""
    command = [sys.executable, "-I", "-m", "flashvar", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["healthy"] is (done.returncode == 0), report["conclusion"]
    assert not report["rejected"], report["rejected"]
    return [f"{one['origin']} " for one in report["binaries"]]


def _reference_call() -> str:
    """Attention on the CPU against the formula in float64."""
    if util.find_spec("torch") is None:
        return "no torch to call it with"
    import torch

    import flashvar

    q, k, v = (torch.randn(2, 33, 4, 64) for _ in range(3))
    out = flashvar.attention(q, k, v, backend="reference")
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 64**-0.5
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    error = (out - exact).abs().max().item()
    assert error < 1e-5, f"the reference is wrong by {error}"
    return f"right within {error:.0e} with torch {torch.__version__}"


if __name__ == "__main__":
    try:
        print(check(sys.argv[1:]))
    except AssertionError as error:
        sys.exit(f"expected a working installation, found: {error}")
