"""Pipelines and pages call what there is, and what others publish is pinned to a commit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashvar_factory.cli import COMMANDS

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PAGES = {
    str(path.relative_to(ROOT)): path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
CALLERS = {**WORKFLOWS, **PAGES}


def sessions() -> set[str]:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    found = re.findall(r"^@nox\.session\((.*)\)\ndef (\w+)\(", text, re.MULTILINE)
    return {
        named[1] if (named := re.search(r'name="([\w-]+)"', options)) else function
        for options, function in found
    }


def test_the_search_sees_sessions_and_workflows() -> None:
    assert {"build-dev", "tests", "wheels"} <= sessions()
    assert {"ci.yml", "wheels.yml", "gpu.yml"} <= set(WORKFLOWS)


@pytest.mark.parametrize("path", CALLERS.values(), ids=CALLERS)
def test_sessions_exist(path: Path) -> None:
    named = set(re.findall(r"nox\"? -s ([\w-]+)", path.read_text(encoding="utf-8")))
    assert named <= sessions()


@pytest.mark.parametrize("path", CALLERS.values(), ids=CALLERS)
def test_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"-m flashvar_factory ([\w-]+)", text)) <= set(COMMANDS)


@pytest.mark.parametrize("path", WORKFLOWS.values(), ids=WORKFLOWS)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text(encoding="utf-8"))
    assert used
    loose = [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", one)]
    assert loose == []


def test_flashvar_is_published_last() -> None:
    text = WORKFLOWS["wheels.yml"].read_text(encoding="utf-8")
    jobs = dict(re.findall(r"^  ([\w-]+):\n(?:.*\n)*?    needs: (.+)$", text, re.MULTILINE))
    assert jobs["publish"] == "publish-binary"
    assert jobs["publish-binary"] == "rehearse"
    assert jobs["rehearse"] == "attest"
    assert jobs["attest"] == "[every-wheel, reproduce, together]"
