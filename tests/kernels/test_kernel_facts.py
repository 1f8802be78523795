"""Kernel facts: names that do not fit their fields."""

from __future__ import annotations

import subprocess
from pathlib import Path

import host_program
import pytest

_PROGRAM = """
#include "core/kernel_facts.h"
constexpr flashvar::KernelFactsMaker maker{"row", "simt", "every call"};
constexpr flashvar::KernelFacts facts = maker.make("%s", 32, 0, 0);
int main() { return facts.kernel[%d] == '\\0' ? 0 : 1; }
"""

pytestmark = host_program.needs_compiler


def test_the_longest_kernel_name_is_whole(tmp_path: Path) -> None:
    assert host_program.run(_PROGRAM % ("k" * 31, 31), tmp_path)[0] == 0
    assert host_program.run(_PROGRAM % ("k" * 31, 30), tmp_path)[0] == 1


def test_a_longer_kernel_name_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        host_program.run(_PROGRAM % ("k" * 32, 31), tmp_path)
