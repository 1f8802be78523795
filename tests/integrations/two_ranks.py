"""Two processes over gloo, as torch.distributed.run starts them, and what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "python"


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


def found_by(python: str, script: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank of a script beside this file wrote."""
    run_ranks(python, Path(__file__).with_name(f"{script}.py"), str(folder))
    files = (folder / f"found-{rank}.json" for rank in range(2))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]
