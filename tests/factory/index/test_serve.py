"""The development server: HTML for browsers, JSON for who asks for it."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.client import HTTPMessage
from pathlib import Path

import fake_wheels
import pytest

from flashvar_factory import index
from flashvar_factory.cli import main
from flashvar_factory.errors import PackagingError
from flashvar_factory.index import serve

JSON = "application/vnd.pypi.simple.v1+json"
HTML_V1 = "application/vnd.pypi.simple.v1+html"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/html"),
        ("*/*", "text/html"),
        ("text/html,application/xhtml+xml;q=0.9", "text/html"),
        (f"{JSON}, {HTML_V1}; q=0.1, text/html; q=0.01", JSON),
        (f"{JSON};q=0.2, {HTML_V1};q=0.2, text/html;q=0.01", JSON),
        (f"text/html, {JSON};q=0.5", "text/html"),
        ("application/vnd.pypi.simple.latest+json", JSON),
        (HTML_V1, HTML_V1),
        (f"{JSON};q=much", "text/html"),
        (f"{JSON};q=0", "text/html"),
    ],
)
def test_negotiation(accept: str, expected: str) -> None:
    assert serve.negotiate(accept) == expected


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where an index is served."""
    monkeypatch.setattr(serve.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    index.write(fake_wheels.plain(tmp_path / "dist").parent, tmp_path / "site")
    with serve.server(tmp_path / "site") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def get(address: str, accept: str) -> tuple[HTTPMessage, bytes]:
    request = urllib.request.Request(address, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers, answer.read()


@pytest.mark.parametrize("page", ["", "flashvar/", "flashvar/?again", "flashvar"])
@pytest.mark.parametrize("wanted", [JSON, HTML_V1, "text/html"])
def test_content_type(page: str, wanted: str, address: str) -> None:
    headers, content = get(address + page, wanted)
    assert headers["Content-Type"] == wanted
    assert headers["Vary"] == "Accept"
    if wanted == JSON:
        assert json.loads(content)["meta"] == {"api-version": "1.1"}
    else:
        assert content.startswith(b"<!DOCTYPE html>")


def test_files(address: str, tmp_path: Path) -> None:
    name = "flashvar-0.1.0-py3-none-any.whl"
    _, content = get(f"{address}flashvar/{name}", "*/*")
    assert content == (tmp_path / "dist" / name).read_bytes()
    _, metadata = get(f"{address}flashvar/{name}.metadata", "*/*")
    assert b"Name: flashvar\n" in metadata


def test_no_index(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match="expected an index, found none"):
        serve.server(tmp_path)


def test_port_in_use(tmp_path: Path) -> None:
    index.write(fake_wheels.plain(tmp_path / "dist").parent, tmp_path / "site")
    with (
        serve.server(tmp_path / "site") as first,
        pytest.raises(PackagingError, match=f"expected to listen on port {first.server_port}"),
    ):
        serve.server(tmp_path / "site", port=first.server_port)


@pytest.mark.parametrize("port", ["99999", "-1", "x", "²"])
def test_what_is_no_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["serve", f"--port={port}"])
    assert refused.value.code == 2
    assert f"expected 0 to 65535, found {port!r}" in capsys.readouterr().err
