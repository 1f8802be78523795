"""`flashvar.compat.flash_attn` under packages of PyPI that import `flash_attn`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[2] / "src" / "python"


def run_in_two_processes(python: str, script: str, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [python, str(HERE / script), str(rank), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said


def test_collectives_over_two_processes(tmp_path: Path, python_with_models: str) -> None:
    """OpenRLHF has them from flash_attn.utils.distributed."""
    run_in_two_processes(python_with_models, "collectives.py", "2", str(tmp_path))


def test_context_parallelism_over_two_processes(tmp_path: Path, python_with_models: str) -> None:
    run_in_two_processes(python_with_models, "context_parallel.py", str(tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"errors-{rank}.json").read_text(encoding="utf-8"))
        assert sorted(found) == [
            "ring-flash-attn",
            "ring-flash-attn causal",
            "yunchang",
            "yunchang causal",
        ]
        for name, errors in found.items():
            assert sorted(errors) == ["dk", "dq", "dv", "out"]
            for tensor, error in errors.items():
                assert error < 0.05, (name, tensor)  # values up to 8, in bfloat16
