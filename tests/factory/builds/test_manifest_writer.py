"""The manifest joins the plan, the library's own records and what ptxas said."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashvar.binaries import manifest
from flashvar_factory.build import manifest_writer, ptxas_report
from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf

LAUNCHER = Path(ptxas_report.__file__)

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zplain' for 'sm_80'
ptxas info    : Function properties for _Zplain
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 528 bytes cmem[0]
ptxas info    : Compile time = 641.280 ms
ptxas info    : Compiling entry function '_Zcausal' for 'sm_80'
ptxas info    : Function properties for _Zcausal
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers, 528 bytes cmem[0]
"""

SOURCE = """\
struct Facts {
  char row[64], kernel[32], family[16], when[160];
  int threads, shared_memory, tile[4];
};
#define ONE(row, kernel, family, threads) \\
  {row, kernel, family, "now", threads, 49152, {128, 64, 0, 0}}
#define KERNELS(id, row, family, threads) \\
  __attribute__((section(".flashvar.kernels"), used)) const struct Facts id[] = { \\
    ONE(row, "main", family, threads), ONE(row, "other", family, 512)};
"""


def library(folder: Path, *kernels: str, family: str = "") -> Path:
    """A shared object with two records for every name."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    lines = [f'KERNELS(k{i}, "{name}", "{family}", {128 + i})' for i, name in enumerate(kernels)]
    (folder / "x.c").write_text(SOURCE + "\n".join(lines) + "\nint dummy;\n", encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", "libflashvar_sm80.so", "x.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "libflashvar_sm80.so"


def write(folder: Path, path: Path, *names: str, report: str = REPORT) -> manifest.Manifest:
    """Run the writer on a plan for attention_fwd kernels of these (dtype_hdim) names."""
    kernels = []
    for name in names:
        (dtype, dim), *_ = re.findall(r"(\w+)_hdim(\d+)", name.removeprefix("attention_fwd_"))
        kernels.append({"op": "attention_fwd", "axes": {"dtype": dtype, "head_dim": int(dim)}})
        kept = folder / "objects" / f"{name}.cu.o.ptxas"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(report, encoding="utf-8")
    plan = {
        "abi": 1,
        "project": "flashvar",
        "version": "1.0+hdim64",
        "distribution": "flashvar-sm80",
        "source": {"revision": None, "dirty": None, "hash": "0" * 64},
        "code": "80",
        "code_kinds": ["sass"],
        "toolkit": {"compiler": "nvcc", "version": "13.0.88"},
        "minimum_driver": {"cuda": [13, 0], "display": "580"},
        "platform": "linux_x86_64",
        "ran": "never",
        "torch": None,
        "family": "sm80",
        "kernels": kernels,
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    output = folder / "manifest.json"
    manifest_writer.write(
        plan_json=folder / "plan.json",
        library=path,
        objects_dir=folder / "objects",
        output=output,
    )
    return manifest.read(output)


BF16, FP16 = "attention_fwd_bf16_hdim64", "attention_fwd_fp16_hdim64"


def test_manifest(tmp_path: Path) -> None:
    path = library(tmp_path, FP16, BF16)
    written = write(tmp_path, path, BF16, FP16)
    assert written.architecture.name == "sm_80"
    assert written.library.bytes == path.stat().st_size
    assert [row.name for row in written.kernels] == [BF16, FP16]
    row = written.kernels[0]
    assert (row.threads, row.shared_memory, row.tile) == (129, 49152, (128, 64))
    assert (row.registers, row.spill_bytes, row.stack_bytes) == (254, 12, 16)
    assert row.functions == ("_Zcausal", "_Zplain")
    assert row.launches == ()
    assert not list(tmp_path.glob("*.partial"))


def test_kernels_of_a_row_are_in_the_order_of_their_records(tmp_path: Path) -> None:
    row = write(tmp_path, library(tmp_path, FP16, BF16, family="wgmma"), BF16, FP16).kernels[0]
    assert [(one.kernel, one.family, one.threads) for one in row.launches] == [
        ("main", "wgmma", 129),
        ("other", "wgmma", 512),
    ]
    assert row.rules == (manifest.Rule("wgmma", "now"),)


@pytest.mark.parametrize("held", [[BF16], [BF16, FP16, "attention_fwd_bf16_hdim128"]])
def test_library_and_plan_that_differ(held: list[str], tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="expected the kernels of the plan"):
        write(tmp_path, library(tmp_path, *held), BF16, FP16)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    "report", ["", "ptxas info    : 0 bytes gmem\n"], ids=["empty", "no kernel"]
)
def test_no_report_is_no_manifest(report: str, tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match="expected one report of ptxas on attention_fwd_bf16_hdim64"
    ):
        write(tmp_path, library(tmp_path, BF16), BF16, report=report)


def test_two_reports_are_no_manifest(tmp_path: Path) -> None:
    stale = tmp_path / "objects" / "old.dir" / f"{BF16}.cu.o.ptxas"
    stale.parent.mkdir(parents=True)
    stale.write_text(REPORT, encoding="utf-8")
    with pytest.raises(BuildError, match=r"expected one report .* found .*old\.dir.*; delete"):
        write(tmp_path, library(tmp_path, BF16), BF16)


def test_section_that_is_not_there(tmp_path: Path) -> None:
    path = library(tmp_path, BF16)
    assert elf.section(path, ".other") is None
    assert elf.section(path, ".bss") is not None


@pytest.mark.parametrize("keep", [0, 3, 40, 64, 1000], ids=lambda keep: f"{keep} bytes")
def test_truncated_library(keep: int, tmp_path: Path) -> None:
    path = library(tmp_path, BF16)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BuildError, match="ELF"):
        elf.section(path, ".flashvar.kernels")


def test_report_of_two_kernels_is_the_most_of_each() -> None:
    assert ptxas_report.parse(REPORT) == ptxas_report.Usage(254, 12, 16, ("_Zcausal", "_Zplain"))
    assert ptxas_report.parse("ptxas info    : 0 bytes gmem\n") is None


def launch(folder: Path, said: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the launcher on a compiler that says `said` and writes x.o."""
    compiler = folder / "compiler"
    (folder / "said.txt").write_text(said, encoding="utf-8")
    compiler.write_text(
        f'#!/bin/sh\ncat "{folder}/said.txt" >&2\ntouch "$3"\nexit {exit_code}\n', encoding="utf-8"
    )
    compiler.chmod(0o755)
    command = [sys.executable, "-S", "-E", str(LAUNCHER), str(compiler), "-c", "-o"]
    return subprocess.run(
        [*command, str(folder / "x.o")],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )


