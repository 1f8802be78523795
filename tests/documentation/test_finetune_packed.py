"""The example of packed fine-tuning and the benchmark of the integration, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from benchmarks import result_file

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT / "src" / "python"),
    "CUDA_VISIBLE_DEVICES": "",
}


def run(python: str, *words: str) -> str:
    done = subprocess.run(
        [python, *words], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_packed_and_padded_learn_the_same(python_with_models: str) -> None:
    words = ("examples/finetune_packed.py", "--steps", "3", "--tokens", "256")
    said = run(python_with_models, *words).splitlines()
    assert [line.split(":")[0] for line in said[:2]] == ["packed", "padded"]
    assert said[2] == "0.00000 nats apart in the mean of 3 steps"


def test_the_two_forms_of_a_batch() -> None:
    path = ROOT / "examples" / "finetune_packed.py"
    spec = importlib.util.spec_from_file_location("finetune_packed", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    group = [[5, 6, 7], [8, 9]]
    packed, padded = example.packed(group), example.padded(group)
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert padded["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert padded["labels"].tolist() == [[5, 6, 7], [8, 9, -100]]
    drawn = example.groups([[1] * 6, [2] * 3, [3]], budget=8, seed=0)
    batches = [next(drawn) for _ in range(20)]
    assert max(sum(map(len, batch)) for batch in batches) <= 8
    assert {len(document) for batch in batches for document in batch} == {4, 3, 1}


def test_the_benchmark_times_each_way(tmp_path: Path, python_with_models: str) -> None:
    target = tmp_path / "integrations.json"
    words = ("integrations", "--seconds", "0.01", "--json", str(target))
    run(python_with_models, "benchmarks/run.py", *words)
    document = result_file.read(target)
    assert document["benchmark"] == "integrations"
    rows = {row["way"]: row for row in document["rows"]}
    ways = ("direct", "transformers", "sdpa", "Attend", "xformers")
    calls = {f"{way}, {name}" for way in ways for name in ("no-gradient", "gradient")}
    assert calls | {"register, transformers", "register, torch"} <= rows.keys()
    assert all(rows[f"direct, {name}"]["added_us"] == 0 for name in ("no-gradient", "gradient"))
    assert all(row["low_us"] <= row["median_us"] <= row["high_us"] for row in rows.values())
