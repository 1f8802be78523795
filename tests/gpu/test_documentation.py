"""What pages say needs a GPU runs on one: Python with the rest of its page, and commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from documented import ROOT, Block, blocks, pages, program, shown_after
from shell import Shell, why_wrong

_OF_TRITON = re.compile(r"^flashvar (warmup|tune) ", re.MULTILINE)
FOR_A_GPU = [block for page in pages() for block in blocks(page) if block.needs == "gpu"]
PAGES = list(dict.fromkeys(block.page for block in FOR_A_GPU if block.language == "python"))
COMMANDS = [
    pytest.param(
        block,
        # Commands that compile Triton's kernels, and nothing else.
        marks=pytest.mark.kernels_of("triton") if _OF_TRITON.search(block.text) else (),
        id=str(block),
    )
    for block in FOR_A_GPU
    if block.language == "sh"
]


@pytest.fixture(autouse=True)
def _on_a_gpu(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--rehearse"):
        pytest.skip("what is marked gpu names a device")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page(page: Path, tmp_path: Path) -> None:
    text = program(page, on_gpu=True)
    if "import matplotlib" in text and find_spec("matplotlib") is None:
        pytest.skip("expected matplotlib for the page's picture, found none for this Python")
    (tmp_path / page.name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, page.name],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", COMMANDS)
def test_commands_do_what_the_page_says(block: Block, tmp_path: Path) -> None:
    scripts, folder = tmp_path / "bin", tmp_path / "here"
    scripts.mkdir()
    folder.mkdir()
    for name, arguments in (("python", ""), ("flashvar", " -m flashvar")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        script.chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    environ = {
        **environment(),
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "FLASHVAR_CACHE_DIR": str(tmp_path / "cache"),
    }
    shell = Shell(folder, environ, tmp_path / "state")
    assert why_wrong(block, shell, shown_after(block)) is None
