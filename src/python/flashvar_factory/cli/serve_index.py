"""Serve an index on this machine, as HTML and as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.index import serve


def configure(parser: argparse.ArgumentParser) -> None:
    """What to serve, and where."""
    parser.add_argument(
        "--site", type=Path, default=Path("build/index"), help="default: build/index"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")


def run(arguments: argparse.Namespace) -> None:
    """Serve until interrupted."""
    with serve.server(arguments.root / arguments.site, arguments.host, arguments.port) as server:
        address = f"http://{arguments.host}:{server.server_port}/"
        print(f"pip install --index-url {address} ...", flush=True)
        server.serve_forever()
