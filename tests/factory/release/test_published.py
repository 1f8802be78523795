"""What an index answers is compared, or refused: nothing is taken for absent by mistake."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory.errors import PackagingError, ReleaseError
from flashvar_factory.index import simple_json
from flashvar_factory.release import published

FILE, OTHER = "flashvar-1.0-py3-none-any.whl", "flashvar_sm80-1.0-py3-none-any.whl"
DIGEST = hashlib.sha256(b"bytes").hexdigest()
JSON = simple_json.CONTENT_TYPE


@contextmanager
def answering(status: int, kind: str, content: str, place: str = "") -> Iterator[str]:
    """An index that answers everything so, or sends to another place; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if place:
                self.send_header("Location", place)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


def page(*files: tuple[str, str]) -> str:
    rows = [{"filename": name, "hashes": {"sha256": digest}} for name, digest in files]
    return json.dumps({"meta": {"api-version": "1.1"}, "files": rows})


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name in (FILE, OTHER):
        (tmp_path / name).write_bytes(b"bytes")
    return [tmp_path / name for name in (FILE, OTHER)]


def absent(files: list[Path], status: int, kind: str, content: str) -> list[str]:
    with answering(status, kind, content) as address:
        return [path.name for path in published.absent(files, address)]


def test_a_project_that_is_not_known_has_nothing(files: list[Path]) -> None:
    assert absent(files, 404, "text/plain", "") == [FILE, OTHER]


@pytest.mark.parametrize("digest", [DIGEST, DIGEST.upper()])
def test_the_same_bytes_are_there(digest: str, files: list[Path]) -> None:
    assert absent(files[:1], 200, JSON, page((FILE, digest))) == []


def test_an_earlier_version_is_none(files: list[Path]) -> None:
    earlier = FILE.replace("1.0", "0.9")
    assert absent(files[:1], 200, JSON, page((earlier, "0" * 64))) == [FILE]


REFUSED = {
    "other bytes": (page((FILE, "0" * 64)), f"{FILE}: expected the SHA-256 {DIGEST}, found 0000"),
    "another file of the version": (
        page((FILE.replace("any", "linux_x86_64"), DIGEST)),
        "expected only the files of the release",
    ),
    "an sdist of the version": (page(("flashvar-1.0.tar.gz", DIGEST)), "found this too"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_there_and_differs(what: str, files: list[Path]) -> None:
    content, words = REFUSED[what]
    with pytest.raises(ReleaseError, match="release this as another version") as caught:
        absent(files[:1], 200, JSON, content)
    assert words in str(caught.value)


UNREADABLE = {
    "error": (500, JSON, "", "status 500"),
    "refusal": (403, JSON, page(), "status 403"),
    "HTML": (200, "text/html", "<a>", "3 bytes of text/html"),
    "no JSON": (200, JSON, "{", "no file list"),
    "no files": (200, JSON, "{}", "no file list"),
    "file without a hash": (
        200,
        JSON,
        json.dumps({"files": [{"filename": FILE, "hashes": {"md5": "0"}}]}),
        "no file list with hashes",
    ),
    "file name that is a number": (
        200,
        JSON,
        json.dumps({"files": [{"filename": 7, "hashes": {"sha256": "0" * 64}}]}),
        "the file name 7",
    ),
    "hash that is none": (200, JSON, page((FILE, "0")), "no file list with hashes"),
    "file with two hashes": (
        200,
        JSON,
        page((FILE, DIGEST), (FILE, "0" * 64)),
        "no file list with hashes",
    ),
    "key twice": (200, JSON, '{"files": [], "files": []}', "a key twice in one object"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_not_absent(what: str, files: list[Path]) -> None:
    status, kind, content, words = UNREADABLE[what]
    with pytest.raises(PackagingError, match="expected the JSON of the simple API") as caught:
        absent(files, status, kind, content)
    assert words in str(caught.value)


def test_an_index_that_sends_elsewhere(files: list[Path]) -> None:
    with (
        answering(404, JSON, "") as other,
        answering(302, JSON, "", other.replace("127.0.0.1", "localhost.")) as address,
        pytest.raises(PackagingError, match=r"a redirect to http://localhost\.:"),
    ):
        published.absent(files, address)


def test_an_index_that_is_not_there(files: list[Path]) -> None:
    with pytest.raises(PackagingError, match="try again"):
        published.absent(files, "http://127.0.0.1:1/simple")


def test_an_index_that_speaks_another_language(files: list[Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example.org\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PackagingError, match="expected the JSON of the simple API"):
            published.absent(files[:1], f"http://127.0.0.1:{server.getsockname()[1]}/simple")
        thread.join()


@pytest.mark.parametrize("address", ["http://example.org/simple", "file:///tmp", "pypi", ""])
def test_an_address_that_others_may_answer(address: str, files: list[Path]) -> None:
    with pytest.raises(ConfigurationError, match="expected an https:// address"):
        published.absent(files, address)
