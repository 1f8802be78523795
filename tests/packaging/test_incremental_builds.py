"""Development builds in a copy of the sources: nothing half-built is trusted, nothing is lost."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import copied_sources

from flashvar.binaries import manifest, registry

Factory = Callable[..., "subprocess.CompletedProcess[str]"]

# A kernel that compiles in two seconds.
WORDS = ("build", "op=merge_states_fwd", "arch=sm_80", "dtype=bf16")
LOCK = "build/dev/sm_80/.lock"
INSTANCE = "merge_states_fwd_bf16"


@pytest.fixture(scope="module")
def tree(factory: Factory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with one kernel built."""
    folder = copied_sources(tmp_path_factory.mktemp("a project"), "merge_states")
    done = factory(folder, *WORDS)
    assert done.returncode == 0, done.stdout[-5000:]
    return folder


@pytest.fixture
def built(factory: Factory, tree: Path) -> Path:
    """The folder of the binary, up to date again whatever the test before did."""
    assert factory(tree, *WORDS).returncode == 0
    return tree / "build" / "dev" / "site" / "flashvar_sm80"


def header(tree: Path) -> Path:
    return tree / "src" / "cuda" / "merge_states" / "fwd.cuh"


def test_nothing_to_do_is_nothing_done(factory: Factory, tree: Path, built: Path) -> None:
    before = (built / "libflashvar_sm80.so").stat().st_mtime_ns
    done = factory(tree, *WORDS)
    assert "no work to do" in done.stdout
    assert (built / "libflashvar_sm80.so").stat().st_mtime_ns == before


def test_dist_info_is_that_of_a_wheel(tree: Path, built: Path) -> None:
    (info,) = built.parent.glob("*.dist-info")
    read = manifest.read(built / manifest.FILE_NAME)
    assert info.name == f"flashvar_sm80-{read.version}.dist-info"
    assert (info / "entry_points.txt").read_text(encoding="utf-8").split() == [
        "[flashvar.binaries]",
        "sm_80",
        "=",
        "flashvar_sm80",
    ]
    assert (info / "INSTALLER").read_text(encoding="utf-8").strip() == registry.DEVELOPMENT
    commands = json.loads((tree / "build" / "compile_commands.json").read_text(encoding="utf-8"))
    assert any(command["file"].endswith(f"{INSTANCE}.cu") for command in commands)
    assert any("-lineinfo" in command["command"] for command in commands)


def test_what_is_not_compiled_again_keeps_its_figures(
    factory: Factory, tree: Path, built: Path
) -> None:
    (before,) = manifest.read(built / manifest.FILE_NAME).kernels
    done = factory(tree, *WORDS[:-1], "dtype=bf16,fp16")
    assert done.returncode == 0, done.stdout
    compiled = [line for line in done.stdout.splitlines() if "Building CUDA object" in line]
    assert len(compiled) == 1
    assert "fp16" in compiled[0]
    rows = {row.name: row for row in manifest.read(built / manifest.FILE_NAME).kernels}
    assert len(rows) == 2
    assert rows[INSTANCE] == before
    assert before.registers > 0


def test_failed_build_leaves_no_manifest(factory: Factory, tree: Path, built: Path) -> None:
    text = header(tree).read_text(encoding="utf-8")
    try:
        header(tree).write_text(text + "\n#error broken\n", encoding="utf-8")
        done = factory(tree, *WORDS)
    finally:
        header(tree).write_text(text, encoding="utf-8")
    assert done.returncode == 4
    assert "broken" in done.stdout
    assert not (built / manifest.FILE_NAME).exists()
    assert factory(tree, *WORDS).returncode == 0
    assert manifest.read(built / manifest.FILE_NAME).kernels[0].registers > 0


def compiles(process: subprocess.Popen[bytes]) -> bool:
    """Whether the compiler is at work in the session of a program that a build started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    sessions = children.read_text(encoding="ascii").split()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, _, rest = file.read_text(encoding="utf-8").partition("(cicc) ")
            if rest and rest.split()[3] in sessions:
                return True
    return False


def interrupted(tree: Path, built: Path, number: signal.Signals) -> int:
    """Send a signal to a build whose compiler is at work; the exit code."""
    with header(tree).open("a", encoding="utf-8") as file:
        file.write("// edited\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "flashvar_factory", "--root", str(tree), *WORDS],
        env={**os.environ, "PYTHONPATH": str(tree / "src" / "python")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while (built / manifest.FILE_NAME).exists() or not compiles(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait()


def test_killed_build_leaves_nothing_that_is_trusted(
    factory: Factory, tree: Path, built: Path
) -> None:
    assert interrupted(tree, built, signal.SIGKILL) == -signal.SIGKILL
    assert not (built / manifest.FILE_NAME).exists()
    meanwhile = factory(tree, *WORDS)  # what the build started still writes here
    assert meanwhile.returncode == 4
    assert "expected no other build in this folder" in meanwhile.stdout
    with (tree / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    done = factory(tree, *WORDS)
    assert done.returncode == 0, done.stdout
    read = manifest.read(built / manifest.FILE_NAME)
    assert read.library.bytes == (built / read.library.file).stat().st_size


def test_terminated_build_takes_its_compiler_along(
    factory: Factory, tree: Path, built: Path
) -> None:
    assert interrupted(tree, built, signal.SIGTERM) == 128 + signal.SIGTERM
    assert not (built / manifest.FILE_NAME).exists()
    done = factory(tree, *WORDS)  # at once: nobody holds the lock
    assert done.returncode == 0, done.stdout
    assert "Building CUDA object" in done.stdout


def test_two_builds_do_not_meet(factory: Factory, tree: Path, built: Path) -> None:
    with (tree / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = factory(tree, *WORDS)
    assert done.returncode == 4
    assert "expected no other build in this folder" in done.stdout
    assert (built / manifest.FILE_NAME).exists()


def test_ptx_is_added_on_request(factory: Factory, tree: Path, built: Path) -> None:
    done = factory(tree, *WORDS, "ptx=1")
    assert done.returncode == 0, done.stdout
    read = manifest.read(built / manifest.FILE_NAME)
    assert read.code_kinds == ("sass", "ptx")
    assert read.version.endswith("+mergestatesfwd.bf16.ptx")
    assert len(list(built.parent.glob("*.dist-info"))) == 1
