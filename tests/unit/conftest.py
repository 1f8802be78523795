"""What all unit tests share: importable helpers beside them, and a registry that knows nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

VARIABLES = ("BACKEND", "FORCE_ARCH", "LIB_DIR", "STRICT", "LOG")


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what was found and refused, before and after, and what the environment says."""
    from flashvar import registry

    for name in VARIABLES:
        monkeypatch.delenv(f"FLASHVAR_{name}", raising=False)
    monkeypatch.setattr(registry, "_refused", {})
    registry.installed.cache_clear()
    yield
    registry.installed.cache_clear()
