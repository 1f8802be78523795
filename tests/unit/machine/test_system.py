from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashvar.machine import driver, system
from flashvar.machine.system import Device, System

look: Callable[[], System] = system.gather.__wrapped__


def properties(**changes: object) -> SimpleNamespace:
    """Device properties as torch reports them."""
    known = {
        "name": "NVIDIA L40S",
        "major": 8,
        "minor": 9,
        "multi_processor_count": 142,
        "total_memory": 48 * 2**30,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 101376,
        "is_integrated": 0,
    }
    return SimpleNamespace(**{**known, **changes})


def fake_torch(*devices: SimpleNamespace, hip: str | None = None) -> SimpleNamespace:
    cuda = SimpleNamespace(
        is_available=lambda: bool(devices),
        device_count=lambda: len(devices),
        get_device_properties=lambda index: devices[index],
    )
    version = SimpleNamespace(cuda=None if hip else "13.0", hip=hip)
    return SimpleNamespace(__version__="2.13.0", cuda=cuda, version=version)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Make `import torch` give this object; no driver answers."""
    monkeypatch.setattr(driver, "_library", lambda: None)
    return lambda torch: monkeypatch.setitem(sys.modules, "torch", torch)


def test_devices_are_what_torch_reports(install: Callable[[object], None]) -> None:
    install(fake_torch(properties(), properties(name="NVIDIA H100", major=9, minor=0)))
    found = look()
    assert found.devices[0] == Device(0, "NVIDIA L40S", (8, 9), 101376, 142, 48 * 2**30)
    assert found.device(1) == found.devices[1]
    assert found.device(2) is None
    assert (found.torch, found.torch_cuda, found.torch_hip) == ("2.13.0", "13.0", None)


def test_rocm_is_seen(install: Callable[[object], None]) -> None:
    install(fake_torch(properties(major=9, minor=0), hip="6.4"))
    assert look().torch_hip == "6.4"


def test_without_the_opt_in_attribute_the_driver_is_asked(
    install: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(fake_torch(properties(shared_memory_per_block_optin=None)))
    monkeypatch.setattr(driver, "shared_memory_per_block", lambda index: 99 * 1024 + index)
    assert look().devices[0].shared_memory == 99 * 1024


def test_without_opt_in_and_driver_the_plain_limit_holds(
    install: Callable[[object], None],
) -> None:
    install(fake_torch(properties(shared_memory_per_block_optin=None)))
    assert look().devices[0].shared_memory == 49152


def test_machine_without_torch(install: Callable[[object], None]) -> None:
    install(None)
    found = look()
    assert (found.torch, found.devices) == (None, ())
    assert found.problem is not None
    assert "torch cannot be imported" in found.problem


def test_device_that_cannot_be_used_is_a_problem_not_an_exception(
    install: Callable[[object], None],
) -> None:
    def fail(index: int) -> None:
        raise RuntimeError(f"cannot re-initialize CUDA in a forked child ({index})")

    torch = fake_torch(properties())
    torch.cuda.get_device_properties = fail
    install(torch)
    assert look().problem == (
        "torch cannot use its devices: cannot re-initialize CUDA in a forked child (0)"
    )


def test_warning_about_an_old_driver_is_kept_as_the_problem(
    install: Callable[[object], None],
) -> None:
    def warn() -> bool:
        warnings.warn("the NVIDIA driver is too old", stacklevel=1)
        return False

    torch = fake_torch()
    torch.cuda.is_available = warn
    install(torch)
    assert look().problem == "the NVIDIA driver is too old"


@pytest.mark.parametrize(
    ("number", "version"), [(13000, (13, 0)), (12080, (12, 8)), (12090, (12, 9))]
)
def test_driver_version_is_decoded(number: int, version: tuple[int, int]) -> None:
    assert driver.decode_version(number) == version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\n"
            "GCC version:  gcc version 12.3.0\n",
            "570.86.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build\n",
            "580.65",
        ),
        ("something else\n", None),
    ],
    ids=["closed module", "open module", "unknown"],
)
def test_display_version(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text, encoding="utf-8")
    assert driver.display_version(tmp_path / "version") == version


def test_display_version_without_a_driver(tmp_path: Path) -> None:
    assert driver.display_version(tmp_path / "version") is None


@pytest.mark.parametrize(
    ("file", "content", "tegra"),
    [
        ("etc/nv_tegra_release", b"# R36", True),
        ("proc/device-tree/compatible", b"nvidia,p3701\0nvidia,tegra234\0", True),
        ("proc/device-tree/compatible", b"raspberrypi,5\0", False),
        ("etc/hostname", b"pc", False),
    ],
    ids=["release file", "device tree", "other board", "nothing"],
)
def test_tegra_is_recognised(tmp_path: Path, file: str, content: bytes, tegra: bool) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert system.is_tegra(tmp_path) is tegra


@pytest.mark.parametrize("integrated", [0, 1])
def test_only_the_integrated_device_of_a_tegra_board_is_tegra(
    install: Callable[[object], None], monkeypatch: pytest.MonkeyPatch, integrated: int
) -> None:
    install(fake_torch(properties(is_integrated=integrated)))
    monkeypatch.setattr(system, "is_tegra", lambda: True)
    assert look().devices[0].tegra is bool(integrated)


@pytest.mark.parametrize(
    ("present", "named", "found"),
    [
        (("gcc", "clang"), None, "gcc"),
        (("clang",), None, "clang"),
        (("cc",), None, None),
        (("gcc", "mycc"), "mycc", "mycc"),
        (("gcc",), "mycc", None),
    ],
    ids=["gcc first", "clang", "cc is not taken", "CC wins", "CC that is not there"],
)
def test_compiler_is_the_one_that_triton_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    present: tuple[str, ...],
    named: str | None,
    found: str | None,
) -> None:
    for name in present:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    assert system.find_compiler() == (str(tmp_path / found) if found else None)


@pytest.mark.parametrize(
    ("state", "found"),
    [("absent", True), ("read-only home", False), ("filled", True), ("empty", False)],
)
def test_triton_cache_is_one_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, found: bool
) -> None:
    folder = tmp_path / ".triton" / "cache"
    if state in ("filled", "empty"):
        folder.mkdir(parents=True)
    if state == "filled":
        (folder / "kernel").mkdir()
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    # Whoever runs this may write everywhere, root above all.
    monkeypatch.setattr(system.os, "access", lambda path, mode: state == "absent")
    assert look().triton_cache == (str(folder) if found else None)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"TRITON_CACHE_DIR": ""}, None),
        ({"TRITON_CACHE_DIR": "", "TRITON_HOME": "base"}, None),
        ({"TRITON_CACHE_DIR": "kernels", "TRITON_HOME": "base"}, "kernels"),
        ({"TRITON_HOME": "base"}, "base/.triton/cache"),
        ({"TRITON_HOME": ""}, ".triton/cache"),
    ],
    ids=str,
)
def test_triton_cache_is_the_one_that_triton_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str], found: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert look().triton_cache == found


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_interpreter_is_on_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str, on: bool
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert system.gather_for_cpu().interpreted is on


def test_triton_that_is_blocked_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert look().triton is None
