from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import BF16_64, chosen, result_of

from flashvar import ops
from flashvar.binaries import install_commands
from flashvar.binaries.extras import Extras
from flashvar.binaries.registry import BinaryFolder, Inventory, RejectedFolder
from flashvar.errors import InvalidInputError
from flashvar.machine.system import Device, System
from flashvar.ops.op import Axis, OpSpec
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose
from flashvar.selection.rules import select

ALL = fakes.inventory("80", "86", "89", "90a")
OLD_DRIVER = {"driver_cuda": (12, 8), "driver_display": "570.86.15"}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        pytest.param(fakes.system(fakes.A100), "cuda sm_80", id="A100"),
        pytest.param(fakes.system(fakes.A100_MIG), "cuda sm_80", id="MIG slice"),
        pytest.param(fakes.system(fakes.RTX_3090), "cuda sm_86", id="RTX 3090"),
        pytest.param(fakes.system(fakes.L40S), "cuda sm_89", id="L40S"),
        pytest.param(fakes.system(fakes.H100), "cuda sm_90", id="H100"),
        pytest.param(fakes.system(fakes.RTX_5090), "triton", id="RTX 5090"),
        pytest.param(fakes.system(fakes.GB200), "triton", id="GB200"),
        pytest.param(fakes.system(fakes.ORIN), "triton", id="Orin"),
        pytest.param(
            fakes.system(fakes.MI210, torch_hip="6.4", torch_cuda=None, driver_cuda=None),
            "triton",
            id="ROCm MI210 that reports 9.0",
        ),
        pytest.param(fakes.system(fakes.L40S, **OLD_DRIVER), "triton", id="driver 570"),
        pytest.param(fakes.system(fakes.H100, driver_cuda=None), "triton", id="no driver version"),
        pytest.param(fakes.system(fakes.H100, triton=None), "cuda sm_90", id="no triton"),
        pytest.param(fakes.system(fakes.H100, compiler=None), "cuda sm_90", id="no compiler"),
        pytest.param(fakes.system(fakes.GB200, triton=None), None, id="GB200 without triton"),
        pytest.param(fakes.system(fakes.GB200, compiler=None), None, id="GB200 without compiler"),
        pytest.param(
            fakes.system(fakes.GB200, python_headers=None), None, id="GB200 without Python.h"
        ),
        pytest.param(fakes.system(fakes.GB200, triton_cache=None), None, id="GB200, no cache"),
        pytest.param(fakes.system(fakes.T4), None, id="T4 has no bf16"),
        pytest.param(fakes.system(), None, id="device not there"),
    ],
)
def test_chosen_with_every_wheel_installed(system: System, expected: str | None) -> None:
    assert chosen(select(BF16_64, system, ALL)) == expected


@pytest.mark.parametrize(
    "system", [fakes.system(), fakes.system(fakes.H100)], ids=["no GPU", "H100"]
)
def test_cpu_tensors_run_on_the_reference(system: System) -> None:
    decision = select(Request.of("attention_fwd", "fp64", None, head_dim=63), system, ALL)
    assert chosen(decision) == "reference"
    assert "CPU tensors" in result_of(decision, "cuda sm_90").reason


