"""`flashvar warmup`: what it asks for, with a made-up call in place of compiling."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import fakes
import pytest

from flashvar.binaries.registry import Inventory
from flashvar.cli import commands, main, page_text, warmup
from flashvar.cli.warmup import WarmupOptions
from flashvar.errors import BackendUnavailableError
from flashvar.machine.shared_memory import SHARED_MEMORY
from flashvar.machine.system import System
from flashvar.ops.attention.warmup import FEATURES, Kind
from flashvar_factory.config import schema

triton = pytest.importorskip("triton", reason="triton is not installed")
from flashvar.backends.triton.attention import warmup as kernels  # noqa: E402

PLAIN = Kind("bf16", 64, 64, True, False)
TARGETS = schema.read(Path(__file__).parents[3] / "variants.toml").targets


def options(*words: str) -> WarmupOptions:
    """What a command line means."""
    chosen = commands.parse(["warmup", *words])
    return WarmupOptions(tuple(warmup.warmed_ops()[chosen.op].kinds(chosen)), chosen.op)


ASKED = options()


@pytest.mark.parametrize("features", [(), *((one,) for one in FEATURES)], ids=str)
def test_a_kind_is_a_call_with_its_features(features: tuple[str, ...]) -> None:
    import torch

    from flashvar.ops.attention.validate import inspect

    kind = replace(PLAIN, causal=False, features=frozenset(features))
    problem = inspect(kernels.inputs_of(kind, torch.device("cpu")), kernels.options_of(kind))
    assert {
        name
        for name, there in {
            "window": problem.window_left >= 0,
            "softcap": problem.softcap > 0,
            "sinks": problem.sinks_dtype is not None,
            "alibi": problem.alibi_batch_stride is not None,
            "bias": problem.bias is not None,
            "dropout": problem.dropout_p > 0,
            "varlen": problem.total_q is not None,
            "seqused": problem.has_seqused_k,
        }.items()
        if there
    } == set(features)
    assert problem.window_right == -1
    assert all(one in str(kind) for one in features)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kind, int]]:
    """Collects the calls that would be made on a device; those of head dim 96 fail."""
    found: list[tuple[Kind, int]] = []

    def run(kind: Kind, device: int) -> None:
        if kind.head_dim == 96:
            raise RuntimeError("out of resource: shared memory\nand more")
        found.append((kind, device))

    monkeypatch.setattr(kernels, "run", run)
    return found


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on a fake machine; gives its exit code and its document."""
    for name in ("FLASHVAR_BACKEND", "FLASHVAR_FORCE_ARCH"):
        monkeypatch.delenv(name, raising=False)

    def ask(options: WarmupOptions, system: System, inventory: Inventory = Inventory()) -> Any:  # noqa: B008
        monkeypatch.setattr(warmup.loader, "open_all", lambda: inventory)
        code = warmup.run(options, as_json=True, system=system)
        return code, json.loads(capsys.readouterr().out)

    return ask


def test_everything_asked_for_is_compiled_where_triton_serves(
    run: Run, made: list[tuple[Kind, int]]
) -> None:
    wanted = replace(options("--dtype", "bf16,fp16", "--backward"), device=1)
    code, document = run(wanted, fakes.system(fakes.H100, fakes.GB200))
    assert code == 0
    assert len(made) == len(set(made)) == len(document["calls"]) == 2 * 2 * 2 * 2
    assert {device for _, device in made} == {1}
    assert document["target"] == "cuda:1, NVIDIA GB200"


def test_what_compiled_kernels_serve_is_left_alone(run: Run, made: list[tuple[Kind, int]]) -> None:
    code, document = run(ASKED, fakes.system(fakes.L40S), fakes.inventory("89"))
    assert (code, made) == (0, [])
    assert {one["detail"] for one in document["calls"]} == {"cuda sm_89 runs it"}


