"""`flashvar doctor --verify`: its calls pass on the reference, and errors are found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import fakes
import pytest
import torch

from flashvar import cli, ops
from flashvar.binaries.registry import Inventory
from flashvar.cli import diagnosis, verification, verify
from flashvar.cli.verify import Case, Checked, Tensors, Verification
from flashvar.errors import BackendUnavailableError
from flashvar.machine.system import System
from flashvar.ops.dtypes import dtype_of
from flashvar.selection.request import Overrides

CPU = torch.device("cpu")
AXES = {"attention": ((16, 16),), "gated_delta_rule": ((16,),)}
KINDS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name in verify.verified_ops()
    for dtype in ops.find(f"{name}_fwd").usual_dtypes  # type: ignore[union-attr]
]
H200 = fakes.system(fakes.H200)
WHEEL = fakes.inventory("90a")
ATTENTION = Inventory((replace(WHEEL.binaries[0], manifest=fakes.manifest("90a")),))


def cases(name: str, dtype: str) -> Iterator[Case]:
    random = torch.Generator().manual_seed(7)
    module = verify.verified_ops()[name]
    yield from module.cases(dtype_of(dtype), AXES.get(name, ()), random)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_right_calls_pass(name: str, dtype: str) -> None:
    found = [verification.check_case(name, case, "reference", CPU) for case in cases(name, dtype)]
    assert found
    assert [(one.case, one.ratio, one.failure) for one in found if not one.passed] == []


def planted(case: Case, wrong: float) -> Case:
    """The case, with one element of each result off on the device, in the dtype of the call."""

    def call(given: Tensors) -> tuple[torch.Tensor, ...]:
        results = case.call(given)
        if any(one.dtype is torch.float64 for one in given.values()):
            return results
        rest = torch.zeros_like(results[0])
        rest.view(-1)[rest.numel() // 2] = wrong
        return (results[0] + rest, *results[1:])

    return replace(case, call=call)


@pytest.mark.parametrize(
    ("name", "dtype", "wrong"),
    [
        *((*kind.values, 2.0) for kind in KINDS),
        # A comparison with NaN is what it is in any dtype.
        *((name, "bf16", math.nan) for name in verify.verified_ops()),
    ],
)
def test_one_wrong_element_fails(name: str, dtype: str, wrong: float) -> None:
    for case in cases(name, dtype):
        found = verification.check_case(name, planted(case, wrong), "reference", CPU)
        assert not found.passed, case.name
        assert found.worst == "result 1"


def test_a_wrong_gradient_fails() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2 if grad.dtype is torch.bfloat16 else grad

    case = next(cases("attention", "bf16"))
    doubled = replace(case, call=lambda given: case.call({**given, "k": Doubled.apply(given["k"])}))
    found = verification.check_case("attention", doubled, "reference", CPU)
    assert (found.passed, found.worst) == (False, "gradient of k")


def test_a_call_that_raises_fails() -> None:
    def call(_: Tensors) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("misaligned address\nmore")

    case = replace(next(cases("merge_states", "bf16")), call=call)
    found = verification.check_case("merge_states", case, "cuda sm_90", CPU)
    assert (found.passed, found.failure) == (False, "misaligned address")


def test_gradients_without_a_kernel_leave_the_forward_to_check() -> None:
    def call(given: Tensors) -> tuple[torch.Tensor, ...]:
        if any(one.requires_grad and one.dtype is torch.bfloat16 for one in given.values()):
            raise BackendUnavailableError("expected a backend that serves it")
        return whole.call(given)

    whole = next(cases("attention", "bf16"))
    found = verification.check_case("attention", replace(whole, call=call), "cuda sm_90", CPU)
    assert found.passed
    assert found.case == f"{whole.name} forward"


def report(system: System, inventory: Inventory = WHEEL) -> diagnosis.Report:
    return diagnosis.examine(system, inventory, Overrides())


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are judged right without being made."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(
        verification,
        "check_case",
        lambda op, case, name, _: Checked(op, case.name, name, 0.5, "out"),
    )


@pytest.mark.usefixtures("on_paper")
def test_every_op_is_checked_on_what_serves_it() -> None:
    found = verification.check(report(H200, ATTENTION), 0)
    served = {(one.op, one.candidate) for one in found.checked}
    assert {op for op, _ in served} == set(verify.verified_ops())
    assert ("attention", "cuda sm_90") in served
    assert ("causal_conv1d", "triton") in served
    assert (found.passed, found.left, found.unchecked) == (True, 0, ())


@pytest.mark.usefixtures("on_paper")
def test_what_there_is_no_time_for_is_counted() -> None:
    whole = verification.check(report(H200), 0)
    found = verification.check(report(H200), 0, seconds=-1.0)
    assert (found.checked, found.left) == ((), len(whole.checked))
    assert not found.passed
    assert "calls left out" in verify.line(found, H200, WHEEL)


@pytest.mark.usefixtures("on_paper")
def test_ops_that_nothing_serves_are_named() -> None:
    system = fakes.system(fakes.H200, triton=None)
    found = verification.check(report(system, ATTENTION), 0)
    assert found.unchecked == tuple(name for name in verify.verified_ops() if name != "attention")
    assert "not checked: merge_states, " in verify.line(found, system, WHEEL)


RIGHT = Checked("attention", "causal bf16 64", "cuda sm_90", 0.25, "gradient of q")


@pytest.mark.parametrize(
    ("checked", "words"),
    [
        ((RIGHT,), "verify: passed: 1 calls of attention by cuda sm_90 (0.1.0, 000000000000)"),
        ((RIGHT,), "at most 0.25 of the limit (attention causal bf16 64: gradient of q)"),
        ((RIGHT, replace(RIGHT, ratio=3.0)), "FAILED 1: 2 calls"),
        ((replace(RIGHT, ratio=3.0),), "gradient of q is 3 x the limit off"),
        ((replace(RIGHT, failure="no image"),), "causal bf16 64 by cuda sm_90 raised no image"),
        ((), "verify: FAILED: 0 calls of no op by nothing"),
    ],
)
def test_the_line_has_what_an_issue_needs(checked: tuple[Checked, ...], words: str) -> None:
    line = verify.line(Verification(fakes.H200, checked), H200, WHEEL)
    assert words in line
    assert "\n" not in line
    assert "NVIDIA H200 (9.0), 80 GiB; driver 580.82.07, CUDA 13.0; torch 2.13.0" in line


def test_without_a_gpu_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "gather", lambda: fakes.system())
    assert cli.main(["doctor", "--verify"]) == BackendUnavailableError.exit_code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no cuda:0" in err


@pytest.mark.parametrize(("ratio", "code"), [(0.5, 0), (1.5, 1)])
@pytest.mark.usefixtures("on_paper")
def test_exit_codes(
    ratio: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "gather", lambda: H200)
    monkeypatch.setattr(
        verification,
        "check_case",
        lambda op, case, name, _: Checked(op, case.name, name, ratio, "out"),
    )
    assert cli.main(["doctor", "--verify"]) == code
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"flashvar verify: {'FAILED' if code else 'passed'}")


@pytest.mark.parametrize("other", ["--json", "--bench"])
def test_it_goes_alone(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--verify", other])
    assert ended.value.code == 2
    assert "--verify prints one line" in capsys.readouterr().err
