"""Two processes over gloo: torch's context_parallel with flashvar, and attention of DTensors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import result_file

needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason=f"torch {torch.__version__} shards its own function on CUDA devices alone",
)
TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "python"
# Where a part lies after a call of parts that lie over this dimension.
PLACES = {
    "heads": "S(2)",
    "batch": "S(0)",
    "heads bhsd": "S(1)",
    "heads bhsd->bshd": "S(1)",
    "grouped heads": "S(2)",
    "one head of keys": "S(0)",
    "sequence": "R",
    "heads with bias": "S(2)",
    "heads with a bias for all": "S(2)",
    "batch with a bias for all": "S(0)",
    "packed": "S(1)",
    "dropout": "R",
    "merged, heads": "S(2)",
    "merged, batch": "S(0)",
    "merged, sequence": "S(2)",
    "merged, packed rows": "S(0)",
    "merged, stacked": "S(2)",
}
PLACES_OF_TORCHS = {"torch's function, heads": "S(1)", "torch's function, batch": "S(0)"}


def run_ranks(python: str, script: Path, *arguments: str) -> None:
    """Two ranks of a script, as torch.distributed.run starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join((str(SOURCES), str(TESTS)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith("FLASHVAR_")]:
        del environment[name]
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [python, str(script), *arguments],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


@needs_registry
def test_context_parallel(tmp_path: Path, python_with_models: str) -> None:
    """Activated before it or inside: outputs, gradients and who computed, of every setting."""
    results = tmp_path / "results.json"
    script = TESTS / "gpu" / "context_parallel.py"
    run_ranks(python_with_models, script, "--rehearse", "--results", str(results))
    checked = result_file.read(results)["cases"]
    assert len(checked) == 14
    for case in checked:
        assert case["right"], case
        assert max(case["errors"].values()) < 1e-5, case
        assert case["forwards_of_flashvar"] == case["forwards_expected"] > 0


@pytest.fixture(scope="module")
def sharded(
    python_with_models: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(python_with_models, Path(__file__).with_name("sharded_attention.py"), str(folder))
    files = (folder / f"found-{rank}.json" for rank in range(2))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("case", PLACES)
def test_dtensors(case: str, sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert max(found[case]["errors"]) < 1e-12
        assert found[case]["places"][1] == PLACES[case]


@needs_registry
@pytest.mark.parametrize("case", PLACES_OF_TORCHS)
def test_torchs_function_of_dtensors(case: str, sharded: list[dict[str, Any]]) -> None:
    for found in sharded:
        assert max(found[case]["errors"]) < 1e-12
        assert set(found[case]["places"]) == {PLACES_OF_TORCHS[case]}
        assert found[case]["report"] == {"served by flashvar below torch's dispatcher": 1}


def test_dtensors_beside_plain_tensors(sharded: list[dict[str, Any]]) -> None:
    words = "all tensors of attention must be DTensors, or none, got DTensors beside plain k, v: "
    assert all(found["mixture"].startswith(words) for found in sharded)
