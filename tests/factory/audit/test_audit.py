"""Every check of a factory's wheel: a wheel with one fault each, and one with none.

Longer than others for its table of faults, which is read as one list.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_artifacts
import fakes
import pytest
from audited import faults
from fake_artifacts import Image, Wheel

from flashvar.binaries.kinds import Architecture
from flashvar.binaries.manifest import Manifest
from flashvar_factory import audit
from flashvar_factory.audit import expectations
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.platform_tag import Policy
from flashvar_factory.config import schema
from flashvar_factory.errors import AuditError

ROOT = Path(__file__).parents[3]
FAKE = fake_artifacts.manifest()
PLAIN = fake_artifacts.library(FAKE)
OWN = fake_artifacts.images("80", FAKE)
KERNEL = FAKE.kernels[0]
SHARING = replace(FAKE, kernels=tuple(replace(row, functions=("_Z1",)) for row in FAKE.kernels))
INFO = "flashvar_sm80-0.1.0.dist-info"

pytestmark = pytest.mark.usefixtures("auditwheel")


def described(**changes: object) -> Manifest:
    return replace(FAKE, **changes)


def with_device_code(*images: Image) -> Wheel:
    return Wheel(library=fake_artifacts.library(FAKE, *images))


def test_nothing_against_it(tmp_path: Path) -> None:
    path = Wheel().write(tmp_path)
    config = schema.read(ROOT / "variants.toml")
    assert faults(path) == []
    assert faults(path, replace(expectations.of(config), functions=frozenset(), config=None)) == []


def test_specific_code_is_in_a_wheel_named_without_it(tmp_path: Path) -> None:
    assert faults(Wheel(fake_artifacts.manifest("90a"), stem="flashvar_sm90").write(tmp_path)) == []


FAULTS = {
    "another architecture": (
        with_device_code(*OWN, *fake_artifacts.images("86", FAKE)),
        "expected machine code for sm_80 alone, found 2 images for sm_86",
    ),
    "default architecture of a device link": (
        with_device_code(*OWN, Image("75", fake_artifacts.cubin({}, 75))),
        "found 1 images without kernels for sm_75, the default of nvcc's device link",
    ),
    "architecture that its entry hides": (
        with_device_code(*(replace(i, code="80") for i in fake_artifacts.images("86", FAKE))),
        "expected machine code for sm_80 alone, found 2 images for sm_86",
    ),
    "no machine code": (
        with_device_code(fake_artifacts.ptx()),
        "expected machine code for sm_80, found none",
    ),
    "family code": (
        with_device_code(*fake_artifacts.images("80f", FAKE)),
        "expected machine code for sm_80 alone, found 2 images for sm_80f",
    ),
    "ptx": (
        with_device_code(*OWN, fake_artifacts.ptx()),
        "ptx: flashvar_sm80/libflashvar_sm80.so: expected no PTX in a release, found 1 images",
    ),
    "ptx that the manifest hides": (
        Wheel(
            described(version="0.1.0+hdim64"),
            fake_artifacts.library(FAKE, *OWN, fake_artifacts.ptx()),
        ),
        "expected no PTX, as the manifest says, found 1 images",
    ),
    "ptx in a release that admits it": (
        Wheel(
            described(code_kinds=("sass", "ptx")),
            fake_artifacts.library(FAKE, *OWN, fake_artifacts.ptx()),
        ),
        "expected no PTX in a release",
    ),
    "ptx that is not there": (
        Wheel(described(code_kinds=("sass", "ptx"), version="0.1.0+ptx")),
        "expected PTX, as the manifest says, found none",
    ),
    "file name of another architecture": (
        Wheel(stem="flashvar_sm86"),
        "expected code for sm86 as its file name says, found code 80 (sm_80)",
    ),
    "label of another architecture": (
        Wheel(label="-sm89"),
        "expected code for sm89 as its label says, found code 80 (sm_80)",
    ),
    "entry point of another architecture": (
        Wheel(
            more={f"{INFO}/entry_points.txt": b"[flashvar.binaries]\nsm_89 = flashvar_sm80\n"},
        ),
        "expected code for sm_89 as its entry point says, found code 80 (sm_80)",
    ),
    "variant of another architecture": (
        Wheel(label="-sm80", more=fake_artifacts.variant("sm80", "89_real")),
        "expected sm80: sm_arch ['89_real'] as variant.json says, found code 80 (sm_80)",
    ),
    "variant with another label": (
        Wheel(label="-sm80", more=fake_artifacts.variant("sm89", "80_real")),
        "expected sm89: sm_arch ['80_real'] as variant.json says, found code 80 (sm_80)",
    ),
    "unreadable variant": (
        Wheel(label="-sm80", more={f"{INFO}/variant.json": b"["}),
        "expected variant.json: sm_arch unreadable as variant.json says",
    ),
    "an extra symbol": (
        Wheel(library=replace(PLAIN, exported=(*PLAIN.exported, "flashvar_backdoor"))),
        "expected no exported symbols but the ABI's, found flashvar_backdoor",
    ),
    "a missing symbol": (
        Wheel(library=replace(PLAIN, exported=PLAIN.exported[:3])),
        "expected the ABI's symbol flashvar_attention_fwd, found none",
    ),
    "libtorch": (
        Wheel(library=replace(PLAIN, needed=("libc.so.6", "libtorch_cuda.so"))),
        "expected only the libraries of the C runtime, found libtorch_cuda.so, of torch",
    ),
    "libpython": (
        Wheel(library=replace(PLAIN, needed=("libpython3.11.so.1.0",))),
        "found libpython3.11.so.1.0, of Python",
    ),
    "libcuda": (
        Wheel(library=replace(PLAIN, needed=("libcuda.so.1",))),
        "found libcuda.so.1, of the NVIDIA driver",
    ),
    "libstdc++": (
        Wheel(library=replace(PLAIN, needed=("libstdc++.so.6",))),
        "found libstdc++.so.6, of libstdc++: link it static",
    ),
    "symbols of torch": (
        Wheel(library=replace(PLAIN, undefined=(("_ZN2at6detail3runEv", None),))),
        "found _ZN2at6detail3runEv, of torch",
    ),
    "symbols of Python": (
        Wheel(library=replace(PLAIN, undefined=(("PyErr_Clear", None), ("_Py_Dealloc", None)))),
        "found PyErr_Clear, _Py_Dealloc, of Python",
    ),
    "symbols of the driver": (
        Wheel(library=replace(PLAIN, undefined=(("cuInit", None),))),
        "found cuInit, of the NVIDIA driver",
    ),
    "symbols of libstdc++": (
        Wheel(library=replace(PLAIN, undefined=(("_ZSt4cout", "GLIBCXX_3.4"),))),
        "found _ZSt4cout, of libstdc++",
    ),
    "symbols of a stranger": (
        Wheel(library=replace(PLAIN, undefined=(("mystery", None),))),
        "expected only undefined symbols of the C runtime, found mystery",
    ),
    "run path": (
        Wheel(library=replace(PLAIN, run_path="/opt/build/lib")),
        "expected no RPATH or RUNPATH, found /opt/build/lib",
    ),
    "another processor": (
        Wheel(library=replace(PLAIN, machine=183)),
        "expected a platform tag for aarch64, found manylinux_2_28_x86_64",
    ),
    "plain linux tag": (
        Wheel(platform="linux_x86_64"),
        "expected a manylinux tag, found linux_x86_64, which PyPI or auditwheel does not accept",
    ),
    "pure tag": (Wheel(platform="any"), "expected a platform tag for x86_64, found any"),
    "manifest of another version": (
        Wheel(more={"flashvar_sm80/manifest.json": described(version="9.9").to_json().encode()}),
        "expected version 0.1.0, found 9.9",
    ),
    "manifest of another library": (
        Wheel(more={"flashvar_sm80/manifest.json": FAKE.to_json().encode()}),
        "expected sha256 of libflashvar_sm80.so",
    ),
    "manifest of another distribution": (
        Wheel(described(distribution="flashvar-sm86")),
        "expected distribution flashvar_sm80, found flashvar_sm86",
    ),
    "manifest that is no manifest": (
        Wheel(more={"flashvar_sm80/manifest.json": b"{}"}),
        "manifest: flashvar_sm80/manifest.json: schema: expected a value, found no such key",
    ),
    "second library": (
        Wheel(more={"flashvar_sm80/libother.so": PLAIN.build()}),
        "expected libraries beside it ['libflashvar_sm80.so'], found",
    ),
    "library elsewhere": (
        Wheel(more={"elsewhere/libother.so": PLAIN.build()}),
        "elsewhere/manifest.json: expected a manifest, found none",
    ),
    "kernel that is nowhere": (
        Wheel(library=replace(PLAIN, kernels=PLAIN.kernels[1:])),
        f"expected {KERNEL.name} in the library, as the manifest says, found no such kernels",
    ),
    "kernel that no manifest names": (
        Wheel(library=replace(PLAIN, kernels=(*PLAIN.kernels, "attention_fwd_bf16_hdim128"))),
        "expected attention_fwd_bf16_hdim128 in the manifest, found no such kernels",
    ),
    "kernel without device code": (
        with_device_code(*OWN[1:]),
        f"expected the device functions of {KERNEL.name}, found no {', '.join(KERNEL.functions)}",
    ),
    "kernel without functions": (
        Wheel(described(kernels=(replace(KERNEL, functions=()), *FAKE.kernels[1:]))),
        f"expected the device functions of {KERNEL.name} in the manifest, found none",
    ),
    "kernels that share a function": (
        Wheel(
            SHARING,
            fake_artifacts.library(SHARING, fake_artifacts.images("80", SHARING)[0]),
        ),
        "expected _Z1 in one image for each kernel that launches it, found 2 such kernels",
    ),
    "device code of a stranger": (
        with_device_code(*OWN, Image("80", fake_artifacts.cubin({"_Zminer": 10}))),
        "expected device functions of the manifest's kernels alone, found _Zminer",
    ),
    "device code that stays closed": (
        with_device_code(*OWN, Image("80", b"?", compression="lz4")),
        "expected device code that is not compressed, or by zstd, found 1 images",
    ),
    "no cubin": (with_device_code(Image("80", b"x")), "expected a 64-bit little-endian ELF file"),
}


@pytest.mark.parametrize(("wheel", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(wheel: Wheel, sentence: str, tmp_path: Path) -> None:
    report = audit.audit(wheel.write(tmp_path))
    assert any(sentence in str(finding) for finding in report.findings), report.findings
    with pytest.raises(AuditError, match="found errors: ") as caught:
        audit.require([report])
    assert caught.value.exit_code == 6


def test_config_knows_what_a_distribution_holds(tmp_path: Path) -> None:
    expected = Expectations({"flashvar-sm80": Architecture.parse("80a")})
    (fault,) = faults(Wheel().write(tmp_path), expected)
    assert "expected code 80a as variants.toml says, found code 80" in fault


def test_config_knows_the_ops(tmp_path: Path) -> None:
    expected = Expectations(functions=frozenset({"attention_fwd", "attention_bwd"}))
    (fault,) = faults(Wheel().write(tmp_path), expected)
    assert "expected the ABI's symbol flashvar_attention_bwd, found none" in fault


@pytest.mark.parametrize("op", ["attention_bwd", "attention_wbd"])
def test_an_op_may_ask_for_a_workspace_and_no_other(op: str, tmp_path: Path) -> None:
    described = fake_artifacts.manifest(ops=fakes.OPS)
    plain = fake_artifacts.library(described)
    more = replace(plain, exported=(*plain.exported, f"flashvar_{op}_workspace"))
    found = faults(Wheel(described, more).write(tmp_path))
    strange = [] if op == "attention_bwd" else [f"found flashvar_{op}_workspace"]
    assert [part for part in strange if part not in found[0]] == []
    assert len(found) == len(strange)


def test_emptied_wheel_of_the_factory(tmp_path: Path) -> None:
    path = tmp_path / "flashvar_sm80-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr(f"{INFO}/RECORD", f"{INFO}/RECORD,,\n")
    assert faults(path) == []
    expected = Expectations({"flashvar-sm80": Architecture.parse("80")})
    found = faults(path, expected)
    assert any("expected a library and its manifest, found none" in fault for fault in found)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (Policy("manylinux_2_34_x86_64", ()), "by auditwheel: dlopen of GLIBC_2.34;"),
        (Policy("linux_x86_64", ("libtorch.so",)), "by auditwheel: dlopen of GLIBC_2.34;"),
        ("it broke", "expected auditwheel to name a platform tag, found: it broke"),
    ],
    ids=["younger glibc", "no policy", "no answer"],
)
def test_auditwheel_disagrees(
    answer: Policy | str,
    sentence: str,
    auditwheel: Callable[[Policy | str], None],
    tmp_path: Path,
) -> None:
    young = (("malloc", "GLIBC_2.2.5"), ("dlopen", "GLIBC_2.34"))
    auditwheel(answer)
    (fault,) = faults(Wheel(library=replace(PLAIN, undefined=young)).write(tmp_path))
    assert sentence in fault


def test_what_a_library_needs_is_named(
    auditwheel: Callable[[Policy | str], None], tmp_path: Path
) -> None:
    auditwheel(Policy("linux_x86_64", ("libtorch.so",)))
    (fault,) = faults(Wheel().write(tmp_path))
    assert "found linux_x86_64 by auditwheel: needs libtorch.so" in fault
