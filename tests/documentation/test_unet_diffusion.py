"""The diffusion example: it learns, and draws a picture that can be read."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "unet_diffusion.py"


def test_a_few_steps_on_the_cpu(python_with_models: str) -> None:
    words = ["--steps", "30", "--batch", "8", "--backend", "reference"]
    done = subprocess.run(
        [python_with_models, str(EXAMPLE), *words],
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


def test_samples_are_a_picture(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("unet_diffusion", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    images = example.sample(example.UNet("reference"), 16, "cpu", strides=100)
    assert images.shape == (16, 1, 16, 16)
    assert images.isfinite().all()
    example.write_png(images, tmp_path / "samples.png")
    header = (tmp_path / "samples.png").read_bytes()[:24]
    assert struct.unpack(">8sI4sII", header)[2:] == (b"IHDR", 8 * 72, 2 * 72)