@pytest.mark.parametrize(
    ("system", "candidate", "reason"),
    [
        pytest.param(
            fakes.system(fakes.H100),
            "cuda sm_80",
            "runs on compute capability 8.0 and later 8.x",
            id="major",
        ),
        pytest.param(fakes.system(fakes.A100), "cuda sm_86", "this GPU is 8.0", id="minor"),
        pytest.param(
            fakes.system(fakes.GB200),
            "cuda sm_90",
            "runs on compute capability 9.0 alone",
            id="specific",
        ),
        pytest.param(fakes.system(fakes.ORIN), "cuda sm_80", "8.7 inside a Tegra chip", id="tegra"),
        pytest.param(
            fakes.system(fakes.MI210, torch_hip="6.4"), "cuda sm_90", "ROCm 6.4", id="rocm"
        ),
        pytest.param(
            fakes.system(fakes.L40S, **OLD_DRIVER),
            "cuda sm_89",
            r"needs driver 580 or newer (CUDA 13.0), found 570.86.15 (CUDA 12.8)",
            id="driver",
        ),
        pytest.param(fakes.system(fakes.L40S, triton=None), "triton", "not installed", id="triton"),
        pytest.param(
            fakes.system(fakes.L40S, compiler=None), "triton", "C compiler", id="compiler"
        ),
        pytest.param(fakes.system(fakes.T4), "triton", "needs capability 8.0", id="capability"),
        pytest.param(fakes.system(fakes.L40S), "reference", "only when named", id="reference"),
    ],
)
def test_rejection_says_why(system: System, candidate: str, reason: str) -> None:
    found = result_of(select(BF16_64, system, ALL), candidate)
    assert not found.accepted
    assert reason in found.reason


@pytest.mark.parametrize(
    "system",
    [fakes.system(), fakes.system(fakes.H100), fakes.system(fakes.MI210, torch_hip="6.4")],
    ids=["no GPU", "H100", "ROCm"],
)
@pytest.mark.parametrize("device", [None, 0, 7])
@pytest.mark.parametrize("head_dim", [0, 1, 64, 512])
def test_every_candidate_has_a_result_with_a_reason(
    system: System, device: int | None, head_dim: int
) -> None:
    inventory = replace(ALL, rejected=(refused(None),))
    decision = select(
        Request.of("attention_fwd", "bf16", device, head_dim=head_dim), system, inventory
    )
    seen = [one.candidate for one in decision.results]
    everyone = ["cuda sm_80", "cuda sm_86", "cuda sm_89", "cuda sm_90", "cuda lost"]
    assert sorted(seen) == sorted([*everyone, "triton", "reference"])
    assert all(one.reason for one in decision.results)


@pytest.mark.parametrize(
    ("device", "installed", "expected"),
    [
        pytest.param(fakes.L40S, ("80", "86"), "cuda sm_86", id="highest lower minor"),
        pytest.param(fakes.L40S, ("80",), "cuda sm_80", id="lowest minor"),
        pytest.param(fakes.RTX_3090, ("80", "89"), "cuda sm_80", id="never a higher minor"),
        pytest.param(fakes.H100, ("80", "86", "89"), "triton", id="never another major"),
        pytest.param(fakes.L40S, (), "triton", id="nothing installed"),
    ],
)
def test_lower_minor_serves(device: Device, installed: tuple[str, ...], expected: str) -> None:
    assert chosen(select(BF16_64, fakes.system(device), fakes.inventory(*installed))) == expected


def test_lower_minor_that_does_not_fit_in_shared_memory_is_passed_over() -> None:
    big = fakes.kernel(dtype="bf16", head_dim=64, shared_memory=160 * fakes.KIB)
    inventory = Inventory((fakes.binary("80", kernels=(big,)),))
    on_ada = select(BF16_64, fakes.system(fakes.L40S), inventory)
    assert chosen(on_ada) == "triton"
    assert "163840 bytes of shared memory" in result_of(on_ada, "cuda sm_80").reason
    assert chosen(select(BF16_64, fakes.system(fakes.A100), inventory)) == "cuda sm_80"


def test_two_different_devices_get_different_binaries() -> None:
    system = fakes.system(fakes.RTX_3090, fakes.H100)
    chosen_on = [chosen(select(replace(BF16_64, device=i), system, ALL)) for i in (0, 1)]
    assert chosen_on == ["cuda sm_86", "cuda sm_90"]


@pytest.mark.parametrize(
    ("device", "extras", "candidate", "fix"),
    [
        (fakes.L40S, ("sm80", "sm89"), "cuda sm_89", install_commands.install("sm89")),
        (fakes.L40S, ("sm80",), "cuda sm_80", install_commands.install("sm80")),
        (fakes.L40S, (), "cuda sm_89", "nox -s build-dev"),
        (fakes.RTX_5090, ("sm80", "sm89"), "cuda sm_120", None),
    ],
    ids=["exact wheel", "lower wheel", "bare sources", "no wheel exists"],
)
def test_missing_binary_names_the_command(
    device: Device, extras: tuple[str, ...], candidate: str, fix: str | None
) -> None:
    decision = select(BF16_64, fakes.system(device), fakes.inventory(extras=extras))
    assert result_of(decision, candidate).fix == fix
    assert chosen(decision) == "triton"


