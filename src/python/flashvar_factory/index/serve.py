"""Serves an index on this machine: HTML, or JSON to clients that ask for it (PEP 691)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from flashvar_factory.errors import PackagingError
from flashvar_factory.index import PAGE, simple_json

HTML: Final = "text/html"
_POLL: Final = 0.02  # seconds until it notices that it is to stop
_HTML_V1: Final = "application/vnd.pypi.simple.v1+html"
_NAMES: Final = {
    simple_json.CONTENT_TYPE: simple_json.CONTENT_TYPE,
    "application/vnd.pypi.simple.latest+json": simple_json.CONTENT_TYPE,
    _HTML_V1: _HTML_V1,
    "application/vnd.pypi.simple.latest+html": _HTML_V1,
    HTML: HTML,
}


def negotiate(accept: str) -> str:
    """The content type for an Accept header: its best of JSON and HTML, HTML where it is silent."""
    best, found = 0.0, HTML
    for part in accept.split(","):
        name, *parameters = (word.strip() for word in part.split(";"))
        weight = next((word[2:] for word in parameters if word.startswith("q=")), "1")
        try:
            wanted = float(weight)
        except ValueError:
            wanted = 0.0
        if name in _NAMES and wanted > best:
            best, found = wanted, _NAMES[name]
    return found


def server(
    site: Path, host: str = "127.0.0.1", port: int = 0, *, quiet: bool = False
) -> ThreadingHTTPServer:
    """A server of `site`, listening; call its serve_forever. Port 0 takes a free one.

    Each request is a line on stderr, unless it is to be `quiet`.
    """
    if not (site / PAGE).is_file():
        raise PackagingError(f"{site}: expected an index, found none; run the command index first")
    try:
        handler = _Silent if quiet else _Handler
        return ThreadingHTTPServer((host, port), partial(handler, directory=str(site)))
    except OSError as error:
        raise PackagingError(
            f"expected to listen on port {port} of {host}, found: {error.strerror}; name another "
            "--port (0 takes a free one), or a --host of this machine"
        ) from error


@contextmanager
def serving(site: Path) -> Iterator[str]:
    """Serve `site` on a free port of this machine meanwhile, and silently; its address."""
    with server(site, quiet=True) as here:
        thread = threading.Thread(target=here.serve_forever, args=(_POLL,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{here.server_port}/"
        finally:
            here.shutdown()
            thread.join()


class _Handler(SimpleHTTPRequestHandler):
    """A page's content type follows from what was asked for."""

    def send_head(self) -> Any:
        """The page itself, in the form that was asked for."""
        self.wanted = negotiate(self.headers.get("Accept", ""))
        address, question, query = self.path.partition("?")
        if address.endswith("/") and self.wanted == simple_json.CONTENT_TYPE:
            self.path = f"{address}{simple_json.FILE_NAME}{question}{query}"
        return super().send_head()

    def guess_type(self, path: Any) -> str:
        """The content types of the simple API, the usual ones for other files."""
        name = Path(path).name
        if name == simple_json.FILE_NAME:
            return simple_json.CONTENT_TYPE
        return self.wanted if name == PAGE else super().guess_type(path)

    def end_headers(self) -> None:
        """Caches must keep the forms apart."""
        self.send_header("Vary", "Accept")
        super().end_headers()


class _Silent(_Handler):
    """Says nothing of requests."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
