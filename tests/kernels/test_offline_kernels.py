"""What `flashvar warmup` compiles for GPUs that are not here, for real."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashvar.cli import commands, main, warmup
from flashvar.machine.shared_memory import SHARED_MEMORY
from flashvar.machine.system import gather
from flashvar.ops.attention.warmup import Kind

triton = pytest.importorskip("triton", reason="triton is not installed")
from flashvar.backends.triton.attention import tiles  # noqa: E402
from flashvar.backends.triton.attention import warmup as kernels  # noqa: E402

PLAIN = Kind("bf16", 16, 16, True, False)
SOURCES = Path(__file__).parents[2] / "src" / "python"


def kinds(*words: str) -> tuple[Any, ...]:
    """What a command line asks for."""
    chosen = commands.parse(["warmup", *words])
    return tuple(warmup.warmed_ops()[chosen.op].kinds(chosen))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of Triton's, and a system that knows it; both are forgotten afterwards."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = dict(vars(driver))  # Triton 3.4 names what is active differently
    gather.cache_clear()
    yield tmp_path
    gather.cache_clear()
    vars(driver).update(before)


def compiled(cache: Path) -> list[str]:
    """The names of the kernels in the cache."""
    return sorted(file.stem for file in cache.glob("*/*.cubin"))


def test_kernels_of_a_call(cache: Path) -> None:
    kernels.compile_for(PLAIN, (8, 9))
    of_few_queries = ["split_kv_kernel"] * 8 + ["split_kv_merge_kernel"] * 3
    assert compiled(cache) == ["attention_fwd_kernel", *of_few_queries]
    described = json.loads(next(cache.glob("*/attention_fwd_kernel.json")).read_text())
    assert described["target"]["arch"] == 89
    tile = tiles.choose("forward", (8, 9), SHARED_MEMORY[8, 9], 16, 16)
    assert (described["num_warps"], described["num_stages"]) == (tile.warps, tile.stages)


@pytest.mark.parametrize("feature", ["bias", "sinks", "alibi", "seqused"])
def test_kernels_of_few_queries_with(
    feature: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without splits; kernels that merge may be those of another test."""
    monkeypatch.setattr(kernels, "_GROUPS", (2,))
    kernels.compile_for(replace(PLAIN, features=frozenset({feature})), (8, 0))
    assert compiled(cache).count("split_kv_kernel") == 2


def test_kernels_of_training_with_a_bias(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small tiles, whose code is compiled in half the time."""
    choose, small = tiles.choose, {"block_q": 16, "block_kv": 16, "warps": 1, "stages": 1}
    monkeypatch.setattr(tiles, "choose", lambda *given: choose(*given)._replace(**small))
    kind = Kind("fp16", 12, 16, False, True, frozenset({"bias"}))
    kernels.compile_for(kind, (8, 0))
    names = ["bwd_bias", "bwd_kv", "bwd_q", "fwd"]
    assert compiled(cache) == [f"attention_{name}_kernel" for name in names]


def test_kernels_of_every_form_of_merging(cache: Path) -> None:
    """With and without the gradient of lse, and those of outs, of lses or of both."""
    found = kinds("merge_states", "--backward", "--stacked", "--unaligned", "--head-dim", "16")
    assert len(found) == 8
    listed, stacked = (one for one in found if one.training and not one.unaligned)
    warmup.warmed_ops()["merge_states"].compile_for(listed, (9, 0))
    assert compiled(cache) == [*["bwd_kernel"] * 6, "fwd_kernel"]
    warmup.warmed_ops()["merge_states"].compile_for(stacked, (9, 0))
    assert compiled(cache) == [*["bwd_kernel"] * 12, *["fwd_kernel"] * 2]
    unaligned = replace(listed, unaligned=True, training=False)
    warmup.warmed_ops()["merge_states"].compile_for(unaligned, (9, 0))
    assert compiled(cache) == [*["bwd_kernel"] * 12, *["fwd_kernel"] * 3]


def test_command(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--arch", "sm_86", "--head-dim", "32", "--causal"]
    assert main(["warmup", *words]) == 0
    shown = capsys.readouterr()
    assert "1/1  forward bf16 head dim 32 causal: " in shown.err
    assert "Calls on sm_86, compiled without the GPU" in shown.out
    assert f"  Added to {cache}: 12 kernels." in shown.out
    # What is there is found again.
    assert main(["warmup", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kernels_added"] == 0
    assert [(one["state"], one["head_dim"]) for one in document["calls"]] == [("ready", 32)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "causal_conv1d --backward --bias --width 2",
            {"fwd_kernel", "final_kernel", "bwd_kernel", "update_kernel"},
        ),
        (
            "gated_delta_rule --head-dim 16x32",
            {"chunk_kernel", "chain_kernel", "recurrent_kernel"},
        ),
    ],
)
def test_kernels_of_ops(words: str, expected: set[str], python: str, tmp_path: Path) -> None:
    command = [python, "-m", "flashvar", "warmup", *words.split(), "--arch", "sm_90", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert {path.stem for path in tmp_path.glob("*/*.cubin")} == expected
