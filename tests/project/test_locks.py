"""The lock files have what pyproject.toml pins, with hashes; what is published is built of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flashvar_factory.build import self_contained

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path for path in sorted((ROOT / "locks").glob("*.txt"))}
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS["run"] = ROOT / ".ci" / "run"
HASH = r" \\\n    --hash=sha256:[0-9a-f]{64}"


def locked(path: Path) -> dict[str, Requirement]:
    """The requirements of a lock file; every one has hashes."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("#"))
    entries = re.findall(rf"^(\S.*?)((?:{HASH})+)\n", text, re.MULTILINE)
    assert "".join(f"{head}{hashes}\n" for head, hashes in entries) == text
    found = [Requirement(head) for head, _ in entries]
    return {canonicalize_name(one.name): one for one in found}


@pytest.mark.parametrize("path", LOCKS.values(), ids=LOCKS)
def test_a_lock_has_the_pins_of_its_group(path: Path) -> None:
    """`nox -s lock` writes it anew."""
    inside = locked(path)
    assert all(len(one.specifier) == 1 and "==" in str(one.specifier) for one in inside.values())
    for pin in map(Requirement, self_contained.group_of(path.stem)):
        assert inside[canonicalize_name(pin.name)].specifier == pin.specifier


def test_the_sessions_install_what_is_locked() -> None:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (names,) = re.findall(r"^LOCKED = (\[[^]]+\])$", text, re.MULTILINE)
    assert ast.literal_eval(names) == list(LOCKS)


@pytest.mark.parametrize("path", WORKFLOWS.values(), ids=WORKFLOWS)
def test_workflows_install_what_is_locked(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    loose = [
        line
        for line in re.findall(r"(?:pip\"?|uv|pipx) install.*", text)
        if not re.search(r"--require-hashes -r locks/[\w-]+\.txt", line)
    ]
    assert loose == []
