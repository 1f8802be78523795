"""What all unit tests share: importable helpers beside them, and a registry that knows nothing."""

from __future__ import annotations

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


@pytest.fixture
def auditwheel(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """auditwheel is content, unless a test says what it answers: for libraries on paper."""
    from flashvar_factory.audit import platform_tag

    def answers(answer: object) -> None:
        monkeypatch.setattr(platform_tag, "ask", lambda wheel, name: answer)

    answers(platform_tag.Policy("manylinux_2_17_x86_64", ()))
    return answers
