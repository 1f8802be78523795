"""One build at a time in a folder, and nothing goes on behind the back of its caller."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from committed import commit_all
from matrix import CONFIG

from flashvar.errors import ConfigurationError
from flashvar_factory.build import process, source, wheel
from flashvar_factory.build.development import _link, build
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.errors import BuildError
from flashvar_factory.release import reproduce
from flashvar_factory.toolchain.nvcc import Toolchain

ROOT = Path(__file__).parents[3]
NVCC = Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", None, "PATH")
(BUILD,) = expand(CONFIG, select_all(parse(["sm80", "hdim=64"], CONFIG), CONFIG))

# Works in argv[1] through a shell whose own child tells, in a file, that it is there. That one
# ignores interrupts, as what a shell starts in the background does: it is not waited for long.
WORK = """\
import signal, sys
from pathlib import Path
from flashvar_factory.build import process

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
process._ENDINGS = tuple((number, seconds / 30) for number, seconds in process._ENDINGS)
process.end_on_sigterm()
with process.locked(Path(sys.argv[1])):
    process.run(["sh", "-c", 'sleep 60 & echo $! > "$0"; wait', sys.argv[1] + "/started"])
"""

# Is terminated while it starts a program: then nobody knows yet what to end.
EARLY = """\
import os, signal, subprocess, sys
from pathlib import Path
from flashvar_factory.build import process

start = subprocess.Popen

def start_and_be_terminated(*words, **options):
    process = start(*words, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    return process

subprocess.Popen = start_and_be_terminated
process.end_on_sigterm()
with process.locked(Path(sys.argv[1])):
    process.run(["sleep", "60"])
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process at work in tmp_path, and a program that it started."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src" / "python")},
    )
    wait_for(lambda: (tmp_path / "started").is_file() and started(tmp_path) > 0)
    yield process
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(started(tmp_path), signal.SIGKILL)


def started(folder: Path) -> int:
    return int((folder / "started").read_text(encoding="utf-8").strip() or 0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free(folder: Path) -> bool:
    with (folder / process.LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_signal_while_a_program_starts_ends_it_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src" / "python")},
        check=False,
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert free(tmp_path)


def test_lock_outlives_its_process_as_long_as_what_that_started(
    worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    worker.kill()
    worker.wait()
    assert not free(tmp_path)
    with pytest.raises(BuildError, match="found one; wait"), process.locked(tmp_path):
        pass
    os.killpg(os.getpgid(started(tmp_path)), signal.SIGKILL)
    wait_for(lambda: free(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_end_of_a_process_is_the_end_of_what_it_started(
    number: signal.Signals, worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    worker.send_signal(number)
    assert worker.wait() != 0
    assert free(tmp_path)


# Works in argv[1] through a program that removes its temporary folder where it is interrupted.
TIDY = """\
import sys
from pathlib import Path
from flashvar_factory.build import process

program = "import pathlib, sys, tempfile, time, signal;"
program += "signal.signal(signal.SIGINT, signal.default_int_handler);"
program += "folder = tempfile.TemporaryDirectory(dir=sys.argv[1]);"
program += "pathlib.Path(folder.name, 'begun').touch(); time.sleep(60)"
process.end_on_sigterm()
process.run([sys.executable, "-c", program, sys.argv[1]], quiet=True)
"""


def test_a_program_that_is_ended_removes_its_temporary_files(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TIDY, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src" / "python")},
    ) as worker:
        wait_for(lambda: bool(list(tmp_path.glob("*/begun"))))
        worker.terminate()
    assert worker.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def develop(root: Path) -> Path:
    return build(CONFIG, BUILD, NVCC, root=root, jobs=1)


def pack(root: Path) -> Path:
    return wheel.binary(CONFIG, BUILD, NVCC, root=root, output=root / "dist", jobs=1)


def pack_project(root: Path) -> Path:
    return wheel.pure(CONFIG, root=root, output=root / "dist")


def pack_sources(root: Path) -> Path:
    return wheel.sdist(CONFIG, root=root, output=root / "dist")


@pytest.mark.parametrize(
    ("make", "folder"),
    [
        (develop, "build/dev/sm_80"),
        (pack, f"build/wheels/{BUILD.platform}/flashvar-sm80"),
        (pack_project, "build/wheels/flashvar"),
        (pack_sources, "build/wheels/flashvar"),
    ],
)
def test_nothing_is_made_where_another_build_works(
    make: Callable[[Path], Path], folder: str, tmp_path: Path
) -> None:
    with (
        process.locked(tmp_path / folder),
        pytest.raises(BuildError, match="expected no other build in this folder"),
    ):
        make(tmp_path)
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("make", [pack_project, pack_sources])
def test_a_time_that_is_none_is_refused_before_anything_is_built(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    monkeypatch.setattr(process, "run", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(ConfigurationError, match=r"SOURCE_DATE_EPOCH: .* found 'yesterday'"):
        make(tmp_path)


def test_two_builds_that_end_together_leave_a_link(tmp_path: Path) -> None:
    link = tmp_path / "build" / "compile_commands.json"
    for name in ("sm_80", "sm_86"):
        target = tmp_path / "build" / "dev" / name / "compile_commands.json"
        target.parent.mkdir(parents=True)
        target.write_text(name, encoding="utf-8")
        _link(target, link)
        assert link.read_text(encoding="utf-8") == name
        assert not link.readlink().is_absolute()
        assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_what_is_no_text_is_kept_as_escapes() -> None:
    words = [sys.executable, "-c", r"import sys; sys.stdout.buffer.write(b'a\xff\n')"]
    assert process.run(words, quiet=True).stdout == "a\\xff\n"


def test_a_checkout_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a\udcff.txt").write_text("x", encoding="utf-8")
    commit_all(root)
    assert source.listed(root) == {"a\udcff.txt"}
    reproduce.copy_sources(root, tmp_path / "copy", tmp_path)
    assert (tmp_path / "copy" / "a\udcff.txt").is_file()
