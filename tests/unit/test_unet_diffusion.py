"""The diffusion example: it learns, and draws a picture that can be read."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_few_steps_on_the_cpu(tmp_path: Path, python: str) -> None:
    target = tmp_path / "samples.png"
    words = ["--steps", "30", "--batch", "8", "--backend", "reference", "--image", str(target)]
    done = subprocess.run(
        [python, str(ROOT / "examples" / "unet_diffusion.py"), *words],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT / "src" / "python"),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert "attention: flashvar\n" in done.stdout, done.stderr
    first, last = map(float, re.findall(r"([\d.]+) (?:at first|over)", done.stdout))
    assert last < first / 2
    assert done.returncode == (0 if last < first / 3 else 1)
    assert struct.unpack(">8sI4sII", target.read_bytes()[:24])[2:] == (b"IHDR", 8 * 72, 4 * 72)
