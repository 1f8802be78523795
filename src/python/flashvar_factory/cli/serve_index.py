"""Serve an index on this machine, as HTML and as JSON."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Final

from flashvar_factory.index import serve

_LAST_PORT: Final = 65535


def configure(parser: argparse.ArgumentParser) -> None:
    """What to serve, and where."""
    parser.add_argument(
        "--site",
        type=Path,
        default=Path("build/index"),
        help="folder of the index (default: build/index)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=_port, default=8000, help="0 takes a free one (default: 8000)"
    )


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"expected 0 to {_LAST_PORT}, found {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    """Serve until interrupted."""
    with serve.server(arguments.root / arguments.site, arguments.host, arguments.port) as server:
        address = f"http://{arguments.host}:{server.server_port}/"
        print(f"pip install --index-url {address} ...", flush=True)
        server.serve_forever()
