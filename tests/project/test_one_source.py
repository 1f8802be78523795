"""variants.toml is the only place that lists architectures or head dims."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from flashvar_factory.config import schema

ROOT = Path(__file__).parents[2]
CONFIG = schema.read(ROOT / "variants.toml")

BETWEEN = r"""(?:[\s,;|"'()\[\]]|and|or){1,6}"""


def lists(text: str) -> list[str]:
    """Two of our architectures, or three of our head dims in rising order, one after the other."""
    codes = "|".join(target.architecture.code for target in CONFIG.targets.values())
    architecture = rf"\b(?:sm_?)?(?:{codes}|90)\b"
    head_dim = rf"\b(?:{'|'.join(map(str, CONFIG.axes['head_dim']))})\b"
    found = [
        match[0] for match in re.finditer(rf"{architecture}(?:{BETWEEN}{architecture})+", text)
    ]
    for match in re.finditer(rf"{head_dim}(?:{BETWEEN}{head_dim}){{2,}}", text):
        values = [int(value) for value in re.findall(r"\d+", match[0])]
        if values == sorted(set(values)):
            found.append(match[0])
    return found


def sources() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [
        name
        for name in sorted(set(done.stdout.splitlines()))
        if name == "noxfile.py" or name.startswith(("src/", "cmake/", "CMake"))
        if not name.endswith(".syms") and (ROOT / name).is_file()
    ]


def test_the_search_sees_the_sources() -> None:
    names = sources()
    assert {"noxfile.py", "CMakeLists.txt", "src/cuda/CMakeLists.txt"} <= set(names)
    assert any(name.endswith(".cuh") for name in names)


@pytest.mark.parametrize(
    "text",
    ["sm_80, sm_86", '["80", "90a"]', "80;86;89;90a", "32, 64, 96", "sm80 sm90", "64 or 96 or 128"],
)
def test_a_list_is_seen(text: str) -> None:
    assert lists(text)


@pytest.mark.parametrize("text", ["sm_80", "128, 64", "64, 32, 128", "80 bytes", "head_dim 64"])
def test_other_numbers_are_not_a_list(text: str) -> None:
    assert not lists(text)


def test_no_other_file_lists_variants() -> None:
    found = {name: lists((ROOT / name).read_text(encoding="utf-8")) for name in sources()}
    assert {name: listed for name, listed in found.items() if listed} == {}
