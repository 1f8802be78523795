"""Run Python files, each in a fork of this process, which has loaded torch.

    python forked.py FILE...

prints one JSON object, file -> its exit code and what it printed. A file runs as a program does, in
its own folder; the seconds that torch takes to load are spent once.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401


def run(file: Path) -> tuple[int, str]:
    """The exit code of a file, and its output."""
    log = file.with_suffix(".log")
    child = os.fork()
    if child == 0:
        os._exit(_program(file, log))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(encoding="utf-8")


def _program(file: Path, log: Path) -> int:
    os.chdir(file.parent)
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv, sys.path[0] = [file.name], str(file.parent)
    try:
        runpy.run_path(str(file), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    json.dump({name: run(Path(name)) for name in sys.argv[1:]}, sys.stdout)
