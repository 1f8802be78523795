"""Every launch of a Triton kernel says whether a * b + c is contracted, as the default changes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from flashvar import backends

FOLDER = Path(backends.__file__).parent / "triton"
OPTION, BESIDE = "enable_fp_fusion", "num_warps"


def named(node: ast.AST) -> set[object]:
    """The names of the arguments of a call, or the keys of a dict."""
    if isinstance(node, ast.Call):
        return {keyword.arg for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        return {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return set()


@pytest.mark.parametrize(
    "op", ["attention", "causal_conv1d", "gated_delta_rule", "merge_states", "rms_norm", "rotary"]
)
def test_every_launch_says_what_is_fused(op: str) -> None:
    files = sorted((FOLDER / op).rglob("*.py"))
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    every = [named(node) for tree in trees for node in ast.walk(tree)]
    launches = [names for names in every if BESIDE in names]
    assert launches
    assert all(OPTION in names for names in launches)
