"""What an op adds lies in its own folders, variants.toml and one line of the table of ops."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashvar.ops import TABLE

ROOT = Path(__file__).parents[2]
TABLE_FILE = "src/python/flashvar/ops/__init__.py"
# Stand-ins for other packages and layers are made of ops.
USERS = ("src/python/flashvar/compat/", "src/python/flashvar/layers/")
# Attention is what flashvar stands in for elsewhere: integrations and the command line name it.
OPS = [op for op in TABLE if op != "attention"]


def sources() -> list[str]:
    """Every file of src, as git knows them or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def is_own(file: str, op: str) -> bool:
    """A file in a folder of the op's name, or whose name begins with it."""
    *folders, name = file.split("/")
    return op in folders or bool(re.match(rf"{op}(_|\.)", name))


@pytest.mark.parametrize("op", OPS)
def test_no_other_file_names_the_op(op: str) -> None:
    spelled = re.compile(op.replace("_", "[_ ]?"), re.IGNORECASE)
    named = {
        file
        for file in sources()
        if not file.startswith(USERS)
        and (
            spelled.search((ROOT / file).read_text(encoding="utf-8", errors="replace"))
            or spelled.search(file)
        )
    }
    own = {file for file in named if is_own(file, op)}
    assert named - own == {TABLE_FILE}
    # An op that binaries are built for has sources for them.
    built = f"[ops.{op}_" in (ROOT / "variants.toml").read_text()
    assert any(file.startswith("src/cuda/") for file in own) is built
    lines = [line for line in (ROOT / TABLE_FILE).read_text().splitlines() if op in line]
    # The types, a name each in __all__, and the entry.
    assert len(lines) <= 2 + len(TABLE[op])
