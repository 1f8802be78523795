"""What is in the wheels of a release: asserted from their manifests, and from the machine code."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from flashvar.binaries import manifest
from flashvar.binaries.kinds import Kernel
from flashvar_factory import audit
from flashvar_factory.audit import expectations
from flashvar_factory.config import schema, version
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.schema import Config, Target
from flashvar_factory.config.selection_arguments import SelectionArguments

ROOT = Path(__file__).parents[2]
CONFIG = schema.read(ROOT / "variants.toml")
VERSION = version.read(CONFIG, ROOT)

# Those of this machine's processor.
TARGETS = {
    name: target
    for name, target in CONFIG.targets.items()
    if platform.machine() in target.platforms
}
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
# What main kernels are written around, by their namespace: in every copy of one, and in one copy at
# least (rows that are not aligned to 16 bytes cannot be copied asynchronously).
IN_EVERY_COPY = {"sm80": ("HMMA.16816", "LDSM"), "sm90": ("HGMMA", "UTMALDG")}
IN_ONE_COPY = {"sm80": ("LDGSTS",), "sm90": ()}
# On 9.0 mma.sync computes forwards of unaligned rows alone, which cp.async cannot copy.
WITHOUT_ASYNCHRONOUS_COPIES = (("sm_90", "attention_fwd"),)
# Ops with a head dim multiply matrices, but for updates; others' kernels use no such instructions.
PER_OP = [
    pytest.param(target, op, id=f"{name}-{op}")
    for name, target in TARGETS.items()
    for op in CONFIG.default_ops
    if any(axis.name == "head_dim" for axis in CONFIG.ops[op].axes) and not op.endswith("_update")
]
# Kernels that are disassembled by one command, whose words have an end.
AT_ONCE = 200
# An op's main kernel, where it is not named after the function.
MAIN_KERNELS = {"gated_delta_rule_bwd": "rows"}


def stem(target: Target) -> str:
    return target.distribution.replace("-", "_")


def wheel_name(target: Target) -> str:
    return f"{stem(target)}-{VERSION}-py3-none-manylinux_2_28_{platform.machine()}.whl"


def library(unpacked: Path, target: Target) -> Path:
    return unpacked / stem(target) / f"lib{stem(target)}.so"


def rows_of(unpacked: Path, target: Target) -> tuple[manifest.KernelRow, ...]:
    return manifest.read(unpacked / stem(target) / manifest.FILE_NAME).kernels


def test_one_wheel_per_architecture_the_pure_one_and_the_sources(
    dist: Path, projects: dict[str, Path]
) -> None:
    names = {wheel_name(target) for name, target in TARGETS.items() if name in projects}
    assert {path.name for path in dist.iterdir()} == {
        *names,
        f"flashvar-{VERSION}-py3-none-any.whl",
        f"flashvar-{VERSION}.tar.gz",
        f"flashvar_factory-{VERSION}-py3-none-any.whl",
    }


@every_target
def test_manifest_describes_the_library(
    target: Target, unpacked: Path, configs: dict[str, Config]
) -> None:
    read = manifest.read(unpacked / stem(target) / manifest.FILE_NAME)
    content = library(unpacked, target).read_bytes()
    assert read.architecture == target.architecture
    assert read.distribution == target.distribution
    assert read.version == VERSION
    assert read.code_kinds == ("sass",)
    assert read.library.bytes == len(content)
    assert read.library.sha256 == hashlib.sha256(content).hexdigest()
    config = configs[target.kind.name]
    builds = expand(config, select_all(SelectionArguments(), config))
    (build,) = (build for build in builds if build.distribution == target.distribution)
    assert [row.name for row in read.kernels] == [kernel.name for kernel in build.kernels]


@every_target
def test_kernels_fit_their_architecture(target: Target, unpacked: Path) -> None:
    rows = rows_of(unpacked, target)
    assert [row.name for row in rows if not 0 <= row.shared_memory <= target.shared_memory] == []
    assert [row.name for row in rows if not 0 < row.registers <= 255] == []
    assert [row.name for row in rows if row.threads % 32] == []


@every_target
def test_kernels_spill_no_more_than_their_op_may(target: Target, unpacked: Path) -> None:
    budgets = {
        row.name: CONFIG.ops[row.function].budget.of(Kernel(row.function, row.axes))
        for row in rows_of(unpacked, target)
    }
    spilling = {
        row.name: (found, budgets[row.name])
        for row in rows_of(unpacked, target)
        if (found := max(row.spill_bytes, row.stack_bytes)) > budgets[row.name]
    }
    assert spilling == {}


@every_target
def test_the_audit_names_the_kernels_that_spill(
    target: Target, dist: Path, unpacked: Path, configs: dict[str, Config]
) -> None:
    rows = rows_of(unpacked, target)
    expected = expectations.of(configs[target.kind.name])
    text = audit.audit(dist / wheel_name(target), expected).text()
    named = [row.name for row in rows if f"{row.name} spills {row.spill_bytes} " in text]
    assert named == [row.name for row in rows if row.spill_bytes or row.stack_bytes]


def cuobjdump() -> Path:
    triton = pytest.importorskip("triton", reason="cuobjdump is taken from triton's wheel")
    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def family_of(kernel: str, op: str) -> str | None:
    """The namespace of a main kernel of an op; None of another kernel."""
    folder, _, function = op.rpartition("_")
    main = rf"_ZN8flashvar4(sm\d\d)\d+{folder}\d+{MAIN_KERNELS.get(op, function)}_kernelI"
    match = re.match(main, kernel)
    return None if match is None else match[1]


@functools.cache
def machine_code(unpacked: Path, target: Target) -> dict[str, str]:
    """Mangled name -> SASS of every main kernel in a library."""
    rows = rows_of(unpacked, target)
    mains = [name for row in rows for name in row.functions if family_of(name, row.function)]
    found = {}
    for start in range(0, len(mains), AT_ONCE):
        names = ",".join(mains[start : start + AT_ONCE])
        command = [cuobjdump(), "-sass", "-fun", names, library(unpacked, target)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        functions = done.stdout.split("Function : ")[1:]
        found.update({text.split()[0]: text for text in functions})
    return found


@pytest.mark.parametrize(("target", "op"), PER_OP)
def test_main_kernels_use_the_instructions_they_are_written_around(
    target: Target, op: str, unpacked: Path, configs: dict[str, Config]
) -> None:
    if op not in configs[target.kind.name].default_ops:
        pytest.skip("not in the sample of a release: nox -s every-wheel builds it")
    code, without = machine_code(unpacked, target), WITHOUT_ASYNCHRONOUS_COPIES
    missing = []
    rows = [row for row in rows_of(unpacked, target) if row.function == op]
    assert rows
    for row in rows:
        copies: dict[str, list[str]] = {}
        for name in row.functions:
            if family := family_of(name, op):
                copies.setdefault(family, []).append(code[name])
        assert copies, f"{row.name} launches no main kernel of {op}"
        for space, texts in copies.items():
            everywhere = [one for one in IN_EVERY_COPY[space] if not all(one in t for t in texts)]
            wanted = () if (target.architecture.name, op) in without else IN_ONE_COPY[space]
            nowhere = [one for one in wanted if not any(one in t for t in texts)]
            missing += [(row.name, space, one) for one in everywhere + nowhere]
    assert missing == []


@every_target
def test_machine_code_is_for_its_architecture_alone(target: Target, unpacked: Path) -> None:
    tool = cuobjdump()
    path = library(unpacked, target)
    listed = subprocess.run([tool, "--list-elf", path], check=True, capture_output=True, text=True)
    assert set(re.findall(r"sm_\w+(?=\.cubin)", listed.stdout)) == {
        f"sm_{target.architecture.code}"
    }
    ptx = subprocess.run([tool, "--list-ptx", path], capture_output=True, text=True)
    assert ".ptx" not in ptx.stdout


@every_target
def test_only_the_abi_is_exported(target: Target, unpacked: Path) -> None:
    with library(unpacked, target).open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        exported = {
            symbol.name for symbol in symbols.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"
        }
    assert exported
    assert {name for name in exported if not name.startswith("flashvar_")} == set()


@every_target
def test_auditwheel_says_manylinux_2_28_or_older(target: Target, dist: Path) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", str(dist / wheel_name(target))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    match = re.search(r'platform tag:\s+"manylinux_2_(\d+)_', done.stdout)
    assert match is not None, done.stdout
    assert int(match[1]) <= 28


@every_target
def test_wheel_metadata(target: Target, dist: Path) -> None:
    with zipfile.ZipFile(dist / wheel_name(target)) as archive:
        info = f"{stem(target)}-{VERSION}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        names = set(archive.namelist())
        for name, digest, _ in csv.reader(archive.read(f"{info}/RECORD").decode().splitlines()):
            names.discard(name)
            if digest:
                found = hashlib.sha256(archive.read(name)).digest()
                assert digest == f"sha256={base64.urlsafe_b64encode(found).rstrip(b'=').decode()}"
    assert names == set()
    assert entry_points.split() == [
        "[flashvar.binaries]",
        target.kind.name,
        "=",
        stem(target),
    ]
    assert f"Name: {target.distribution}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist" not in metadata


def test_the_pure_wheel_holds_no_factory_and_no_binary(dist: Path, sample: Path) -> None:
    with zipfile.ZipFile(dist / f"flashvar-{VERSION}-py3-none-any.whl") as archive:
        names = archive.namelist()
        metadata = archive.read(f"flashvar-{VERSION}.dist-info/METADATA").decode()
    assert {name.split("/")[0] for name in names} == {"flashvar", f"flashvar-{VERSION}.dist-info"}
    assert [name for name in names if name.endswith(".so")] == []
    extras = re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)
    targets = schema.read(sample / "variants.toml").targets.values()
    architectures = {kind.extra for target in targets for kind in target.kinds}
    assert architectures | {"sm-89", "all", "cuda", "cli"} <= set(extras)
    assert len(extras) == len(set(extras))
