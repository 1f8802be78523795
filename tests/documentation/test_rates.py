"""Ratios are made from records: who was measured, how far apart, and who was not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from benchmarks import result_file

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "device": {"name": "GPU", "driver": "1.2"},
    "versions": {"torch": "9.9"},
    "source": {"revision": "0123456789abcdef"},
}


def row(contender: str, seqlen: int, direction: str = "forward", **measured: Any) -> dict[str, Any]:
    cell = {"head_dim": 64, "seqlen": seqlen, "causal": True}
    return {"contender": contender, "direction": direction, **cell, **measured}


def ratios(root: Path, *rows: dict[str, Any], **settings: str) -> str:
    folder = root / "benchmarks" / "results"
    folder.mkdir(parents=True)
    environment = {**ENVIRONMENT, "time": "2026-01-02", "settings": settings}
    document = {"benchmark": "attention", "environment": environment, "rows": list(rows)}
    result_file.write(folder / "made.json", document)
    return str(import_module("rates").ratios(root))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))


def of_op(root: Path, name: str, *rows: dict[str, Any]) -> str:
    folder = root / "benchmarks" / "results"
    folder.mkdir(parents=True)
    document = {"benchmark": "ops", "environment": ENVIRONMENT, "rows": list(rows)}
    result_file.write(folder / "made.json", document)
    return str(import_module("op_rates").of_op(name)(root))


def test_rates_of_an_op_stand_beside_each_contender(tmp_path: Path) -> None:
    of_call = {"op": "conv", "unit": "TB/s", "cell": "forward, small"}
    found = of_op(
        tmp_path,
        "conv",
        {**of_call, "contender": "flashvar", "rate": 3.0},
        {**of_call, "contender": "copy", "rate": 4.0},
        {**of_call, "contender": "fla", "skipped": "not installed"},
        {**of_call, "op": "other", "contender": "flashvar", "rate": 99.0},
        {**of_call, "cell": "backward, small", "contender": "flashvar", "rate": 2.0},
    )
    assert "TB/s on one GPU, driver 1.2, torch 9.9, commit 0123456789 (`" in found
    assert found.splitlines()[2] == "| call | flashvar | plain copy | vs plain copy |"
    assert found.splitlines()[-2:] == [
        "| forward, small | **3.00** | 4.00 | 0.75 |",
        "| backward, small | **2.00** | - | - |",
    ]


def test_an_op_without_a_record_says_so(tmp_path: Path) -> None:
    assert of_op(tmp_path, "conv") == "No record in `benchmarks/results` has it yet."


OURS = [row("flashvar-cuda", 1024, tflops=200.0), row("flashvar-cuda", 2048, tflops=400.0)]


def test_a_ratio_is_the_geometric_mean_of_the_cells(tmp_path: Path) -> None:
    peer = [row("peer", 1024, tflops=100.0), row("peer", 2048, tflops=50.0)]
    found = ratios(tmp_path, *OURS, *peer)
    assert "| `peer` | 4.00 (2.00 to 8.00) | - |" in found
    assert "commit 0123456789" in found
    assert "made.json" in found


def test_cells_that_only_one_has_are_left_out(tmp_path: Path) -> None:
    peer = [row("peer", 2048, tflops=800.0), row("peer", 4096, tflops=1.0)]
    assert "| `peer` | 0.50 (0.50 to 0.50) | - |" in ratios(tmp_path, *OURS, *peer)


def test_who_was_not_measured_is_named(tmp_path: Path) -> None:
    peers = [row("peer", 1024, tflops=100.0), row("absent", 1024, skipped="not installed")]
    found = ratios(tmp_path, *OURS, *peers)
    missing = found.partition("Not measured in this run: ")[2]
    assert missing.startswith("`absent`, ")
    assert ", FlashInfer, xformers, " in missing  # which no row names
    assert "`peer`" not in missing
    assert "| `absent`" not in found


APPROXIMATE = [
    row("sageattention", 1024, tflops=800.0, difference_to_reference=0.0214),
    row("sageattention", 2048, tflops=900.0, difference_to_reference=0.0326),
]
# Where nobody is approximate, differences are not read.
EXACT = [
    row("peer", 1024, tflops=100.0, difference_to_reference=0.0),
    row("peer", 2048, tflops=500.0, difference_to_reference=0.0),
    row("flashvar-cuda", 1024, tflops=200.0, difference_to_reference=0.0021),
    row("flashvar-cuda", 2048, tflops=400.0, difference_to_reference=0.0028),
    row("peer", 2048, "backward", tflops=400.0, difference_to_reference=0.0),
    row("flashvar-cuda", 2048, "backward", tflops=400.0, difference_to_reference=0.5),
]
WHO_IS_APPROXIMATE = (
    "SageAttention 1 (approximate) rounds q and k to INT8: its results differ from those of "
    "`peer` by 2.1 to 3.3 % (Frobenius norm), those of exact kernels by at most 0.3 %. It never "
    "counts as the fastest other."
)


def test_who_is_approximate_is_marked_with_its_difference(tmp_path: Path) -> None:
    found = ratios(tmp_path, *APPROXIMATE, *EXACT)
    assert "| SageAttention 1 (approximate) | 0.33 (0.25 to 0.44) | - |" in found
    assert found.endswith(WHO_IS_APPROXIMATE)
    rates = import_module("rates")
    heading, _, first, second, _, below = rates.forward(tmp_path).splitlines()[2:]
    assert heading.endswith("| SageAttention 1 (approximate) | `peer` | vs fastest other |")
    assert first.endswith("| **200** | 800 | 100 | 2.00 |")
    assert second.endswith("| **400** | 900 | 500 | 0.80 |")
    assert below == WHO_IS_APPROXIMATE
    line = rates.to_the_fastest(tmp_path).splitlines()[2]
    assert line == "| forward, head dim 64 | 1.26 | 0.800 to 2.00 | 1 of 2 |"


def test_each_approximate_kernel_has_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = import_module("rates")
    monkeypatch.setitem(rates.APPROXIMATE, "half", "rounds v to FP8")
    half = row("half", 1024, tflops=700.0, difference_to_reference=0.05)
    found = ratios(tmp_path, *APPROXIMATE, half, *EXACT)
    assert "\n\n`half` rounds v to FP8: its results differ" in found
    assert found.endswith(WHO_IS_APPROXIMATE)


def test_a_run_without_who_is_approximate_says_nothing_of_it(tmp_path: Path) -> None:
    found = ratios(tmp_path, *OURS, row("peer", 1024, tflops=100.0))
    assert found.endswith("SageAttention 1 (approximate).")  # the last that was not measured
    assert "INT8" not in found + import_module("rates").forward(tmp_path)


def test_the_chart_is_of_the_run_with_the_most_peers(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    fewer = [*OURS, row("peer", 1024, tflops=100.0), *APPROXIMATE]
    more = [*OURS, row("peer", 1024, tflops=100.0), row("other", 1024, tflops=50.0)]
    for name, rows in {"2026-01": more, "2027-01": more, "2028-01": fewer}.items():
        document = {"benchmark": "attention", "environment": {**ENVIRONMENT, "time": name}}
        result_file.write(folder / f"{name}.json", {**document, "rows": rows})
    assert "2027-01.json" in import_module("rates").of_the_chart(tmp_path)


def test_our_own_other_kernels_are_no_contenders(tmp_path: Path) -> None:
    assert "Triton" not in ratios(tmp_path, *OURS, row("flashvar-triton", 1024, tflops=1))


@pytest.mark.parametrize(
    ("without", "words"), [(1.0, "1.0 µs more than"), (0.04, "as long as"), (-0.1, "as long as")]
)
def test_what_an_integration_adds_is_said_of_its_record(
    without: float, words: str, tmp_path: Path
) -> None:
    added = {"no-gradient": without, "gradient": 2.5, "one row, gradient": 3.25}
    rows = [
        {"way": f"transformers, {way}", "median_us": 9.0, "added_us": us}
        for way, us in added.items()
    ]
    rows.append({"way": "register, transformers", "median_us": 70.0})
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    document = {"benchmark": "integrations", "environment": ENVIRONMENT, "rows": rows}
    result_file.write(folder / "made.json", document)
    said = import_module("sentences").cost_in_transformers(tmp_path)
    assert f"a layer's call takes {words} `flashvar.attention`; with gradients 2.5 µs more" in said
    assert "3.2 µs more if a batch of one row" in said
    assert "Registering takes 0.07 ms" in said


def test_installing_is_in_order(tmp_path: Path) -> None:
    rows = [
        {"distribution": "large", "version": "1", "cpu_s": 21.04},
        {"distribution": "flashvar", "version": "2", "cpu_s": 1.26},
    ]
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    document = {"benchmark": "install", "environment": ENVIRONMENT, "rows": rows}
    result_file.write(folder / "made.json", document)
    found = import_module("rates").installing(tmp_path)
    assert found.splitlines()[-2:] == ["| flashvar 2 | 1.3 |", "| large 1 | 21.0 |"]
    assert "commit 0123456789 (`" in found


def test_calls_through_integrations_have_names_for_readers(tmp_path: Path) -> None:
    rows = [
        {"way": "sdpa, no-gradient", "median_us": 15.0, "added_us": 3.3},
        {"way": "sdpa, gradient", "median_us": 24.4, "added_us": 3.8},
        {"way": "direct, no-gradient", "median_us": 11.7, "added_us": 0.0},
    ]
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    document = {"benchmark": "integrations", "environment": ENVIRONMENT, "rows": rows}
    result_file.write(folder / "made.json", document)
    found = import_module("rates").integrations(tmp_path)
    assert "| torch, after `activate()` | 15.0 | 3.3 | 24.4 | 3.8 |" in found
    assert "| `flashvar.attention` | 11.7 | 0.0 | - | - |" in found
    assert "sdpa" not in found


def test_records_of_translated_code_are_left_out(tmp_path: Path) -> None:
    assert ratios(tmp_path, *OURS, FLASHVAR_FORCE_ARCH="sm_80") == ""


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("rates", "of_the_chart"),
        ("rates", "to_the_fastest"),
        ("rates", "size_in_words"),
        ("sentences", "build_in_words"),
        ("op_rates", "linear_attention_to_peers"),
        ("op_rates", "of_linear_attention"),
        ("support", "in_words"),
        ("support", "native_in_words"),
    ],
)
def test_the_readme_says_what_the_records_say(module: str, function: str) -> None:
    said = getattr(import_module(module), function)(ROOT)
    assert " ".join(said.split()) in " ".join((ROOT / "README.md").read_text("utf-8").split())


def wheel(architecture: str, version: str, size: int) -> dict[str, Any]:
    name = {"distribution": f"flashvar-{architecture}", "version": version}
    return {**name, "platform": "x86_64", "bytes": size, "installed_bytes": 9, "library_bytes": 1}


def test_a_wheel_with_ptx_is_not_taken_for_a_released_one(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    rows = [wheel("sm_x", "1", 1_000_000), wheel("sm_z", "1", 3_000_000)]
    rows.append(wheel("sm_y", "1+hdim64.ptx", 9_900_000))
    document = {"benchmark": "size", "environment": ENVIRONMENT, "rows": rows}
    result_file.write(folder / "made.json", document)
    rates = import_module("rates")
    said = rates.size_in_words(tmp_path)
    assert "the wheels for `sm_x` and `sm_z` are 1.0 to 3.0 MB to download: " in said
    assert said.endswith(" With PTX, which releases leave out, the wheel for `sm_y` is 9.9 MB.")
    table = rates.sizes(tmp_path)
    assert "| `flashvar-sm_y`, with PTX, which releases leave out | x86_64 | 9.90 | 0.00 |" in table
    assert "| `flashvar-sm_x` | x86_64 | 1.00 | 0.00 |" in table


def test_every_step_of_a_build_has_a_name_for_readers() -> None:
    steps = {step.name for step in import_module("benchmarks.build")._STEPS}
    assert steps == set(import_module("benchmarks.names").BUILD_STEPS)


def test_packed_sequences_and_grouped_heads_have_words_for_readers() -> None:
    packed = {
        name.removesuffix(f"-{cell.direction}")
        for name, pair in import_module("benchmarks.cases").shapes()
        for shape, cell in pair.items()
        if shape == "packed"
    }
    names = import_module("benchmarks.names").PACKED
    assert packed == set(names)
    said = import_module("rates").packed_and_grouped(ROOT)
    assert all(f"| {call} | backward | " in said for call in names.values())
    assert "| 4 x 4,096, 32 / 4 x 64, causal | forward | " in said
    assert said.count("\n") == 3 + 2 * (
        len(names) + 4
    )  # a caption, a heading, four of grouped heads


def test_every_model_has_a_name_for_readers() -> None:
    cells = import_module("benchmarks.cases").models()
    names = import_module("benchmarks.names").MODELS
    assert {cell.name.removesuffix(f"-{cell.direction}") for cell in cells} == set(names)
    said = import_module("rates").models(ROOT)
    assert "| Llama 3 8B | backward | 2 x 8,192, 32 / 8 x 128, causal | " in said
    assert not [name for name in names if f"| {name} |" in said]
    assert "| 0 |" not in said  # a rate below 1 has a digit after the point


def test_random_calls_begin_with_the_slowest(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    of_peers = {
        "sdpa-cudnn": (100.0, 100.0),
        "sdpa-flash": (50.0, 400.0),
        "flashvar-triton": (900.0, 900.0),  # no other package
        "sageattention": (900.0, 900.0),  # approximate
    }
    rows = [
        {
            **row(who, seqlen, tflops=rate, batch=2, heads=8, heads_kv=2),
            "cell": f"causal-2x{seqlen}-forward",
        }
        for who, rates in {"flashvar-cuda": (120.0, 200.0), **of_peers}.items()
        for seqlen, rate in zip((640, 4096), rates, strict=True)
    ]
    document = {"benchmark": "random", "environment": ENVIRONMENT, "rows": rows}
    result_file.write(folder / "made.json", document)
    said = import_module("random_calls").random_calls(tmp_path)
    assert "| forward | 0.775 | 0.500 to 1.20 | 1 of 2 |" in said
    slowest = said[said.index("slowest calls") :].splitlines()[2:]
    assert slowest == [
        "| 2 x 4,096, 8 / 2 x 64, causal | forward | 0.50 | SDPA FlashAttention-2 |",
        "| 2 x 640, 8 / 2 x 64, causal | forward | 1.20 | SDPA cuDNN |",
    ]
    assert import_module("random_calls").random_calls(tmp_path / "nothing") == ""