@pytest.mark.parametrize(
    ("words", "environ", "compiled"),
    [
        (["--softcap"], {}, True),
        (["--alibi", "--causal"], {}, True),
        (["--bias", "--sinks", "--seqused"], {}, True),
        (["--softcap", "--varlen"], {}, False),
        (["--softcap", "--dropout"], {}, False),
        (["--window", "--sinks"], {}, False),
        (["--softcap"], {"FLASHVAR_BACKEND": "cuda"}, False),
        (["--softcap"], {"FLASHVAR_FORCE_ARCH": "sm_89"}, False),
    ],
    ids=str,
)
def test_few_queries_with_score_modifiers_run_on_triton_beside_a_wheel(
    words: list[str],
    environ: dict[str, str],
    compiled: bool,
    run: Run,
    made: list[tuple[Kind, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, document = run(options(*words), fakes.system(fakes.L40S), fakes.inventory("89"))
    assert (code, bool(made)) == (0, compiled)
    assert {one["state"] for one in document["calls"]} == {"ready" if compiled else "not needed"}


def test_nothing_to_compile_where_another_backend_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No compiled kernel is installed, so none runs the calls."""
    monkeypatch.setenv("FLASHVAR_BACKEND", "reference")
    monkeypatch.setattr(warmup.loader, "open_all", Inventory)
    assert warmup.run(ASKED, as_json=False, system=fakes.system(fakes.H100)) == 0
    printed = capsys.readouterr().out
    assert "Nothing to compile: Triton runs none of the calls asked for." in printed
    assert printed.count("reference runs it") == len(ASKED.kinds)


def test_a_binary_that_raises_is_no_reason_to_compile(
    run: Run, made: list[tuple[Kind, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    older = Inventory((fakes.binary("89", version="0.0.9"),))
    code, document = run(ASKED, fakes.system(fakes.L40S), older)
    assert (code, made) == (1, [])
    assert all("FLASHVAR_STRICT=1" in one["detail"] for one in document["calls"])


def test_all_is_all(run: Run, made: list[tuple[Kind, int]]) -> None:
    run(replace(ASKED, everything=True), fakes.system(fakes.L40S), fakes.inventory("89"))
    assert len(made) == 4


def test_a_backward_that_only_triton_has_is_compiled(
    run: Run, made: list[tuple[Kind, int]]
) -> None:
    forward = fakes.manifest("89", ops=("attention_fwd",)).kernels
    inventory = Inventory((fakes.binary("89", kernels=forward),))
    run(options("--backward"), fakes.system(fakes.L40S), inventory)
    assert {kind.training for kind, _ in made} == {True}
    assert len(made) == 4


def test_what_does_not_compile_is_told_and_the_rest_goes_on(
    run: Run, made: list[tuple[Kind, int]]
) -> None:
    code, document = run(options("--head-dim", "96,64"), fakes.system(fakes.GB200))
    assert code == 1
    assert [one["state"] for one in document["calls"]] == ["failed"] * 2 + ["ready"] * 2
    assert document["calls"][0]["detail"] == "out of resource: shared memory"


def test_what_triton_cannot_serve_is_told(run: Run, made: list[tuple[Kind, int]]) -> None:
    code, document = run(options("--dtype", "bf16,fp16"), fakes.system(fakes.T4))
    assert code == 1
    states = {one["dtype"]: one["state"] for one in document["calls"]}
    assert states == {"bf16": "failed", "fp16": "ready"}


@pytest.mark.parametrize(
    ("wanted", "system", "words"),
    [
        (ASKED, fakes.system(), "torch sees no cuda:0: pass --arch"),
        (replace(ASKED, device=2), fakes.system(fakes.H100), "no cuda:2"),
        (ASKED, fakes.system(fakes.H100, triton=None), "pip install triton"),
        (ASKED, fakes.system(fakes.H100, interpreted=True), "TRITON_INTERPRET"),
    ],
    ids=["no GPU", "no such GPU", "no Triton", "interpreter"],
)
def test_machines_that_cannot(wanted: WarmupOptions, system: System, words: str) -> None:
    with pytest.raises(BackendUnavailableError, match=words):
        warmup.run(wanted, as_json=True, system=system)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--head-dim", "600"], "--head-dim: expected 1 to 512, found 600: leave it out"),
        (["--head-dim", "64x600"], "--head-dim: expected 1 to 512, found 64x600: leave it out"),
        (["--bias", "--varlen"], "--bias and --varlen"),
        (["--arch", "sm_99"], "--arch: expected one of sm_75"),
        (["--arch", "hopper"], "found 'hopper'"),
    ],
    ids=str,
)
def test_options_that_cannot_be_end_as_misspelled_ones(
    words: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warmup, "gather", fakes.system)
    assert main(["warmup", *words]) == 2
    assert error in capsys.readouterr().err


def combined(
    dims: Any = ((64, 64), (128, 128)),
    dtypes: Any = ("bf16",),
    causal: Any = (True, False),
    training: Any = (False,),
    features: Any = (),
) -> tuple[Kind, ...]:
    """Every combination, in the order in which they are told."""
    every = product(dims, dtypes, causal, training)
    return tuple(
        Kind(two, *one, three, four, frozenset(features)) for one, two, three, four in every
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], combined()),
        (["--head-dim", "64,192x128", "96"], combined(((64, 64), (192, 128), (96, 96)))),
        (["--dtype", "bf16", "fp16"], combined(dtypes=("bf16", "fp16"))),
        (["--causal"], combined(causal=(True,))),
        (["--full"], combined(causal=(False,))),
        (["--causal", "--full", "--backward"], combined(training=(False, True))),
        (["--window", "--softcap"], combined(features=("window", "softcap"))),
        (["attention", "--causal"], combined(causal=(True,))),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "options",
)
def test_words_of_the_command(
    words: list[str], expected: tuple[Kind, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(warmup, "run", lambda options, *, as_json: seen.append(options) or 0)
    assert main(["warmup", *words, "--arch", "sm_90", "--all"]) == 0
    assert seen == [WarmupOptions(expected, "attention", "sm_90", 0, True)]


@pytest.mark.parametrize("option", [["--json"], ["--all"], ["--device", "0"], ["--arch", "sm_90"]])
def test_the_op_may_stand_behind_options(
    option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(warmup, "run", lambda options, *, as_json: seen.append(options.op) or 0)
    assert main(["warmup", *option, "merge_states"]) == 0
    assert seen == ["merge_states"]


@pytest.mark.parametrize("words", [["--head-dim", "64,x"], ["--dtype", "fp8"]], ids=str)
def test_words_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["warmup", *words])
    assert caught.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_every_outcome_fits_80_columns() -> None:
    kind = Kind("bf16", 192, 128, False, True, frozenset(FEATURES))
    states = [("ready", "12.3 s"), ("not needed", "cuda sm_90 runs it"), ("failed", "no " * 40)]
    outcomes = [warmup.Outcome(kind, *one) for one in states]
    for some in (outcomes, outcomes[:1], outcomes[1:2]):
        report = warmup.Report("cuda:0, NVIDIA H200", "/root/.triton/cache", some, 3)
        text = page_text.render(warmup.page(report), 80)
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_gpus_that_are_not_here_have_the_shared_memory_of_variants_toml(
    target: schema.Target,
) -> None:
    for architecture in (target.architecture, *target.also):
        assert SHARED_MEMORY[architecture.capability] == target.shared_memory
