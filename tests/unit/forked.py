"""A Python in which torch is loaded already: each program is a fork of one process.

    python forked.py SOCKET             loads torch, says so, and serves
    python -IS forked.py SOCKET ask ... runs `python ...` there, as far as anybody can see here

Such a program costs what it does itself, not the seconds that torch takes to load. Of Python's own
options it knows -c, -m and -W.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any


def ask(address: str, words: list[str]) -> int:
    """Have the words run with this process' folder, variables and streams; the exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        here = os.getcwd()  # noqa: PTH109 (pathlib takes longer than all of this)
        text = json.dumps({"words": words, "cwd": here, "environ": dict(os.environ)})
        socket.send_fds(connection, [b"\0"], [0, 1, 2])
        connection.sendall(text.encode())
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(16) or b"255")


def serve(address: str) -> None:
    """Run what is asked for until the end of this process; return in the forks alone."""
    import torch  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                break
            connection.close()
    with connection:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        asked = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            connection.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
            os._exit(0)
    program(asked, streams)


def program(asked: dict[str, Any], streams: list[int]) -> None:
    """Be `python` with these words."""
    import runpy
    import warnings

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    words = list(asked["words"])
    while words[0] == "-W":
        action, _, category = words[1].partition("::")
        kind = getattr(__import__("builtins"), category or "Warning")
        warnings.simplefilter(action, kind)  # type: ignore[arg-type]
        del words[:2]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = ["", *filter(None, path)]  # its first entry was that of this file
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # noqa: PTH100, PTH120
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[2:3] == ["ask"]:
        sys.exit(ask(sys.argv[1], sys.argv[3:]))
    serve(sys.argv[1])
