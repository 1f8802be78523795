"""Run `python ...` as a fork of the process behind a socket, as far as anybody can see here.

    python -IS ask_forked.py SOCKET ...

The other half of forked.py. It imports next to nothing: most of what such a program took was this.
"""

import _socket
import marshal
import os
import sys

LENGTH = 8  # bytes, of the length of a request


def ask(address: str, words: list[str]) -> int:
    """Have the words run with this process' folder, variables and streams; the exit code.

    A program that a signal ended ends this process likewise.
    """
    connection = _socket.socket(_socket.AF_UNIX)
    connection.connect(address)
    here = os.getcwd()  # noqa: PTH109 (pathlib takes longer than all of this)
    text = marshal.dumps({"words": words, "cwd": here, "environ": dict(os.environ)})
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)
    connection.sendmsg([len(text).to_bytes(LENGTH, "big")], [rights])
    connection.sendall(text)
    # The end of this process closes the connection, which ends the program.
    code = int(connection.recv(16) or b"255")
    if code < 0:
        import signal

        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
