"""What the documentation says can be typed: its Python runs, and so do its commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from documented import PROGRAMS, ROOT, Block, blocks, pages, program, why_not_run

from flashvar import cli
from flashvar_factory.config import schema, selection_arguments

EVERY = [block for page in pages() for block in blocks(page)]
SHELL = [block for block in EVERY if block.language == "sh"]
WITH_PYTHON = [page for page in pages() if program(page, on_gpu=False)]


def ids(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def run(command: list[str], folder: Path, bin_folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FLASHVAR_")}
    environ |= {
        "PATH": f"{bin_folder}:{environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src' / 'python'}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def bin_folder(python_with_models: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python` and `flashvar` as after an installation."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in (("python", ""), ("flashvar", " -m flashvar")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{python_with_models}"{arguments} "$@"\n')
        script.chmod(0o755)
    return folder


def test_there_is_something_to_run() -> None:
    assert {block.language for block in EVERY} >= set(PROGRAMS)
    assert len(WITH_PYTHON) > 3
    assert any(block.mark("by") is None for block in SHELL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nls\n```\n", "expected a language"),
        ("```bash\nls\n```\n", "expected a language"),
        ("```python slow\n1\n```\n", "expected marks of"),
        ("```toml gpu\n```\n", "expected marks of"),
        ("```sh\nls\n", "expected the end"),
    ],
)
def test_a_block_says_what_it_is(text: str, said: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        blocks(page)


@pytest.mark.parametrize(
    "by",
    ["", "no/such.file", ".ci/run", "tests/packaging/test_install.py::test_that_is_not_there"],
)
def test_somebody_runs_it(by: str) -> None:
    block = Block(ROOT / "README.md", 1, "sh", (("by", by),), "nox -s wheels -- all\n")
    assert why_not_run(block) is not None


@pytest.mark.parametrize("page", pages(), ids=ids)
def test_python_for_a_gpu_can_be_read(page: Path) -> None:
    compile(program(page, on_gpu=True), page.name, "exec")


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=ids)
def test_links_of_the_root_lead_somewhere(page: Path) -> None:
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert linked == [name for name in linked if (ROOT / name).is_file()]


def test_every_variable_is_documented() -> None:
    sources = (ROOT / "src" / "python" / "flashvar").rglob("*.py")
    texts = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    read = set(re.findall(r"""["'](FLASHVAR_[A-Z_]+)["']""", texts))
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(FLASHVAR_[A-Z_]+)`", page, re.MULTILINE))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=ids)
def test_python_of_a_page(page: Path, tmp_path: Path, bin_folder: Path) -> None:
    file = tmp_path / page.name
    file.write_text(program(page, on_gpu=False), encoding="utf-8")
    # What other packages deprecate among themselves is no fault of the page.
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    done = run(["python", *warnings, file.name], tmp_path, bin_folder)
    assert done.returncode == 0, done.stdout


# What several pages say runs once.
HERE = {(b.text, b.marks): b for b in reversed(SHELL) if b.mark("by") is None}


@pytest.mark.parametrize("block", HERE.values(), ids=ids)
def test_commands_that_run_here(block: Block, tmp_path: Path, bin_folder: Path) -> None:
    (tmp_path / "variants.toml").symlink_to(ROOT / "variants.toml")
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    right = [int(code) for code in (block.mark("exits") or "0").split(",")]
    done = run(["bash", "-euc", block.text], tmp_path, bin_folder)
    assert done.returncode in right, done.stdout


@pytest.mark.parametrize("block", [one for one in SHELL if one.mark("by") is not None], ids=ids)
def test_commands_that_run_elsewhere(block: Block) -> None:
    assert why_not_run(block) is None


_BUILDS = re.compile(r"nox -s (?:build-dev|wheels|release|reproduce|cibuildwheel) -- ([\w=.,/ -]+)")
# What follows `--` of a session that builds, with the page that says it first.
SELECTIONS = {
    tuple(word.rstrip(".,") for word in said.split() if not word.startswith("-")): page
    for page in reversed(pages())
    for said in _BUILDS.findall(page.read_text(encoding="utf-8"))
}


def test_the_pages_select() -> None:
    assert len(SELECTIONS) > 3


@pytest.mark.parametrize("words", SELECTIONS, ids=" ".join)
def test_words_of_a_selection(words: tuple[str, ...]) -> None:
    """The factory understands them, and they change what is built."""
    config = schema.read(ROOT / schema.FILE_NAME)
    found = selection_arguments.parse(words, config)
    assert found != selection_arguments.parse((), config)


@pytest.mark.parametrize("page", pages(), ids=ids)
def test_commands_of_flashvar_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text(encoding="utf-8")
    typed = "\n".join(block.text for block in blocks(page) if block.language == "sh")
    named = re.findall(r"`flashvar ([a-z]+)", text) + re.findall(r"^flashvar (\w+)", typed, re.M)
    for command in sorted(set(named)):
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([command, "--help"])
        assert f"flashvar {command}" in capsys.readouterr().out
