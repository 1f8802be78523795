"""The backend of a forward: Triton in place of a binary where it is faster."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention import choice
from flashvar.ops.attention.problem import Inputs, Options, Problem
from flashvar.ops.attention.validate import inspect

pytest.importorskip("triton", reason="triton is not installed")

MODIFIED: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": torch.empty(8, device="meta")},
    "bias": {"bias": torch.empty(1, 8, 1, 4096, dtype=torch.bfloat16, device="meta")},
}


def problem(queries: int = 1, padding: int = 0, of: str = "q", **given: Any) -> Problem:
    """Rows of one of q, k and v are `padding` elements longer than the head dim."""
    whole = torch.empty(2, 4096, 8, 64 + padding, dtype=torch.bfloat16, device="meta")
    rows = {name: torch.empty_like(whole[..., :64]) for name in "qkv"} | {of: whole[..., :64]}
    tensors = {name: given.pop(name) for name in ("alibi_slopes", "bias") if name in given}
    q = rows["q"][:, :queries]
    found = inspect(Inputs(q, rows["k"], rows["v"], **tensors), Options(**given))
    return replace(found, device=0)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A device with 132 multiprocessors, and the backends that can run a call."""
    from flashvar.backends.triton.attention import split_kv

    found = {"cuda", "triton"}

    def choose(function: str, q: object, asked: str, problem: object) -> Any:
        wanted = ("cuda" if "cuda" in found else "triton") if asked == "auto" else asked
        if wanted not in found:
            raise BackendUnavailableError(f"{wanted} is not there")
        return SimpleNamespace(backend=wanted, explicit=asked != "auto"), wanted

    machine = split_kv.Machine((9, 0), 227 * 1024, 132)
    monkeypatch.setattr(choice, "choose_backend", choose)
    monkeypatch.setattr(split_kv, "machine_of", lambda device: machine)
    return found


def chosen(asked: str = "auto", **given: Any) -> str:
    found: str
    _, found = choice.choose_forward(torch.empty(0), asked, problem(**given))  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("modified", MODIFIED)
def test_few_queries_with_score_modifiers(modified: str, available: set[str]) -> None:
    assert chosen(**MODIFIED[modified]) == "triton"
    assert chosen("cuda", **MODIFIED[modified]) == "cuda"
    available.remove("triton")
    assert chosen(**MODIFIED[modified]) == "cuda"


def test_other_calls_keep_the_binary(available: set[str]) -> None:
    assert chosen() == "cuda"
    assert chosen(softcap=30.0, queries=4096) == "cuda"
    for name in "qkv":
        assert chosen(softcap=30.0, padding=4, of=name) == "cuda"  # rows that would be copied
        assert chosen(softcap=30.0, padding=8, of=name) == "triton"


def test_a_binary_that_is_named(available: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_FORCE_ARCH", "sm_90")
    assert chosen(softcap=30.0) == "cuda"


def test_what_has_no_values_or_keys(available: set[str]) -> None:
    given = problem(softcap=30.0)
    for other in (replace(given, device=None), replace(given, seqlen_k=0)):
        assert choice.choose_forward(torch.empty(0), "auto", other)[1] == "cuda"