def test_wheel_of_another_platform_is_not_suggested() -> None:
    extras = Extras(here=frozenset({"sm90"}), elsewhere=frozenset({"sm80", "sm86", "sm89"}))
    system = fakes.system(fakes.A100, platform="linux_aarch64")
    missing = result_of(select(BF16_64, system, Inventory(extras=extras)), "cuda sm_80")
    assert missing.reason == "flashvar has no wheel for linux_aarch64"
    assert missing.fix is None


@pytest.mark.parametrize("inventory", [Inventory(), ALL], ids=["bare sources", "Linux wheels"])
def test_no_binary_is_suggested_or_taken_outside_linux(inventory: Inventory) -> None:
    decision = select(BF16_64, fakes.system(fakes.L40S, platform="win_amd64"), inventory)
    assert chosen(decision) == "triton"
    assert [one.fix for one in decision.results] == [None] * len(decision.results)
    assert all("for Linux" in one.reason for one in decision.results if one.backend == "cuda")


@pytest.mark.parametrize("device", [fakes.ORIN, fakes.MI210], ids=["Tegra", "ROCm"])
def test_no_wheel_is_suggested_where_none_can_run(device: Device) -> None:
    hip = "6.4" if device is fakes.MI210 else None
    decision = select(BF16_64, fakes.system(device, torch_hip=hip), fakes.inventory())
    assert [one.fix for one in decision.results] == [None] * len(decision.results)


