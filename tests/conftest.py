"""What every test may import, the helpers beside this file; where and how tests run."""

from __future__ import annotations

import os
import sys
import sysconfig
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


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start again in an environment without this project, unless the tests are for a GPU."""
    import without_project

    if sys.prefix == sys.base_prefix or not without_project.wanted(config.args, Path.cwd()):
        return
    site = Path(sysconfig.get_path("purelib"))
    if without_project.of_project(site):
        environ = without_project.environment(Path(sys.prefix), site, os.environ)
        python = str(Path(environ["VIRTUAL_ENV"]) / "bin" / "python")
        words = [python, "-m", "pytest", *config.invocation_params.args]
        os.execve(python, words, environ)
