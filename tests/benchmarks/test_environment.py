"""Which commit was measured? The checkout says so, or a variable, or the binaries."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = {"revision": "b" * 40, "dirty": False}
EDITED = {"revision": "c" * 40, "dirty": True}


@pytest.mark.parametrize(
    ("environ", "binaries", "expected"),
    [
        (
            {"BENCH_REVISION": "a"},
            [CLEAN],
            {"revision": "a", "dirty": False, "from": "BENCH_REVISION"},
        ),
        ({}, [EDITED, EDITED], {**EDITED, "from": "binaries"}),
        ({}, [CLEAN, EDITED], {"revision": None, "dirty": None, "from": None}),
        ({}, [], {"revision": None, "dirty": None, "from": None}),
    ],
    ids=["variable", "binaries", "binaries that differ", "nobody"],
)
def test_outside_a_checkout(
    environ: dict[str, str],
    binaries: list[dict[str, Any]],
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    environment = import_module("benchmarks.environment")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment.source(environ, binaries) == expected


def test_contenders_are_told_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are installed; what decides how flashvar itself runs is always told."""
    monkeypatch.syspath_prepend(str(ROOT))
    environment = import_module("benchmarks.environment")
    peers = {"flash-qla": "0.1.3", "flash-attn-3": "3.0", "xformers": "0.0.35"}
    peers["sageattention"] = "1.0.6"
    there = {"torch": "2.11.0", **peers}
    monkeypatch.setattr(environment, "_version", there.get)
    assert environment.gather(device=False)["versions"] == {
        **{"torch": "2.11.0", "triton": None, "numpy": None},
        **peers,
    }
