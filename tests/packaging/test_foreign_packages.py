"""What the pages and commands say installs ours, where a foreign package of the name is newer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fake_wheels
import pytest
from documented import ROOT, blocks

from flashvar_factory import index
from flashvar_factory.cli import main
from flashvar_factory.index import serve
from flashvar_factory.inspect import archive

PIP = (sys.executable, "-m", "pip", "install", "--no-cache-dir")
UV = str(Path(sys.executable).with_name("uv"))
OURS, FOREIGN, LATER = "0.1.0", b"foreign = True\n", "99.0"


class World(NamedTuple):
    """An index of ours, a folder of ours, and everybody's index."""

    site: Path
    own: str
    dist: Path
    everybody: str

    def environment(self) -> dict[str, str]:
        """Everybody's index is the one that is configured."""
        names = ("PIP_", "UV_", "PYTHONPATH", "VIRTUAL_ENV")
        found = {key: value for key, value in os.environ.items() if not key.startswith(names)}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.everybody}
        return {**found, **pip, "UV_DEFAULT_INDEX": self.everybody, "UV_NO_CACHE": "1"}


def put(folder: Path, version: str, content: bytes) -> None:
    """The project's own wheel with an extra, and the binary that this names."""
    own = fake_wheels.put(
        folder, "flashvar", version, "py3-none-any", {"flashvar/__init__.py": content}
    )
    files = archive.read(own)
    metadata = f"flashvar-{version}.dist-info/METADATA"
    extra = (
        f"Provides-Extra: sm89\nRequires-Dist: flashvar-sm89=={version}; extra == 'sm89'\n"
        "Requires-Dist: torch\n"
    )
    files[metadata] += extra.encode()
    archive.write(own, files, f"flashvar-{version}.dist-info")
    tag = f"py3-none-{fake_wheels.PLATFORM}"
    fake_wheels.put(folder, "flashvar_sm89", version, tag, {"flashvar_sm89/__init__.py": content})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Everybody's index has torch, and foreign packages: of our version, and of a later one."""
    put(tmp_path / "dist", OURS, b"foreign = False\n")
    for version in (OURS, LATER):
        put(tmp_path / "everybody", version, FOREIGN)
    fake_wheels.put(tmp_path / "everybody", "torch", "2.13.0", "py3-none-any", {"torch.py": b""})
    index.write(tmp_path / "dist", tmp_path / "site")
    index.write(tmp_path / "everybody", tmp_path / "site-of-everybody")
    with (
        serve.serving(tmp_path / "site") as own,
        serve.serving(tmp_path / "site-of-everybody") as everybody,
    ):
        yield World(tmp_path / "site", own, tmp_path / "dist", everybody)


def run(world: World, *command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command,
        env=world.environment(),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def environment(world: World, tmp_path: Path) -> Path:
    """A fresh environment with torch, as the pages say; its Python."""
    run(world, UV, "venv", "--python", sys.executable, str(tmp_path / "env"))
    python = tmp_path / "env" / "bin" / "python"
    run(world, UV, "pip", "install", "--python", str(python), "torch")
    return python


def installed(python: Path) -> set[str]:
    """Whose packages are there."""
    names = ("flashvar", "flashvar_sm89")
    found = [next(python.parent.parent.glob(f"lib/*/site-packages/{name}")) for name in names]
    return {(folder / "__init__.py").read_text(encoding="utf-8").strip() for folder in found}


def into(python: Path) -> tuple[str, ...]:
    """pip, installing into that environment."""
    return (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-cache-dir")


def test_the_world_is_as_bad_as_it_can_be(world: World, environment: Path) -> None:
    words = ("--extra-index-url", world.own, "flashvar[sm89]")
    run(world, *into(environment), *words)
    assert installed(environment) == {"foreign = True"}


@pytest.mark.parametrize("way", ["folder", "index", "file"])
def test_pip_installs_ours(way: str, world: World, environment: Path) -> None:
    """The options of `install_commands.install`, of the pages, and of what `index` prints."""
    options = {
        "folder": ("--no-index", "--find-links", str(world.dist)),
        "index": ("--index-url", world.own),
        "file": ("--index-url", f"{world.site.as_uri()}/"),
    }
    run(world, *into(environment), *options[way], "flashvar[sm89]")
    assert installed(environment) == {"foreign = False"}


@pytest.mark.parametrize("way", ["index", "file"])
def test_uv_stays_with_the_first_index(way: str, world: World, environment: Path) -> None:
    address = world.own if way == "index" else f"{world.site.as_uri()}/"
    uv = (UV, "pip", "install", "--python", str(environment), "--index", address)
    run(world, *uv, "flashvar[sm89]")
    assert installed(environment) == {"foreign = False"}


def test_a_project_of_uv_has_ours(world: World, tmp_path: Path) -> None:
    (block,) = (
        one for one in blocks(ROOT / "docs" / "install.md") if "[tool.uv.sources]" in one.text
    )
    project = tmp_path / "project"
    project.mkdir()
    text = block.text.replace("https://example.org/flashvar/", world.own)
    (project / "pyproject.toml").write_text(text, encoding="utf-8")
    run(world, UV, "lock", "--python", sys.executable, cwd=project)
    locked = (project / "uv.lock").read_text(encoding="utf-8")
    assert f'version = "{LATER}"' not in locked
    assert locked.count(f'source = {{ registry = "{world.own.rstrip("/")}') == 2


def test_the_index_command_names_one_index(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "again"
    words = ["index", "--wheels", str(world.dist), "--output", str(output)]
    assert main(["--root", str(tmp_path), *words]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == f"pip install --index-url {output.as_uri()}/ ..."
