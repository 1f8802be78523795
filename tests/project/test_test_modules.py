"""`pytest tests` runs every folder in one process: an imported helper has one meaning there."""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# On the path of every test, once the conftest.py of each has run.
FOLDERS = [TESTS, *(file.parent for file in sorted(TESTS.glob("*/**/conftest.py")))]


# A statement of imports; the one without "from" may have several modules. To parse all files takes
# most of a second.
STATEMENT = re.compile(r"^[ ]*(?:from (\w+) import\b|import (\w.*))", re.MULTILINE)


def imported(file: Path) -> set[str]:
    """The modules that a file imports by a name without dots."""
    found: set[str] = set()
    for one, several in STATEMENT.findall(file.read_text(encoding="utf-8")):
        parts = several.partition("#")[0].split(",")
        found |= {one} if one else {part.split()[0] for part in parts if part.split()}
    return found


def test_imports_are_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    text = "import a, b as c  # d\nfrom e import f\nfrom .g import h\nfrom i.j import k\nif 1:\n"
    file.write_text(f"{text}    import l\n    from m import (\n        n,\n    )\n")
    assert imported(file) == {"a", "b", "e", "l", "m"}


def test_no_folder_imports_what_another_one_has_too() -> None:
    places = defaultdict(list)
    for folder in FOLDERS:
        for file in folder.glob("*.py"):
            places[file.stem].append(folder.name)
    importers = defaultdict(set)
    for file in TESTS.rglob("*.py"):
        for name in imported(file) & places.keys():
            importers[name].add(file.parent.name)
    shared = {
        name: (sorted(places[name]), sorted(by))
        for name, by in importers.items()
        if len(places[name]) > 1
    }
    assert shared == {}, "rename one of these, or move what is imported into a module of its own"


def test_tests_beside_those_of_the_gpu_run_without_one(python: str) -> None:
    """In one process: tests/gpu skips its own tests alone."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    files = ["tests/gpu/test_rotary.py", "tests/unit/binaries/test_kinds.py"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, env=without_devices()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.strip().splitlines()[-1]
    assert " passed" in summary, summary
    assert " skipped" in summary, summary
    assert "tests/unit" not in "".join(line for line in done.stdout.splitlines() if "SKIP" in line)


def without_devices() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
