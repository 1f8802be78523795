from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
from installed import COMPILER, compile_library, library_source, put_binary, put_wheel

from flashvar.binaries import install_commands
from flashvar.errors import BackendUnavailableError, ConfigurationError, ManifestError
from flashvar.machine.system import System
from flashvar.selection import resolve, rules
from flashvar.selection.request import Request

pytestmark = pytest.mark.usefixtures("fresh_registry")

BF16_64 = Request.of("attention_fwd", "bf16", 0, head_dim=64)


@pytest.fixture
def lib_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An A100 that looks for binaries in an empty folder, and where that folder is."""
    monkeypatch.setattr(resolve, "gather", lambda: fakes.system(fakes.A100))
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "lib"))
    return tmp_path / "lib"


@pytest.mark.skipif(COMPILER is None, reason="makes its library with a C compiler")
def test_good_binary_is_chosen_and_open(lib_dir: Path, tmp_path: Path) -> None:
    library = compile_library(library_source(), tmp_path)
    put_binary(lib_dir / "good", fakes.manifest("80"), library)
    result = resolve.choose(BF16_64)
    assert result.binary is not None
    assert result.kernel is not None
    assert (result.candidate, result.kernel.name) == (
        "cuda sm_80",
        "attention_fwd_bf16_hdim64",
    )


def test_binary_that_does_not_open_is_replaced_and_said_so(
    lib_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_binary(lib_dir / "bad", fakes.manifest("80"), b"text")
    with caplog.at_level(logging.INFO, "flashvar"):
        assert resolve.choose(BF16_64).backend == "triton"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "runs on triton, not cuda sm_80" in record.getMessage()
    assert "expected an ELF library" in record.getMessage()


@pytest.mark.skipif(COMPILER is None, reason="makes its library with a C compiler")
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("no folder", "expected a manifest, found no file"),
        ("another ABI", "expected ABI"),
        ("no library", "expected an ELF library"),
    ],
)
def test_a_wheel_in_place_of_a_named_folder_is_said_once(
    damage: str,
    reason: str,
    lib_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    put_wheel(
        tmp_path / "site",
        fakes.manifest("80"),
        library=compile_library(library_source(), tmp_path),
    )
    if damage == "another ABI":
        put_binary(lib_dir, replace(fakes.manifest("80"), abi=1))
    if damage == "no library":
        put_binary(lib_dir, fakes.manifest("80"), b"text")
    with caplog.at_level(logging.INFO, "flashvar"):
        for size in (64, 128):
            result = resolve.choose(Request.of("attention_fwd", "bf16", 0, head_dim=size))
            assert result.binary is not None
            assert result.binary.folder.origin.startswith("wheel ")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("FLASHVAR_LIB_DIR (")
    assert reason in record.getMessage()
    assert "unset FLASHVAR_LIB_DIR" in record.getMessage()


def test_a_named_folder_for_other_gpus_is_not_said(
    lib_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_binary(lib_dir / "other", replace(fakes.manifest("90"), abi=1))
    with caplog.at_level(logging.INFO, "flashvar"):
        assert resolve.choose(BF16_64).backend == "triton"
    assert [one for one in caplog.records if "LIB_DIR" in one.getMessage()] == []


@pytest.mark.skipif(COMPILER is None, reason="makes its library with a C compiler")
def test_a_kernel_for_a_lower_architecture_needs_no_warning(
    lib_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That its own binary is missing is a fact of the result: no words are compared."""
    monkeypatch.setattr(resolve, "gather", lambda: fakes.system(fakes.RTX_3090))
    monkeypatch.setattr(rules, "_NOT_INSTALLED", "is not here")
    put_binary(lib_dir / "good", fakes.manifest("80"), compile_library(library_source(), tmp_path))
    with caplog.at_level(logging.INFO, "flashvar"):
        assert resolve.choose(BF16_64).candidate == "cuda sm_80"
    assert not caplog.records


@pytest.mark.skipif(COMPILER is None, reason="makes its library with a C compiler")
def test_a_damaged_wheel_behind_a_named_folder_needs_no_warning(
    lib_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    put_wheel(tmp_path / "site", replace(fakes.manifest("80"), abi=1))
    put_binary(lib_dir, fakes.manifest("80"), compile_library(library_source(), tmp_path))
    with caplog.at_level(logging.INFO, "flashvar"):
        result = resolve.choose(BF16_64)
    assert result.binary is not None
    assert result.binary.folder.from_lib_dir
    assert not caplog.records


def test_missing_wheel_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolve, "gather", lambda: fakes.system(fakes.A100))
    monkeypatch.setattr(resolve, "registry", SimpleNamespace(installed=fakes.inventory))
    with caplog.at_level(logging.INFO, "flashvar"):
        assert resolve.choose(BF16_64).backend == "triton"
        assert (
            resolve.choose(Request.of("attention_fwd", "bf16", 0, head_dim=128)).backend == "triton"
        )
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert install_commands.install("sm80") in record.getMessage()


