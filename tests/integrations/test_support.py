"""Integrations ask at every call whether flashvar can run it: the answer follows the settings."""

from __future__ import annotations

import pytest
import torch

import flashvar
from flashvar.integrations import support

pytestmark = pytest.mark.usefixtures("fresh_registry")

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def unsupported(device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    return support.unsupported(dtype, device, 32, 32, False, "auto")


def test_a_refusal_ends_with_the_variable_that_led_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in flashvar.attention itself."""
    q = torch.randn(1, 4, 2, 32)
    monkeypatch.setenv("FLASHVAR_BACKEND", "cuda")
    assert "expected backend 'cuda' to run it" in str(unsupported(CPU))
    with pytest.raises(flashvar.BackendUnavailableError):
        flashvar.attention(q, q, q)
    monkeypatch.delenv("FLASHVAR_BACKEND")
    flashvar.attention(q, q, q)
    assert unsupported(CPU) is None


def test_a_refusal_names_the_variable_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_BACKEND", "cuda")
    assert "expected backend 'cuda'" in str(unsupported(CPU))
    monkeypatch.setenv("FLASHVAR_BACKEND", "triton")
    assert "expected backend 'triton'" in str(unsupported(CPU))


def test_a_dtype_that_the_reference_alone_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is not asked before a backend is named."""
    monkeypatch.setattr(support, "choose", lambda *_: None)
    assert "not torch.float32" in str(unsupported(CUDA))
    monkeypatch.setenv("FLASHVAR_BACKEND", "reference")
    assert unsupported(CUDA) is None


def test_a_backend_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 4, 2, 32)
    flashvar.attention(q, q, q)
    assert unsupported(CPU) is None
    monkeypatch.setenv("FLASHVAR_BACKEND", "cuda")
    flashvar.attention(q, q, q)
    assert unsupported(CPU) is None


def test_a_refusal_is_kept_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_BACKEND", "cuda")
    first = unsupported(CPU)
    monkeypatch.setattr(support, "choose", None)  # another call would raise
    assert unsupported(CPU) is first
