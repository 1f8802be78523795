"""What every test may import, the helpers beside this file, and how torch runs in tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Tensors here are tiny: on a busy machine several threads mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the fuzzers run, and how much is done with documented commands."""
    parser.addoption(
        "--misspell",
        choices=["last", "every"],
        default="last",
        help="which words of documented commands are spelled wrong, to see that it is noticed",
    )
    parser.addoption(
        "--fuzzed", type=int, default=60, help="damaged inputs for each reader (default: 60)"
    )
    parser.addoption("--fuzz-seed", default="flashvar", help="what decides the damage")
