"""`flashvar warmup` of ops other than attention: their options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashvar.cli import main, warmup
from flashvar.ops.causal_conv1d.warmup import Kind as Convolution
from flashvar.ops.gated_delta_rule.warmup import Kind as DeltaRule


def kinds_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, ...]:
    """What a command asks for."""
    seen: list[Any] = []
    monkeypatch.setattr(warmup, "run", lambda asked, *, as_json: seen.append(asked) or 0)
    assert main(["warmup", *words]) == 0
    return tuple(seen[0].kinds)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("causal_conv1d", [Convolution("bf16", 4, False, False, False)]),
        (
            "causal_conv1d --width 2,3 --bias --varlen --backward",
            [
                Convolution("bf16", width, True, True, training)
                for width in (2, 3)
                for training in (False, True)
            ],
        ),
        ("gated_delta_rule", [DeltaRule("bf16", 128, 128, False, False, False)]),
        (
            "gated_delta_rule --head-dim 64 96x192 --dtype fp16 --raw --varlen",
            [
                DeltaRule("fp16", 64, 64, True, True, False),
                DeltaRule("fp16", 96, 192, True, True, False),
            ],
        ),
    ],
)
def test_kinds(words: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = kinds_of(monkeypatch, *words.split())
    assert found == tuple(expected)
    for kind in found:
        functions = {request.function for request in kind.requests(0)}
        assert any(name.endswith("_fwd") for name in functions)
        assert any(name.endswith("_bwd") for name in functions) is kind.training
        assert json.dumps(kind.to_json())


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("causal_conv1d --width 5", "--width: expected 2 to 4, found 5: leave"),
        ("gated_delta_rule --head-dim 0", "found 0:"),
        ("merge_states --parts 0", "--parts: expected 1 or more, found 0: pass"),
        (
            "gated_delta_rule --head-dim 512x64 --backward",
            "with --backward K up to 256, found 512x64: leave it out",
        ),
    ],
)
def test_calls_that_cannot_be(words: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", *words.split()]) == 2
    assert found in " ".join(capsys.readouterr().err.split())
