"""What brings a binary, before there are releases and afterwards; the pages say the same."""

from __future__ import annotations

import re
from pathlib import Path

import fakes
import pytest
from documented import ROOT, pages

from flashvar.binaries import install_commands
from flashvar.errors import InstallError
from flashvar.installing import wheel_requirements
from flashvar.machine import distributions
from flashvar.selection.request import Overrides, Request
from flashvar.selection.rules import select

NO_RELEASE = "No release is published yet"
# A command, up to the end of its line or of its code.
COMMAND = re.compile(r"(?:uv )?pip install(?:\\\n|[^\n`])*")


def test_until_there_is_a_release_wheels_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_commands, "PUBLISHED", False)
    monkeypatch.setattr(install_commands, "__version__", "1.2.3+local")
    made = "nox -s wheels -- {} && pip install --no-index --find-links dist "
    assert install_commands.install("sm89") == made.format("sm89") + '"flashvar[sm89]"'
    assert install_commands.install_again("flashvar-sm89", "sm_89") == (
        made.format("sm_89") + "--force-reinstall --no-deps flashvar-sm89==1.2.3"
    )


@pytest.mark.parametrize(
    ("published", "command"),
    [(False, "run `pip install .` in a checkout"), (True, "run `pip install flashvar`")],
)
def test_a_missing_runtime_gets_what_works(
    published: bool, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_commands, "PUBLISHED", published)
    monkeypatch.setattr(distributions, "find", lambda name, version: None)
    with pytest.raises(InstallError, match=re.escape(f": {command} first")):
        wheel_requirements.of_installed("linux_x86_64")


def test_a_release_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_commands, "PUBLISHED", True)
    monkeypatch.setattr(install_commands, "__version__", "1.2.3")
    assert install_commands.install("sm89") == 'pip install "flashvar[sm89]"'
    assert install_commands.install_again("flashvar-sm89", "sm_89") == (
        "pip install --force-reinstall --no-deps flashvar-sm89==1.2.3"
    )


@pytest.mark.parametrize("published", [False, True])
def test_a_missing_binary_gets_what_works(published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_commands, "PUBLISHED", published)
    request = Request.of("attention_fwd", "bf16", 0, head_dim=64)
    decision = select(request, fakes.system(fakes.L40S), fakes.inventory(), Overrides())
    fix = fakes.result_of(decision, "cuda sm_89").fix
    assert fix is not None
    assert ("--find-links dist" in fix) is not published


def read(page: Path) -> str:
    """What a reader sees of a page: no marks of blocks."""
    return re.sub(r"^( *```\w+) .*$", r"\1", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Pages, and commands of them that install ours."""
    return [
        (str(page.relative_to(ROOT)), command)
        for page in pages()
        for command in COMMAND.findall(read(page))
        if re.search(r"\bflashvar\b(?!-\*)", command)
    ]


def test_pages_ask_pip_for_what_it_finds() -> None:
    """The page on releasing is about the time when there is one."""
    if install_commands.PUBLISHED:
        assert [page for page in pages() if NO_RELEASE in read(page)] == []
        return
    vain = [
        (page, command)
        for page, command in commands()
        if not page.endswith("releasing.md") and not re.search(r"--find-links|--index\b", command)
    ]
    assert vain == []


def test_pages_let_nobody_else_serve_our_names() -> None:
    """pip takes the highest version of all its sources, so that ours has to be the only one."""
    assert commands()
    for page, command in commands():
        assert "--extra-index-url" not in command, page
        assert "--no-index" in command or "--find-links" not in command, (page, command)
