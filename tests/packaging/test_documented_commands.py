"""The documentation's commands that compile run as they are written, in a sample of the project.

PyPI is an index of what this environment has, except for what needs a network. Sessions of nox find
their environments made, as in any second run, and compile what an earlier run of these tests did
not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import environment_index
import fake_driver
import loaded_noxfile
import pytest
import second_project
from checkout import alone
from documented import Block, blocks, pages, shown_after
from shell import Shell, commands, unnoticed

from flashvar_factory.build import cmake
from flashvar_factory.toolchain import environment

UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
# Sessions, and the groups that they install.
SESSIONS = {
    "audit": "audit",
    "foreign-wheels": "foreign",
    "tests": "test",
    "variants": "build",
    "wheels": "build",
}
# Misspellings of this run.
TRIED: set[str] = set()
GPUS = [("NVIDIA GeForce RTX 4090", 8, 9)]


def selected(page: Path, need: str) -> list[Block]:
    """The blocks of a page that run here, and need this."""
    return [one for one in blocks(page) if one.language == "sh" and one.needs == need]


def chains() -> list[tuple[Block, ...]]:
    """What runs in one environment each; what several pages say runs once, in the longest.

    Not the block that test_second_project.py types, whose wheels take half a minute.
    """
    found: list[tuple[Block, ...]] = []
    for page in pages():
        for need in ("toolkit", "network"):
            for block in selected(page, need):
                if block == second_project.typed():
                    continue
                if block.mark("continued") is None:
                    found.append((block,))
                else:
                    found[-1] = (*found[-1], block)
    kept: list[tuple[Block, ...]] = []
    for chain in sorted(found, key=lambda one: -len(done_before(one) + typed(one))):
        if not any(is_said_by(chain, other) for other in kept):
            kept.append(chain)
    return [chain for chain in found if chain in kept]


def typed(chain: tuple[Block, ...]) -> list[str]:
    """The commands of a chain, in their order."""
    return [command for block in chain for command in commands(block.text)]


def done_before(chain: tuple[Block, ...]) -> list[str]:
    """What a reader of its first block did before."""
    return commands(chain[0].mark("given") or "")


def is_said_by(chain: tuple[Block, ...], other: tuple[Block, ...]) -> bool:
    """Whether another chain begins with the commands of one, and shows no less of their output."""
    begins, goes_on = done_before(chain) + typed(chain), done_before(other) + typed(other)
    prints = [block.mark("prints") or "" for block in other]
    return (
        goes_on[: len(begins)] == begins
        and len(done_before(other)) <= len(done_before(chain))
        and all(any((block.mark("prints") or "") in said for said in prints) for block in chain)
        and not any(block.mark("exits") or shown_after(block) for block in chain)
        and not any(block.mark("given") for block in chain[1:])
    )


@pytest.fixture(scope="module")
def pypi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the index that stands for PyPI."""
    return environment_index.write(tmp_path_factory.mktemp("pypi"), ("cuda-toolkit", "13.0.2"))


@pytest.fixture(scope="module")
def checkout(sample: Path) -> Iterator[Path]:
    """The sample, in which no wheel is made yet, with environments of its sessions."""
    noxfile = loaded_noxfile.load(sample / "noxfile.py")
    with alone(sample):
        shutil.rmtree(sample / "dist", ignore_errors=True)
        shutil.rmtree(sample / "factory-wheel", ignore_errors=True)
        for name, group in SESSIONS.items():
            folder = sample / ".nox" / name
            make_environment(folder)
            # This Python by its own path, which commands of the compiler have in them.
            put_script(folder / "bin" / "python", f'exec "{sys.executable}" "$@"')
            _, pins = noxfile.pinned(group)
            (folder / environment.STAMP).write_text("\n".join(pins), encoding="utf-8")
        yield sample


def make_environment(folder: Path) -> None:
    """A virtual environment without pip."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [UV, "venv", "--quiet", "--no-config", "--python", sys.executable, str(folder)]
    subprocess.run(command, check=True)


def put_script(path: Path, line: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


def user(folder: Path, pypi: str | None) -> dict[str, str]:
    """The variables of a user in a new environment, beside pip and uv, with a GPU's driver.

    Without an address of an index, pip and uv have those of this machine, and its settings.
    """
    make_environment(folder / "env")
    commands = folder / "env" / "bin"
    python = commands / "python"
    put_script(commands / "pip", f'exec "{sys.executable}" -m pip --python "{python}" "$@"')
    (commands / "uv").symlink_to(UV)
    # pip finds the packages of this environment installed, and so does not bring their programs.
    for name in ("cmake", "ninja"):
        (commands / name).symlink_to(cmake.tool(name))
    driver = fake_driver.put(folder / "driver", (13, 0), GPUS)
    names = ("FLASHVAR_", "NOX", "PYTEST", "PYTHONPATH", "VIRTUAL_ENV")
    names += ("PIP_", "UV_") if pypi else ()
    index = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": pypi, "UV_DEFAULT_INDEX": pypi}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    # Not the commands of this environment: what a page forgets to install is missing.
    others = [
        one for one in kept["PATH"].split(os.pathsep) if one and not (Path(one) / "nox").exists()
    ]
    return (kept | index if pypi else kept) | {
        "PATH": os.pathsep.join([str(commands), *others]),
        "VIRTUAL_ENV": str(folder / "env"),
        "LD_LIBRARY_PATH": str(driver),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",  # few of the installed modules are imported
        "UV_CACHE_DIR": str(folder / "uv-cache"),
        "NV_VARIANT_PROVIDER_FORCE_SM_ARCH": "8.9",
        "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION": "13.0",
    }


@pytest.mark.parametrize("chain", chains(), ids=lambda chain: str(chain[0]))
def test_commands_do_what_the_page_says(
    chain: tuple[Block, ...],
    checkout: Path,
    pypi: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    """Each, and no misspelling of it."""
    network = any(block.needs == "network" for block in chain)
    if network and not pytestconfig.getoption("--network"):
        pytest.skip("fetches sources from PyPI: --network runs it")
    shutil.rmtree(checkout / "vecadd", ignore_errors=True)
    shell = Shell(checkout, user(tmp_path, None if network else pypi), tmp_path / "state")
    every = pytestconfig.getoption("--misspell") == "every"
    for block in chain:
        if (given := block.mark("given")) is not None:
            code, output = shell.run(given)
            assert code == 0, output
        tried = set() if every else TRIED
        found = unnoticed(block, shell, shown_after(block), every=every, tried=tried)
        assert found == [], str(block)
