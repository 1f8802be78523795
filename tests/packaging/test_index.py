"""pip and uv install from the index: over HTTP, from our server and a static one, and as files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import fake_wheels
import pytest

from flashvar_factory import index
from flashvar_factory.index import serve
from flashvar_factory.inspect import archive

PIP = (sys.executable, "-m", "pip", "--isolated", "install", "--no-cache-dir")
UV = (str(Path(sys.executable).with_name("uv")), "pip", "install", "--no-config", "--no-cache")

every_installer = pytest.mark.parametrize("installer", [PIP, UV], ids=["pip", "uv"])
every_way = pytest.mark.parametrize("way", ["http", "static", "file"])


class Site(NamedTuple):
    """An index on disk, where it is to be had, and what the server was asked for."""

    folder: Path
    addresses: dict[str, str]
    asked: list[str]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Three versions of a project, the newest withdrawn."""
    for version in ("1.0", "1.1", "1.2"):
        fake_wheels.plain(tmp_path / "dist", version)
    yanked = tmp_path / "yanked.toml"
    yanked.write_text('[flashvar]\n"1.2" = "wrong for long rows"\n', encoding="utf-8")
    folder = tmp_path / "site"
    index.write(tmp_path / "dist", folder, yanked=yanked)
    asked: list[str] = []
    monkeypatch.setattr(
        SimpleHTTPRequestHandler, "log_message", lambda self, *_: asked.append(self.path)
    )
    static = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with (
        serving(serve.server(folder)) as http,
        serving(ThreadingHTTPServer(("127.0.0.1", 0), static)) as html,
    ):
        yield Site(folder, {"http": http, "static": html, "file": f"{folder.as_uri()}/"}, asked)


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """Its address, for as long as it answers."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def install(
    installer: tuple[str, ...], address: str, folder: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    names = ("PIP_", "UV_", "PYTHONPATH", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if installer is UV:
        words = ("--python", sys.executable, *words)
    command = [*installer, "--index-url", address, "--target", str(folder), *words]
    return subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def installed(folder: Path) -> str:
    """The version that is there."""
    (info,) = folder.glob("flashvar-*.dist-info")
    return info.name.removeprefix("flashvar-").removesuffix(".dist-info")


@every_installer
@every_way
@pytest.mark.parametrize(
    ("wanted", "version"),
    [("flashvar", "1.1"), ("flashvar<1.1", "1.0"), ("flashvar==1.2", "1.2")],
    ids=["newest", "older", "yanked-by-name"],
)
def test_version(
    wanted: str, version: str, way: str, installer: tuple[str, ...], site: Site, tmp_path: Path
) -> None:
    done = install(installer, site.addresses[way], tmp_path / "to", wanted)
    assert done.returncode == 0, done.stdout
    assert installed(tmp_path / "to") == version
    assert ("wrong for long rows" in done.stdout) == (version == "1.2")


@every_installer
@every_way
def test_corrupted_file_is_refused_by_its_hash(
    way: str, installer: tuple[str, ...], site: Site, tmp_path: Path
) -> None:
    wheel = site.folder / "flashvar" / "flashvar-1.1-py3-none-any.whl"
    files = {**archive.read(wheel), "flashvar/__init__.py": b"__version__ = 'planted'\n"}
    archive.write(wheel, files, "flashvar-1.1.dist-info")  # whole, but not what was published
    done = install(installer, site.addresses[way], tmp_path / "to", "flashvar")
    assert done.returncode != 0
    assert "hash" in done.stdout.lower()
    assert not (tmp_path / "to" / "flashvar").exists()


@every_installer
def test_json_is_what_they_ask_for(installer: tuple[str, ...], site: Site, tmp_path: Path) -> None:
    (site.folder / "flashvar" / "index.html").unlink()
    done = install(installer, site.addresses["http"], tmp_path / "to", "flashvar")
    assert done.returncode == 0, done.stdout


@every_installer
def test_metadata_is_read_before_the_wheel(
    installer: tuple[str, ...], site: Site, tmp_path: Path
) -> None:
    done = install(installer, site.addresses["http"], tmp_path / "to", "flashvar")
    assert done.returncode == 0, done.stdout
    wheel = "/flashvar/flashvar-1.1-py3-none-any.whl"
    assert [path for path in site.asked if path.startswith(wheel)] == [f"{wheel}.metadata", wheel]
    assert not any("1.0" in path or "1.2" in path for path in site.asked)
