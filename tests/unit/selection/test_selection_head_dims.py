"""Which compiled head dim serves a request, and when another one can be built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from fakes import chosen, result_of

from flashvar._version import __version__
from flashvar.binaries.install_commands import public
from flashvar.binaries.kinds import pair_text
from flashvar.binaries.manifest import KernelRow
from flashvar.binaries.registry import Inventory
from flashvar.selection.compatibility import values_of
from flashvar.selection.request import Request
from flashvar.selection.rules import select
from flashvar_factory.config import schema
from flashvar_factory.config.expand import expand, select_dev
from flashvar_factory.config.selection_arguments import parse

CONFIG = schema.read(Path(__file__).parents[3] / "variants.toml")


def asking(head_dim: int | tuple[int, int]) -> Request:
    return Request.of("attention_fwd", "bf16", 0, head_dim=head_dim)


ALL = fakes.inventory("80", "86", "89", "90a")


@pytest.mark.parametrize(
    ("compiled", "asked", "expected"),
    [
        ((64, 128), 64, 64),
        ((64, 128), 72, 128),
        ((64,), 8, 64),
        ((128,), 64, 128),
        ((128,), 56, None),
        ((256,), 120, None),
        ((64,), 72, None),
        ((64,), 60, None),
    ],
    ids=[
        "exact",
        "next higher",
        "64 serves any smaller",
        "half of the work",
        "more than half wasted",
        "more than half of 256 wasted",
        "too small",
        "not a multiple of 8",
    ],
)
def test_compiled_head_dim(compiled: tuple[int, ...], asked: int, expected: int | None) -> None:
    kernels = tuple(fakes.kernel(dtype="bf16", head_dim=head_dim) for head_dim in compiled)
    inventory = Inventory((fakes.binary("80", kernels=kernels),))
    request = asking(asked)
    found = result_of(select(request, fakes.system(fakes.A100), inventory), "cuda sm_80")
    held = None if found.kernel is None else found.kernel.values["head_dim"]
    assert held == expected


@pytest.mark.parametrize(
    ("asked", "fix"),
    [(72, "nox -s build-dev -- arch=sm_80 hdim=64,72"), (60, None), (65, None), (264, None)],
    ids=["can be built", "smaller, off step", "larger, off step", "beyond what can be built"],
)
def test_only_a_head_dim_that_can_be_built_gets_a_command(asked: int, fix: str | None) -> None:
    subset = fakes.binary(
        "80", kernels=(fakes.kernel(dtype="bf16", head_dim=64),), version="0.1.0+hdim64"
    )
    decision = select(asking(asked), fakes.system(fakes.A100), Inventory((subset,)))
    assert result_of(decision, "cuda sm_80").fix == fix


def test_a_wheel_with_some_head_dims_is_built_again_and_replaced() -> None:
    """A development build would not be in the environment of the wheel."""
    subset = fakes.binary(
        "80", kernels=(fakes.kernel(dtype="bf16", head_dim=64),), version="0.1.0+hdim64"
    )
    subset = replace(subset, folder=replace(subset.folder, wheel="flashvar-sm80"))
    decision = select(asking(72), fakes.system(fakes.A100), Inventory((subset,)))
    assert result_of(decision, "cuda sm_80").fix == (
        "nox -s wheels -- arch=sm_80 hdim=64,72 && pip install --no-index --find-links dist "
        f"--force-reinstall --no-deps flashvar-sm80=={public(__version__)}"
    )


@pytest.mark.parametrize(
    ("asked", "head_dims"),
    [(20, "64"), (64, "64"), (96, "64,128"), (136, "64,192"), (256, "64,256")],
)
def test_a_command_has_the_head_dims_that_an_op_is_compiled_for(asked: int, head_dims: str) -> None:
    function = "gated_delta_rule_fwd"
    held = fakes.kernel("attention_fwd", dtype="bf16", head_dim=64)
    subset = fakes.binary("80", kernels=(held,), version="0.1.0+hdim64")
    request = Request.of(function, "bf16", 0, head_dim=asked)
    decision = select(request, fakes.system(fakes.A100), Inventory((subset,)))
    command = f"nox -s build-dev -- arch=sm_80 hdim={head_dims}"
    assert result_of(decision, "cuda sm_80").fix == command
    words = parse(command.partition(" -- ")[2].split(), CONFIG)
    (build,) = expand(CONFIG, select_dev(words, CONFIG, ()))
    rows = [kernel.axis("head_dim") for kernel in build.kernels if kernel.function == function]
    assert max(map(int, rows)) >= asked


@pytest.mark.parametrize("step", ["fwd", "bwd", "update"])
@pytest.mark.parametrize(
    ("asked", "fix"), [(136, "nox -s build-dev -- arch=sm_80 hdim=64,192"), (264, None)]
)
def test_head_dims_that_the_delta_rule_is_compiled_for(
    asked: int, fix: str | None, step: str
) -> None:
    held = fakes.kernel("attention_fwd", dtype="bf16", head_dim=64)
    subset = fakes.binary("80", kernels=(held,), version="0.1.0+hdim64")
    request = Request.of(f"gated_delta_rule_{step}", "bf16", 0, head_dim=asked)
    decision = select(request, fakes.system(fakes.A100), Inventory((subset,)))
    assert result_of(decision, "cuda sm_80").fix == fix


def test_a_release_is_not_built_again_for_a_head_dim() -> None:
    inventory = Inventory((fakes.binary("80", kernels=(fakes.kernel(dtype="bf16", head_dim=64),)),))
    decision = select(asking(72), fakes.system(fakes.A100), inventory)
    assert result_of(decision, "cuda sm_80").fix is None


PAIRS = {
    "exact": ((192, 128), ((192, 192), (192, 128), (256, 256)), (192, 128)),
    "the cheapest that is enough": ((160, 96), ((256, 256), (192, 128), (192, 192)), (192, 128)),
    "equal pairs alone": ((192, 128), ((128, 128), (192, 192), (256, 256)), (192, 192)),
    "a pair serves equal head dims": ((128, 128), ((192, 128), (256, 256)), (192, 128)),
    "values wider": ((64, 128), ((128, 128), (64, 128)), (64, 128)),
    "values too wide": ((192, 136), ((192, 128),), None),
    "rows too wide": ((200, 128), ((192, 128),), None),
    "half of the work": ((96, 64), ((192, 128),), (192, 128)),
    "more than half wasted": ((88, 64), ((192, 128),), None),
    "values off step": ((192, 100), ((192, 128),), None),
    "the first of equals": ((128, 64), ((192, 128), (160, 160)), (192, 128)),
}


def pair_kernel(dims: tuple[int, int], op: str = "attention_fwd") -> KernelRow:
    first, second = dims
    rest = {} if first == second else {"head_dim_v": second}
    return fakes.kernel(op, dtype="bf16", head_dim=first, **rest)


@pytest.mark.parametrize("op", fakes.OPS)
@pytest.mark.parametrize(("asked", "compiled", "expected"), PAIRS.values(), ids=PAIRS)
def test_compiled_pair_of_head_dims(
    asked: tuple[int, int],
    compiled: tuple[tuple[int, int], ...],
    expected: tuple[int, int] | None,
    op: str,
) -> None:
    binary = fakes.binary("80", kernels=tuple(pair_kernel(dims, op) for dims in compiled))
    request = Request.of(op, "bf16", 0, head_dim=asked)
    found = result_of(select(request, fakes.system(fakes.A100), Inventory((binary,))), "cuda sm_80")
    assert (values_of(request.spec, found.kernel) if found.kernel else None) == (
        None if expected is None else (expected,)
    )
    assert found.accepted is (expected is not None)
    if expected not in (None, asked):
        assert f"compiled head dim {pair_text(*expected)}" in found.reason


def test_a_missing_pair_is_named_and_can_be_built() -> None:
    binary = fakes.binary("80", kernels=(pair_kernel((64, 64)),), version="0.1.0+hdim64")
    request = asking((192, 128))
    decision = select(request, fakes.system(fakes.A100), Inventory((binary,)))
    found = result_of(decision, "cuda sm_80")
    assert found.reason == "holds head dim 64, none for 192x128"
    assert found.fix == "nox -s build-dev -- arch=sm_80 hdim=64,192x128"
    assert str(request) == "attention_fwd bf16 head dim 192x128 on cuda:0"
    assert chosen(decision) == "triton"


@pytest.mark.parametrize(("head_dim", "runs"), [(256, True), (264, False), ((64, 512), False)])
def test_triton_refuses_wide_values_on_old_gpus(
    head_dim: int | tuple[int, int], runs: bool
) -> None:
    request = Request.of("attention_fwd", "fp16", 0, head_dim=head_dim)
    found = result_of(select(request, fakes.system(fakes.T4), ALL), "triton")
    assert found.accepted == runs
    if not runs:
        words = "head dims above 256 need capability 8.0 or higher, this GPU is 7.5"
        assert found.reason == words
    assert result_of(select(request, fakes.system(fakes.H100), ALL), "triton").accepted


def test_triton_refuses_values_that_are_too_wide() -> None:
    request = asking((64, 520))
    found = result_of(select(request, fakes.system(fakes.GB200), ALL), "triton")
    assert found.reason == "runs head dims to 512 in steps of 8, not 64x520"
