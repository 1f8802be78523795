"""What the user insists on: a named backend, a forced architecture, and the environment's words."""

from __future__ import annotations

from dataclasses import replace

import fakes
import pytest
from fakes import BF16_64, chosen, result_of

from flashvar.binaries import install_commands
from flashvar.binaries.registry import Inventory
from flashvar.errors import ConfigurationError, InvalidInputError
from flashvar.machine.system import System
from flashvar.selection.request import Overrides, Request
from flashvar.selection.rules import select

ALL = fakes.inventory("80", "86", "89", "90a")


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [
        ("cuda", 0, "cuda sm_90"),
        ("triton", 0, "triton"),
        ("reference", 0, "reference"),
        ("cuda", None, None),
        ("triton", None, None),
        ("reference", None, "reference"),
    ],
)
def test_named_backend_never_falls_back(
    backend: str, device: int | None, expected: str | None
) -> None:
    request = replace(BF16_64, device=device)
    decision = select(request, fakes.system(fakes.H100), ALL, Overrides(backend))
    assert chosen(decision) == expected


def test_named_backend_that_cannot_serve_is_not_replaced() -> None:
    decision = select(BF16_64, fakes.system(fakes.RTX_5090), ALL, Overrides("cuda"))
    assert decision.chosen is None
    assert 'backend="cuda" was named' in result_of(decision, "triton").reason


@pytest.mark.parametrize(
    ("kinds", "forced", "expected"),
    [
        (("sass", "ptx"), "sm_80", "cuda sm_80"),
        (("sass", "ptx"), None, "triton"),
        (("sass",), "sm_80", None),
    ],
    ids=["forced PTX", "PTX is never used unasked", "forced SASS of another major"],
)
def test_forced_architecture(
    kinds: tuple[str, ...], forced: str | None, expected: str | None
) -> None:
    inventory = Inventory((fakes.binary("80", code_kinds=kinds),))
    backend = "cuda" if forced else "auto"
    decision = select(BF16_64, fakes.system(fakes.H100), inventory, Overrides(backend, forced))
    assert chosen(decision) == expected


def test_forced_architecture_sets_the_others_aside() -> None:
    decision = select(BF16_64, fakes.system(fakes.L40S), ALL, Overrides("auto", "sm_80"))
    assert chosen(decision) == "cuda sm_80"
    assert result_of(decision, "cuda sm_89").reason == "FLASHVAR_FORCE_ARCH=sm_80 was set"


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("auto", None), ("cuda", None), ("triton", "triton"), ("reference", "reference")],
)
def test_forced_architecture_falls_back_to_nothing(backend: str, expected: str | None) -> None:
    decision = select(BF16_64, fakes.system(fakes.H100), ALL, Overrides(backend, "sm_80"))
    assert chosen(decision) == expected


@pytest.mark.parametrize(
    ("backend", "interpreted", "dtype", "expected"),
    [
        ("triton", True, "fp16", "triton"),
        ("triton", True, "bf16", None),
        ("triton", False, "fp16", None),
        ("auto", True, "fp16", "reference"),
    ],
)
def test_triton_interprets_on_the_cpu_only_when_named(
    backend: str, interpreted: bool, dtype: str, expected: str | None
) -> None:
    bare = System(triton="3.7.1", interpreted=interpreted)
    request = Request.of("attention_fwd", dtype, None, head_dim=64)
    assert chosen(select(request, bare, ALL, Overrides(backend))) == expected


def test_forced_architecture_that_is_not_installed_is_named() -> None:
    overrides = Overrides("cuda", "sm_80")
    decision = select(BF16_64, fakes.system(fakes.L40S), fakes.inventory("89"), overrides)
    assert decision.chosen is None
    assert result_of(decision, "cuda sm_80").fix == install_commands.install("sm80")


@pytest.mark.parametrize(
    ("forced", "cuda", "reason", "fix"),
    [
        ("sm_89-cu12", (13, 0), "not installed", install_commands.install("sm89-cu12")),
        (
            "sm_89",
            (12, 8),
            "not installed, and needs driver 580 or newer (CUDA 13.0), found a driver (CUDA 12.8)",
            "update the NVIDIA driver to 580 or newer",
        ),
        ("sm_90", (13, 0), "not installed", None),  # it would not run on this GPU
    ],
)
def test_forced_binary_that_is_not_the_best(
    forced: str, cuda: tuple[int, int], reason: str, fix: str | None
) -> None:
    inventory = fakes.inventory("80", extras=("sm80", "sm89", "sm89-cu12", "sm90"))
    system = fakes.system(fakes.L40S, driver_cuda=cuda, driver_display=None)
    decision = select(BF16_64, system, inventory, Overrides("cuda", forced))
    result = result_of(decision, f"cuda {forced}")
    assert (result.reason, result.fix) == (reason, fix)


def test_forced_specific_ptx_stays_on_its_capability() -> None:
    inventory = Inventory((fakes.binary("90a", code_kinds=("sass", "ptx")),))
    decision = select(BF16_64, fakes.system(fakes.GB200), inventory, Overrides("cuda", "sm_90"))
    assert decision.chosen is None


@pytest.mark.parametrize(
    ("backend", "environ", "expected"),
    [
        ("auto", {}, Overrides()),
        ("auto", {"FLASHVAR_BACKEND": "triton"}, Overrides("triton")),
        ("cuda", {"FLASHVAR_BACKEND": "triton"}, Overrides("cuda")),
        ("auto", {"FLASHVAR_FORCE_ARCH": "90a"}, Overrides("auto", "sm_90")),
        ("auto", {"FLASHVAR_FORCE_ARCH": "", "FLASHVAR_BACKEND": ""}, Overrides()),
    ],
    ids=["nothing", "default backend", "argument wins", "forced", "empty means unset"],
)
def test_overrides(backend: str, environ: dict[str, str], expected: Overrides) -> None:
    assert Overrides.from_environment(backend, environ) == expected


@pytest.mark.parametrize(
    ("backend", "environ", "words"),
    [
        ("cudnn", {}, ["backend:", "auto, cuda, triton, reference", "'cudnn'", "leave it out"]),
        ("auto", {"FLASHVAR_BACKEND": "gpu"}, ["FLASHVAR_BACKEND:", "'gpu'", "leave it out"]),
        (
            "auto",
            {"FLASHVAR_FORCE_ARCH": "hopper"},
            ["FLASHVAR_FORCE_ARCH: expected", "'hopper'", "unset it", "`flashvar doctor`"],
        ),
        (
            "auto",
            {"FLASHVAR_STRICT": "yes"},
            ["FLASHVAR_STRICT: expected 0 or 1", "'yes'", "set it to 1", "or unset it"],
        ),
    ],
    ids=["argument", "backend variable", "architecture variable", "strict variable"],
)
def test_bad_override_is_named(backend: str, environ: dict[str, str], words: list[str]) -> None:
    kind = ConfigurationError if environ else InvalidInputError
    with pytest.raises(kind) as caught:
        Overrides.from_environment(backend, environ)
    assert [word for word in words if word not in str(caught.value)] == []
