"""The page on adding an op counts the files of this checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from test_footprint_of_ops import OF_EVERY_COMPILED_OP, OF_EVERY_OP

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-an-op.md"
OP = "merge_states"
PACKAGE = "src/python/flashvar"
# The files of each step: their names, as far as a pattern says them.
STEPS = {
    2: rf"{PACKAGE}/ops/{OP}/spec\.py",
    4: rf"{PACKAGE}/ops/{OP}/(?!spec|verify|warmup|speed).*",
    5: rf"{PACKAGE}/ops/{OP}/(verify|warmup|speed)\.py",
    6: rf"{PACKAGE}/backends/reference/{OP}/.*",
    7: rf"{PACKAGE}/backends/triton/{OP}/.*",
    8: rf"src/cuda/abi/{OP}\.h",
    9: rf"src/cuda/abi/{OP}_.*",
    10: rf"src/cuda/{OP}/.*",
    11: rf"src/cuda/sm90/{OP}/.*",
    12: rf"{PACKAGE}/backends/cuda/{OP}\.py",
    13: rf"tests/.*/\w*{OP}\w*\.py",
}
SHARED = {*OF_EVERY_OP, *OF_EVERY_COMPILED_OP}
TESTS = {file for file in SHARED if file.startswith("tests/")}
OWN_PAGE = f"docs/api/{OP.replace('_', '-')}.md"
# Tests of compiled kernels alone.
COMPILED = re.compile(rf"tests/.*/(host_{OP}|test_{OP}_(kernels|params))\.py")


@pytest.fixture(scope="module")
def files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def of_step(files: list[str], step: int) -> set[str]:
    return {name for name in files if re.fullmatch(STEPS[step], name)}


def counted(beginning: str) -> list[int]:
    """The numbers that the cells of a row begin with, after the cell that begins like this."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {beginning}")]
    numbers = (re.match(r"\d+", cell.strip()) for cell in re.split(r"(?<!\\)\|", row)[2:])
    return [int(number[0]) for number in numbers if number]


@pytest.mark.parametrize("step", STEPS)
def test_files_of_a_step(step: int, files: list[str]) -> None:
    assert counted(f"{step}. ") == [len(of_step(files, step))]


def test_files_of_what_all_ops_share() -> None:
    assert counted("14. ") == [len(TESTS)]
    assert counted("15. ") == [1 + len(SHARED - TESTS)]


def test_files_of_an_op(files: list[str]) -> None:
    families = {name for name in files if re.fullmatch(rf"src/cuda/sm\d+/{OP}/.*", name)}
    own = set().union(*(of_step(files, step) for step in STEPS)) | families | {OWN_PAGE}
    # And variants.toml and ops/__init__.py.
    assert counted("an op as large as") == [len(own), 2 + len(SHARED)]


def test_files_of_an_op_without_cuda_kernels(files: list[str]) -> None:
    own = set().union(*(of_step(files, step) for step in (2, 4, 5, 6, 7, 13))) | {OWN_PAGE}
    own = {name for name in own if not COMPILED.fullmatch(name)}
    # And ops/__init__.py and test_doctor.py.
    assert counted("an op without CUDA kernels") == [len(own), 2 + len(OF_EVERY_OP)]
