"""What all unit tests share: importable helpers beside them, and a registry that knows nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

VARIABLES = ("BACKEND", "FORCE_ARCH", "LIB_DIR", "STRICT", "LOG")


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what was found and refused, before and after, and what the environment says."""
    from flashvar.binaries import registry
    from flashvar.selection import resolve as decide

    for name in VARIABLES:
        monkeypatch.delenv(f"FLASHVAR_{name}", raising=False)
    monkeypatch.setattr(registry, "_refused", {})
    monkeypatch.setattr(registry, "_missing", {})
    monkeypatch.setattr(decide, "_logged", set())
    registry.installed.cache_clear()
    yield
    registry.installed.cache_clear()


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A program that is Python with torch loaded already (forked.py)."""
    folder = tmp_path_factory.mktemp("python")
    script, address = Path(__file__).with_name("forked.py"), folder / "socket"
    command = [sys.executable, str(script), str(address)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        program = folder / "python"
        line = f'exec "{sys.executable}" -IS "{script}" "{address}" ask "$@"\n'
        program.write_text(f"#!/bin/sh\n{line}", encoding="utf-8")
        program.chmod(0o755)
        yield str(program)
        server.terminate()


@pytest.fixture
def auditwheel(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """auditwheel is content, unless a test says what it answers: for libraries on paper."""
    from flashvar_factory.audit import platform_tag

    def answers(answer: object) -> None:
        monkeypatch.setattr(platform_tag, "ask", lambda wheel, name: answer)

    answers(platform_tag.Policy("manylinux_2_17_x86_64", ()))
    return answers
