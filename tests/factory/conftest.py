"""The factory: importable helpers, what tests without a GPU share, and no auditwheel.

The folders are those of `flashvar_factory`; `builds` is its `build`, a name pytest passes over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from without_gpu import (  # noqa: F401 (pytest finds them here)
    _collected,
    _seeded,
    fresh_registry,
    pytest_collection_finish,
    pytest_configure,
    pytest_sessionfinish,
    pytest_xdist_setupnodes,
    python,
    python_with_models,
    python_with_nox,
)

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def auditwheel(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """auditwheel is content, unless a test says what it answers: for fake libraries."""
    from flashvar_factory.audit import platform_tag

    def answers(answer: object) -> None:
        monkeypatch.setattr(platform_tag, "ask", lambda *_: answer)

    answers(platform_tag.Policy("manylinux_2_17_x86_64", ()))
    return answers
