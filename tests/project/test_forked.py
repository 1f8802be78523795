"""The `python` of the tests that is a fork: it ends as a process of its own would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def run(python: str, code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [python, "-c", code], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize(
    "code",
    [
        "print('out'); import sys; print('err', file=sys.stderr)",
        "raise SystemExit(3)",
        "raise SystemExit(-1)",
        "raise SystemExit(None)",
        "import atexit; atexit.register(print, 'last'); raise SystemExit(3)",
        "import atexit; atexit.register(lambda: 1 / 0)",
        "import threading as t; t.Timer(0.2, print, ['later']).start()",
        "print('lost'); import os; os.close(1)",
        "import sys; sys.stdout.close()",
        "raise SystemExit('words')",
        "import os; os._exit(200)",
        "raise ValueError(1)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.abort()",
        "import sys; print(sys.stdin.read(), sys.argv)",
        "import os; print(os.getcwd(), os.environ['GIVEN'])",
        "import __main__; name = 1; print(__main__.name, __main__.__name__)",
    ],
)
def test_ends_as_a_process_of_its_own(python: str, code: str, tmp_path: Path) -> None:
    options = {"input": "typed", "cwd": tmp_path, "env": {**os.environ, "GIVEN": "given"}}
    found, expected = run(python, code, **options), run(sys.executable, code, **options)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_writes_at_once_where_that_is_asked_for(python: str) -> None:
    """As whoever starts workers of pytest-xdist does."""
    code = "import os; print('kept', end=''); os._exit(0)"
    for program in (python, sys.executable):
        for words, variable in ((["-u"], ""), ([], "1"), ([], "")):
            environ = {**os.environ, "PYTHONUNBUFFERED": variable}
            command = [program, *words, "-c", code]
            written = subprocess.run(command, env=environ, stdout=subprocess.PIPE).stdout
            assert written == (b"kept" if words or variable else b"")


def test_has_the_folders_of_its_own_variables(python: str, tmp_path: Path) -> None:
    """Not those of the process that loaded the modules, which are where this project is."""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import sys; print(sys.path)"
    found, expected = run(python, code, env=environ), run(sys.executable, code, env=environ)
    assert found.stdout == expected.stdout


# Tells when it goes, which is as Python takes its modules apart.
KEPT = """
import os, sys

class Kept:
    def __del__(self, write=os.write):
        write(1, b"taken apart")

sys.kept = Kept()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(3)", 3), ("sys.exit('words')", 1), ("raise ValueError(1)", 1)],
)
def test_no_module_is_taken_apart(python: str, end: str, code: int) -> None:
    """It takes a second where torch is one of them, also of a program that fails."""
    done = run(python, KEPT + end)
    assert (done.returncode, done.stdout) == (code, "")
    assert run(sys.executable, KEPT + end).stdout == "taken apart"


def test_a_timeout_ends_the_program(python: str, tmp_path: Path) -> None:
    """Also its hold of the pipes, for whose end a caller waits."""
    alive = tmp_path / "pid"
    code = (
        f"import os, pathlib, time; pathlib.Path({str(alive)!r}).write_text(str(os.getpid())); "
        "time.sleep(600)"
    )
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE) as asking:
        while not (alive.is_file() and alive.read_text()):
            assert asking.poll() is None
            time.sleep(0.02)
        start = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            asking.communicate(timeout=0.1)
        asking.kill()
        asking.communicate()
    assert time.monotonic() - start < 60
    assert ends(int(alive.read_text()))


def test_a_signal_ends_the_program(python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        number = int(asking.stdout.readline())
        asking.send_signal(signal.SIGTERM)
        assert asking.wait(60) == -signal.SIGTERM
    assert ends(number)


def ends(number: int) -> bool:
    """Whether a process is gone, or goes within a minute."""
    for _ in range(600):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
