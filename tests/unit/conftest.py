"""What all unit tests share: importable helpers beside them, and a registry that knows nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from without_gpu import (  # noqa: F401 (pytest finds them here)
    _collected,
    _seeded,
    pytest_collection_finish,
    pytest_configure,
    pytest_sessionfinish,
    pytest_xdist_setupnodes,
    python,
    python_with_models,
    python_with_nox,
)

sys.path.insert(0, str(Path(__file__).parent))

VARIABLES = ("BACKEND", "FORCE_ARCH", "LIB_DIR", "STRICT", "LOG")


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what was found, opened and chosen, before and after; and the environment."""
    from flashvar.binaries import loader, registry
    from flashvar.integrations import support
    from flashvar.ops.plans import Plans
    from flashvar.selection import resolve

    for name in VARIABLES:
        monkeypatch.delenv(f"FLASHVAR_{name}", raising=False)
    for module, name in (
        (registry, "_unloadable"),
        (registry, "_missing"),
        (loader, "_libraries"),
        (support, "_kept"),
    ):
        monkeypatch.setattr(module, name, {})
    # Plans hold what was chosen. Of ops that are not imported there are none.
    for module in [one for name, one in sys.modules.items() if name.startswith("flashvar.")]:
        for name, value in [*vars(module).items()]:
            if isinstance(value, Plans):
                monkeypatch.setattr(module, name, Plans())
    monkeypatch.setattr(resolve, "_logged", set())
    cached = registry.installed, resolve.choose
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.fixture
def auditwheel(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """auditwheel is content, unless a test says what it answers: for fake libraries."""
    from flashvar_factory.audit import platform_tag

    def answers(answer: object) -> None:
        monkeypatch.setattr(platform_tag, "ask", lambda *_: answer)

    answers(platform_tag.Policy("manylinux_2_17_x86_64", ()))
    return answers