def test_launcher_keeps_the_report_and_is_quiet(tmp_path: Path) -> None:
    done = launch(tmp_path, REPORT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "x.o.ptxas").read_text(encoding="utf-8") == REPORT


def test_launcher_shows_warnings(tmp_path: Path) -> None:
    warning = "x.cu(3): warning #177-D: variable was declared but never referenced"
    done = launch(tmp_path, f"{warning}\n{REPORT}")
    assert (done.returncode, done.stderr) == (0, f"{warning}\n")


def test_launcher_passes_a_failure_on(tmp_path: Path) -> None:
    done = launch(tmp_path, "x.cu(3): error: expected a declaration\n", exit_code=2)
    assert done.returncode == 2
    assert "expected a declaration" in done.stderr
    assert not (tmp_path / "x.o.ptxas").exists()


@pytest.mark.parametrize("code", ["C7508", "C7510"])
def test_launcher_fails_where_ptxas_drops_the_design(code: str, tmp_path: Path) -> None:
    remark = f"ptxas info    : ({code}) Potential Performance Loss: something is serialized"
    done = launch(tmp_path, f"{REPORT}{remark}\n")
    assert done.returncode == 1
    assert remark in done.stderr
    assert not (tmp_path / "x.o").exists()
    assert not (tmp_path / "x.o.ptxas").exists()
