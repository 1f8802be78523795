"""A Python in which modules are loaded already: each program is a fork of one process.

    python forked.py SOCKET MODULE...       loads modules, and serves in the background: prints its
                                            number
    python -IS ask_forked.py SOCKET ...     runs `python ...` there, as far as anybody can see here

Such a program costs what it does itself, not the seconds that torch or transformers takes to load.
Of Python's own options it knows -c, -m, -u and -W. It is killed when the process that asked for it
ends, as by a timeout, and after two hours. Any signal to that process is thus SIGKILL to the
program.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import marshal
import os
import select
import signal
import socket
import sys
import threading
import weakref
from types import ModuleType
from typing import Any, TextIO

from ask_forked import LENGTH

_LIMIT = 7200  # seconds, longer than all tests take


def serve(address: str, modules: list[str]) -> None:
    """Run what is asked for, in the background; return in the forks alone."""
    for module in modules:
        importlib.import_module(module)
    inspect.getmodule(serve.__code__)  # the files of all modules: torch asks as an op is defined
    # The forks neither look for garbage in what is loaded nor copy the memory that this writes to.
    gc.collect()
    gc.freeze()
    for kept in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        kept.atexit = False  # torch has a thousand, of what no fork takes apart
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        listening.settimeout(_LIMIT)  # whoever started it may not be there to end it
        number = os.fork()
        if number:
            print(number, flush=True)
            os._exit(0)
        detach()
        while True:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                os._exit(0)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                break
            connection.close()
    with connection:
        length, streams, _, _ = socket.recv_fds(connection, LENGTH, 3)
        text = b""
        while len(text) < int.from_bytes(length, "big"):
            text += connection.recv(1 << 16)
        child = os.fork()
        if child:
            for stream in streams:
                os.close(stream)
            watch(connection, child)
    try:
        program(marshal.loads(text), streams)
        code: Any = 0
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


def detach() -> None:
    """Leave the output to the process that started this one: somebody waits for its end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def watch(connection: socket.socket, child: int) -> None:
    """Answer with the exit code of the program; kill it if it takes too long or nobody waits."""
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection], [], [], _LIMIT)
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def program(asked: dict[str, Any], streams: list[int]) -> None:
    """Be `python` with these words."""
    import runpy
    import warnings

    for number, given in enumerate(streams):
        os.dup2(given, number)
        os.close(given)
    # The first entry was that of this file; others came from the variables of the server.
    own = set(map(os.path.abspath, path_of_environment()))
    found = [folder for folder in sys.path[1:] if os.path.abspath(folder) not in own]  # noqa: PTH100
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    words = list(asked["words"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while words[0] in ("-W", "-u"):
        if words.pop(0) == "-u":
            unbuffered = True
            continue
        action, _, category = words.pop(0).partition("::")
        kind = getattr(__import__("builtins"), category or "Warning")
        warnings.simplefilter(action, kind)  # type: ignore[arg-type]
    sys.stdout, sys.stderr = opened(sys.stdout, unbuffered), opened(sys.stderr, unbuffered)
    sys.path[:] = ["", *path_of_environment(), *found]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # noqa: PTH100, PTH120
        runpy.run_path(words[0], run_name="__main__")


def opened(stream: TextIO, unbuffered: bool) -> TextIO:
    """The same once more: whether the server's own is buffered was decided as that started."""
    raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=raw.isatty() or stream is sys.stderr,
        write_through=unbuffered,
    )


def path_of_environment() -> list[str]:
    """The folders of PYTHONPATH."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def leave(code: int | None) -> None:
    """End as Python does, but for taking every module apart, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((code or 0) & 0xFF)
    sys.exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