@pytest.mark.parametrize(
    ("machine", "request_", "reason"),
    [
        pytest.param(
            fakes.system(fakes.T4),
            Request.of("attention_fwd", "fp16", 0, head_dim=64),
            "not cuda sm_75 (flashvar has no wheel for it, only for sm_80, sm_86, sm_89, sm_90)",
            id="no-wheel-for-the-gpu",
        ),
        pytest.param(
            fakes.system(fakes.A100),
            Request.of("gated_delta_rule_fwd", "fp32", 0, head_dim=64),
            "not cuda sm_80 (holds dtypes bf16, fp16, not fp32)",
            id="no-kernel-of-the-dtype",
        ),
        pytest.param(
            fakes.system(fakes.MI300, torch_cuda=None, torch_hip="7.0"),
            BF16_64,
            "not cuda (runs on NVIDIA devices, torch is built for ROCm 7.0)",
            id="rocm",
        ),
    ],
)
def test_fallback_that_nothing_can_change_is_said_once(
    machine: System,
    request_: Request,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wheels = () if machine.torch_hip else ("80",)
    monkeypatch.setattr(resolve, "gather", lambda: machine)
    monkeypatch.setattr(
        resolve, "registry", SimpleNamespace(installed=lambda: fakes.inventory(*wheels))
    )
    with caplog.at_level(logging.INFO, "flashvar"):
        for value in (64, 128):
            ((axis, _),) = request_.by_axis
            assert resolve.choose(replace(request_, axes=(axis.value(value),))).backend == "triton"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"runs on triton, {reason}")


@pytest.mark.parametrize(
    ("device", "backend"), [(0, "triton"), (0, "reference"), (None, "auto"), (None, "reference")]
)
def test_named_backends_and_cpu_tensors_warn_of_nothing(
    device: int | None,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for gather in ("gather", "gather_for_cpu"):
        monkeypatch.setattr(resolve, gather, lambda: fakes.system(fakes.T4))
    monkeypatch.setattr(resolve, "registry", SimpleNamespace(installed=fakes.inventory))
    with caplog.at_level(logging.INFO, "flashvar"):
        resolve.choose(Request.of("attention_fwd", "fp16", device, head_dim=64), backend)
        monkeypatch.setenv("FLASHVAR_BACKEND", "triton" if device == 0 else "reference")
        resolve.choose(Request.of("attention_fwd", "fp16", device, head_dim=128))
    assert not caplog.records


@pytest.mark.skipif(COMPILER is None, reason="makes its library with a C compiler")
def test_damaged_binary_is_said_though_another_serves(
    lib_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resolve, "gather", lambda: fakes.system(fakes.RTX_3090))
    put_binary(lib_dir / "bad", fakes.manifest("86"), b"text")
    put_binary(lib_dir / "good", fakes.manifest("80"), compile_library(library_source(), tmp_path))
    with caplog.at_level(logging.INFO, "flashvar"):
        assert resolve.choose(BF16_64).candidate == "cuda sm_80"
    (record,) = caplog.records
    assert "runs on cuda sm_80, not cuda sm_86" in record.getMessage()


def test_named_backend_that_cannot_serve_is_an_error_with_the_trace(lib_dir: Path) -> None:
    put_binary(lib_dir / "bad", fakes.manifest("80"), b"text")
    with pytest.raises(BackendUnavailableError) as caught:
        resolve.choose(BF16_64, "cuda")
    message = str(caught.value)
    assert "attention_fwd bf16 head dim 64 on cuda:0: expected backend 'cuda'" in message
    assert "expected an ELF library" in message
    assert "triton" not in message
    assert "reference" not in message
    assert "\nTo run it, leave backend out. `flashvar doctor` shows" in message


@pytest.mark.usefixtures("lib_dir")
def test_a_backend_without_the_device_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = replace(BF16_64, device=None)
    expected = (
        "attention_fwd bf16 head dim 64 on CPU: expected backend 'triton' to run it, found:\n"
        "triton: no: runs only CUDA tensors, found CPU tensors\n"
        'To run it, move the tensors with .to("cuda"), or {}. '
        "`flashvar doctor` shows the backends for every device and head dim."
    )
    with pytest.raises(BackendUnavailableError) as caught:
        resolve.choose(request, "triton")
    assert str(caught.value) == expected.format("leave backend out")
    monkeypatch.setenv("FLASHVAR_BACKEND", "triton")
    with pytest.raises(BackendUnavailableError) as caught:
        resolve.choose(request)
    assert str(caught.value) == expected.format("unset FLASHVAR_BACKEND")


@pytest.mark.usefixtures("lib_dir")
def test_environment_names_the_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHVAR_BACKEND", "reference")
    assert resolve.choose(BF16_64).backend == "reference"
    assert resolve.choose(BF16_64, "triton").backend == "triton"
    resolve.choose.cache_clear()
    monkeypatch.setenv("FLASHVAR_BACKEND", "gpu")
    with pytest.raises(ConfigurationError, match="FLASHVAR_BACKEND"):
        resolve.choose(BF16_64)


def test_cpu_tensors_ask_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("devices were asked")

    monkeypatch.setattr(resolve, "gather", fail)
    assert (
        resolve.choose(Request.of("attention_fwd", "fp32", None, head_dim=64)).backend
        == "reference"
    )


def test_other_version_is_an_error_when_strict(
    lib_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_binary(lib_dir / "old", replace(fakes.manifest("80"), version="0.0.9"))
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    with pytest.raises(ManifestError, match=r"FLASHVAR_STRICT=1 makes this an error.*0\.0\.9"):
        resolve.choose(BF16_64)
    assert resolve.choose(BF16_64, "triton").backend == "triton"
    assert resolve.choose(replace(BF16_64, device=None)).backend == "reference"
