"""The Python of pages that name a GPU runs on one, together with the rest of the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT, blocks, pages, program

FOR_A_GPU = [
    page for page in pages() if any(b.language == "python" and b.needs for b in blocks(page))
]


@pytest.mark.parametrize("page", FOR_A_GPU, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_a_page(page: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--rehearse"):
        pytest.skip("what is marked gpu names a device")
    (tmp_path / page.name).write_text(program(page, on_gpu=True), encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, page.name],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