def test_dtype_that_is_not_compiled_falls_back() -> None:
    kernels = (fakes.kernel(dtype="bf16", head_dim=64),)
    inventory = Inventory((fakes.binary("80", kernels=kernels),))
    decision = select(replace(BF16_64, dtype="fp16"), fakes.system(fakes.A100), inventory)
    assert chosen(decision) == "triton"
    assert result_of(decision, "cuda sm_80").reason == "holds dtypes bf16, not fp16"


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op with an axis that must match and one of which more is enough."""
    page, heads = Axis("page", "page size"), Axis("heads", "heads", at_least=True, maximum=16)
    spec = OpSpec("paged", ("paged",), (page, heads))
    monkeypatch.setattr(ops, "specs", lambda: (spec,))


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize(
    ("page", "heads", "expected"),
    [(16, 4, 0), (64, 4, 1), (64, 5, 2), (64, 9, None), (32, 4, None)],
)
def test_kernels_that_differ_in_any_axis_are_told_apart(
    page: int, heads: int, expected: int | None
) -> None:
    held = ((16, 4), (64, 4), (64, 8))
    kernels = tuple(fakes.kernel("paged", dtype="bf16", page=p, heads=h) for p, h in held)
    inventory = Inventory((fakes.binary("80", kernels=kernels),))
    request = Request.of("paged", "bf16", 0, page=page, heads=heads)
    found = select(request, fakes.system(fakes.A100), inventory)
    binary = result_of(found, "cuda sm_80")
    assert binary.kernel == (None if expected is None else kernels[expected])
    assert binary.accepted is (expected is not None)
    if expected is None:
        assert binary.reason == (
            "holds page size 16, heads 4; page size 64, heads 4; page size 64, heads 8, none for "
            f"page size {page}, heads {heads}"
        )
    assert result_of(found, "triton").reason == "has no kernel for paged"


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("axes", [{}, {"page": 16}, {"page": 16, "heads": 4, "more": 1}])
def test_a_request_names_every_axis_of_its_op(axes: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="paged: expected a value for each of the axes"):
        Request.of("paged", "bf16", 0, **axes)


@pytest.mark.parametrize("axes", [(), ((64, 64), (64, 64)), ((64,),), ("64",), ((64, "64"),)])
def test_a_request_has_values_of_its_axes(axes: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInputError, match="attention_fwd: expected a value for each of"):
        Request("attention_fwd", "bf16", 0, axes)


@pytest.mark.parametrize("odd", [{"head_dim": "wide"}, {"head_dim": 64, "more": 1}, {}])
def test_kernels_of_other_axes_are_passed_over(odd: dict[str, int | str]) -> None:
    kernels = (fakes.kernel(dtype="bf16", **odd), fakes.kernel(dtype="bf16", head_dim=64))
    inventory = Inventory((fakes.binary("80", kernels=kernels),))
    found = result_of(select(BF16_64, fakes.system(fakes.A100), inventory), "cuda sm_80")
    assert found.kernel == kernels[1]


def test_a_pair_is_no_value_of_an_axis_without_pairs(paged: None) -> None:
    pair = fakes.kernel("paged", dtype="bf16", page=16, heads=4, heads_v=2)
    inventory = Inventory((fakes.binary("80", kernels=(pair,)),))
    request = Request.of("paged", "bf16", 0, page=16, heads=4)
    assert (
        result_of(select(request, fakes.system(fakes.A100), inventory), "cuda sm_80").kernel is None
    )


def test_an_unknown_function_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"expected a function of an op .* found 'no_such'"):
        choose(Request("no_such", "bf16", None))


def refused(architecture: str | None) -> RejectedFolder:
    candidate = BinaryFolder(Path("/lost"), "wheel lost 0.1.0", "again")
    return RejectedFolder(candidate, architecture, "damaged", "install it again")


@pytest.mark.parametrize(
    ("device", "architecture", "order", "fix"),
    [
        (fakes.L40S, "sm_89", ["cuda sm_89", "cuda sm_80"], "install it again"),
        (fakes.L40S, None, ["cuda sm_89", "cuda sm_80", "cuda lost"], "install it again"),
        (fakes.L40S, "sm_90", ["cuda sm_89", "cuda sm_80", "cuda sm_90"], None),
    ],
    ids=["its own architecture", "unreadable manifest", "another architecture"],
)
def test_refused_binary_stands_where_it_would_have_served(
    device: Device, architecture: str | None, order: list[str], fix: str | None
) -> None:
    inventory = replace(fakes.inventory("80"), rejected=(refused(architecture),))
    decision = select(BF16_64, fakes.system(device), inventory)
    assert [one.candidate for one in decision.results][: len(order)] == order
    (found,) = [one for one in decision.results if "damaged" in one.reason]
    assert found.fix == fix


def test_repairing_a_binary_is_not_suggested_where_none_can_run() -> None:
    inventory = Inventory((), (refused(None), refused("sm_80")))
    decision = select(BF16_64, fakes.system(fakes.MI210, torch_hip="6.4"), inventory)
    assert {one.fix for one in decision.results} == {None}


def test_repairing_another_binary_is_not_suggested_on_tegra() -> None:
    decision = select(BF16_64, fakes.system(fakes.ORIN), Inventory((), (refused("sm_80"),)))
    assert result_of(decision, "cuda sm_80").fix is None


def test_explanation_has_a_line_per_candidate_with_the_fix() -> None:
    lines = select(BF16_64, fakes.system(fakes.L40S), fakes.inventory("80")).explain().splitlines()
    assert lines == [
        f"cuda sm_89: no: not installed -> {install_commands.install('sm89')}",
        "cuda sm_80: chosen: runs it, compiled for 8.0",
        "triton: runs it, compiled at the first call, but cuda sm_80 is preferred",
        'reference: no: runs CUDA tensors only when named: backend="reference"',
    ]


def test_selecting_leaves_its_inputs_hashable_and_equal() -> None:
    first = select(BF16_64, fakes.system(fakes.H100), ALL)
    again = select(BF16_64, fakes.system(fakes.H100), ALL)
    assert first == again
    assert len({first, again}) == 1
