"""A variants.toml of the tests' own, so that what the project builds can change."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flashvar_factory.config import schema

TEXT: Final = """\
schema = 1

[project]
name = "flashvar"
abi = 1
version_file = "src/python/flashvar/_version.py"
license = "Apache-2.0"

[defaults]
ops = ["attention_fwd"]
dtype = ["bf16", "fp16"]
head_dim = [32, 64, 96, 128, 192, 256]

[ops.attention_fwd.axes]
dtype = { choices = ["bf16", "fp16"] }
head_dim = { min = 8, max = 256, step = 8 }

[architectures]
sm_80 = { code = "80", family = "sm80", shared_memory = 166912, distribution = "flashvar-sm80" }
sm_86 = { code = "86", family = "sm80", shared_memory = 101376, distribution = "flashvar-sm86" }
sm_89 = { code = "89", family = "sm80", shared_memory = 101376, distribution = "flashvar-sm89" }
[architectures.sm_90]
code = "90a"
family = "sm80"
shared_memory = 232448
distribution = "flashvar-sm90"
platforms = ["x86_64", "aarch64"]

[dev]
architecture = "sm_80"
head_dim = [64]
"""
CONFIG: Final = schema.parse(TEXT)


def project(root: Path, text: str = TEXT) -> Path:
    """Make the folder of a project that `text` describes: empty sources, version 1.0."""
    launcher = root / schema.LAUNCHER.format(family="sm80", launcher="attention_fwd_launch")
    files = {
        root / schema.FILE_NAME: text,
        root / CONFIG.project.version_file: '__version__ = "1.0"\n',
        launcher: "",
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root
