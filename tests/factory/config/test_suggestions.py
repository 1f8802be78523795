"""What is suggested: the word that looks nearest."""

from __future__ import annotations

import pytest

from flashvar_factory.config.suggestions import did_you_mean

NUMBERS = ("32", "64", "96", "128", "192", "256", "all")


@pytest.mark.parametrize(
    ("found", "valid", "meant"),
    [
        ("al", NUMBERS, "all"),
        ("65x", ("bf16",), None),
        ("16", ("bf16", "fp16"), "fp16"),
        ("bf61", ("bf16", "fp16"), "bf16"),
        ("cuda", ("bf16", "fp16"), None),
        ("BF16", ("bf16", "fp16"), "bf16"),
        ("block_m", ("BLOCK_M", "BLOCK_N"), "BLOCK_M"),
    ],
)
def test_did_you_mean(found: str, valid: tuple[str, ...], meant: str | None) -> None:
    assert did_you_mean(found, valid) == (f"; did you mean {meant!r}?" if meant else "")
