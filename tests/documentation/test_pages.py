"""What the documentation says can be typed: its Python runs, and so do its commands."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest
from documented import PROGRAMS, ROOT, Block, blocks, pages, program, shown_after
from shell import Shell, commands, mutants, shows, unnoticed, why_not_of_ci, why_wrong

import flashvar
from flashvar import cli, layers
from flashvar_factory.config import schema, selection_arguments

EVERY = [block for page in pages() for block in blocks(page)]
SHELL = [block for block in EVERY if block.language == "sh"]
WITH_PYTHON = [page for page in pages() if program(page, on_gpu=False)]


def ids(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def environment(bin_folder: Path) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FLASHVAR_")}
    return environ | {
        "PATH": f"{bin_folder}:{environ['PATH']}",
        "PYTHONPATH": f"{bin_folder / 'site'}",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(command: list[str], folder: Path, bin_folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(bin_folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def bin_folder(python_with_models: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python` and `flashvar` as after an installation, which has no factory."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "site").mkdir()
    (folder / "site" / "flashvar").symlink_to(ROOT / "src" / "python" / "flashvar")
    for name, arguments in (("python", ""), ("flashvar", " -m flashvar")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{python_with_models}"{arguments} "$@"\n')
        script.chmod(0o755)
    return folder


def test_there_is_something_to_run() -> None:
    assert {block.language for block in EVERY} >= set(PROGRAMS)
    assert len(WITH_PYTHON) > 3
    assert HERE


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


@pytest.mark.parametrize("page", pages(), ids=ids)
def test_python_for_a_gpu_can_be_read(page: Path) -> None:
    compile(program(page, on_gpu=True), page.name, "exec")


def calls_that_do_not_fit(text: str) -> Iterator[str]:
    """Calls of flashvar's functions by names or with arguments that they do not have."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("flashvar."):
            continue
        try:
            function = attrgetter(ast.unparse(call.func).partition(".")[2])(flashvar)
            named = {one.arg: one.value for one in call.keywords if one.arg is not None}
            inspect.signature(function).bind(*call.args, **named)
        except (AttributeError, TypeError) as error:
            yield f"{ast.unparse(call)}: {error}"


@pytest.mark.parametrize("page", [page for page in pages() if program(page, on_gpu=True)], ids=ids)
def test_calls_of_flashvar_fit_its_functions(page: Path) -> None:
    """Also those for a GPU, which is not here."""
    gpu = [block for block in blocks(page) if block.language == "python" and block.needs]
    assert [wrong for block in gpu for wrong in calls_that_do_not_fit(block.text)] == []


@pytest.mark.parametrize(
    "call", ["attend(q, k, v)", "attention(q)", "attention(q, k, v, casual=1)"]
)
def test_a_call_that_does_not_fit_is_found(call: str) -> None:
    assert list(calls_that_do_not_fit(f"flashvar.{call}")) != []
    assert list(calls_that_do_not_fit("flashvar.attention(q, k, v, causal=True)")) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=ids)
def test_links_of_the_root_lead_somewhere(page: Path) -> None:
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert linked == [name for name in linked if (ROOT / name).is_file()]


def test_what_the_reference_says_of_layers_is_imported_from_one_place() -> None:
    page = (ROOT / "docs" / "api" / "linear-attention.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: flashvar\.layers\.\w+\.(\w+)", page, re.MULTILINE)
    (members,) = re.findall(
        r"^::: flashvar\.layers\.norms\n.*members: \[(.+?)\]", page, re.MULTILINE
    )
    assert {*listed, *members.split(", ")} == set(layers.__all__)


def test_the_signatures_of_readme_are_those_of_the_functions() -> None:
    (block,) = [one.text for one in blocks(ROOT / "README.md") if one.language == "text"]
    shown = re.sub(r"\s+", " ", block.replace('"', "'")).replace("( ", "(")
    bare = inspect.Parameter.empty
    for name in ("attention", "attention_varlen"):
        signature = inspect.signature(getattr(flashvar, name))
        plain = [one.replace(annotation=bare) for one in signature.parameters.values()]
        assert f"{name}{inspect.Signature(plain)}" in shown


def test_files_of_tests_are_there() -> None:
    """Those that sentences name; a pattern or a placeholder is no file."""
    named = re.compile(r"(?<![\w/])tests/(?:unit|kernels|packaging|gpu)/[\w/]+\.py")
    found = {(path, page) for page in pages() for path in named.findall(page.read_text("utf-8"))}
    assert found
    assert [f"{page.name}: {path}" for path, page in found if not (ROOT / path).is_file()] == []


def test_what_commands_leave_in_a_checkout_is_ignored() -> None:
    """Else the sdist of the checkout holds it, `lint` checks it, and wheels say "with changes"."""
    written = re.compile(r"--outdir (\S+)|wheel-factory init (\w+)")
    left = {"".join(names) for block in SHELL for names in written.findall(block.text)}
    assert left == {"factory-wheel", "vecadd"}
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert [name for name in left if f"/{name}/" not in ignored] == []


def test_every_variable_is_documented() -> None:
    sources = (ROOT / "src" / "python" / "flashvar").rglob("*.py")
    texts = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    read = set(re.findall(r"""["'](FLASHVAR_[A-Z_]+)["']""", texts))
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(FLASHVAR_[A-Z_]+)`", page, re.MULTILINE))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=ids)
def test_python_of_a_page(page: Path, tmp_path: Path, bin_folder: Path) -> None:
    text = program(page, on_gpu=False)
    if "import matplotlib" in text and find_spec("matplotlib") is None:
        pytest.skip("expected matplotlib for the page's picture, found none for this Python")
    file = tmp_path / page.name
    file.write_text(text, encoding="utf-8")
    # What other packages deprecate among themselves is no fault of the page.
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    done = run(["python", *warnings, file.name], tmp_path, bin_folder)
    assert done.returncode == 0, done.stdout


# What several pages say runs once. What needs a GPU runs here too, if it says what comes without.
HERE = {
    (b.text, b.marks): b
    for b in reversed(SHELL)
    if b.mark("by") is None and b.needs in (None, "gpu")
}
BY_CI = [block for block in SHELL if block.mark("by") is not None]


@pytest.fixture
def shell(tmp_path: Path, bin_folder: Path) -> Shell:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("variants.toml", "src", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return Shell(folder, environment(bin_folder), tmp_path / "state")


def without_gpu(block: Block) -> Block:
    """The block as it is to end and print on a machine without a GPU."""
    said = block.mark("without")
    return block if said is None else replace(block, marks=(("exits", "1"), ("prints", said)))


# Runs a file up to where it has read its arguments.
PARSED = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
argparse.ArgumentParser.parse_args = lambda parser: sys.exit(parse(parser) is None)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("block", HERE.values(), ids=ids)
def test_commands_do_what_the_page_says(
    block: Block, shell: Shell, pytestconfig: pytest.Config
) -> None:
    """Each, and no misspelling of it; where it cannot run without a GPU, the misspellings."""
    every = pytestconfig.getoption("--misspell") == "every"
    if block.needs == "gpu" and block.mark("without") is None:
        typed = [list(mutants(command)) for command in commands(block.text)]
        wrong = [one for found in typed for one in (found if every else found[:1])]
        assert [one for one in wrong if shell.run(one)[0] == 0] == []
        for command in commands(block.text):
            python, *words = shlex.split(command)
            code, output = shell.run(shlex.join([python, "-c", PARSED, *words]))
            assert code == 0, output
        return
    one, shown = without_gpu(block), "" if block.needs else shown_after(block)
    assert unnoticed(one, shell, shown, every=every) == []


@pytest.mark.parametrize("block", BY_CI, ids=ids)
def test_commands_that_ci_runs_are_there_as_they_are(block: Block) -> None:
    assert why_not_of_ci(block.text, block.mark("by") or "") is None
    typed = [mutant for command in commands(block.text) for mutant in mutants(command)]
    assert [one for one in typed if why_not_of_ci(one, block.mark("by") or "") is None] == []


def test_the_factorys_readme_types_what_a_page_types() -> None:
    """Its page on an index. In a checkout the installation and the option --factory differ."""
    (block,) = blocks(ROOT / "packages" / "factory" / "README.md")
    (page, *_) = blocks(ROOT / "docs" / "other-kernels.md")
    assert page.needs == "toolkit"
    first, *others = commands(block.text)
    assert first == "pip install flashvar-factory nox"
    in_a_checkout = page.text.replace(" --factory factory-wheel/*.whl", "")
    assert others == commands(in_a_checkout)[-len(others) :]


def test_only_suites_are_left_to_ci() -> None:
    """A test cannot run the suite that it is in, nor build what the GPU tests run on."""
    sessions = {one.split()[2] for block in BY_CI for one in commands(block.text)}
    assert sessions <= {"build-dev", "tests", "gpu", "bench", "draw", "examples"}


BLOCK = Block(ROOT / "README.md", 1, "sh", (("prints", "a ... c"),), "X=a\necho $X && echo c\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo a && echo c", None),
        ("echo a && false && echo c", "expected exit code"),
        ("echo c && echo a", "expected it to print"),
        ("X=a; export X\ncd ..\necho $X-$OLDPWD c", None),
    ],
)
def test_a_block_is_judged(text: str, words: str | None, tmp_path: Path) -> None:
    shell = Shell(tmp_path, os.environ, tmp_path / "state")
    found = why_wrong(replace(BLOCK, text=text), shell)
    assert (found is None) if words is None else (found is not None and words in found)


def test_a_misspelling_that_nothing_notices_is_found(tmp_path: Path) -> None:
    shell = Shell(tmp_path, os.environ, tmp_path / "state")
    block = replace(BLOCK, text="true && echo a b c")
    found = unnoticed(block, shell, every=True)
    assert found == ["echo a b czq", "echo a bzq c", "echo azq b c"]
    assert unnoticed(block, shell) == found[:1]


def test_a_misspelling_is_tried_once_unless_it_is_of_the_last_command(tmp_path: Path) -> None:
    shell, tried = Shell(tmp_path, os.environ, tmp_path / "state"), set[str]()
    block = replace(BLOCK, text="true a && echo a b c")
    assert unnoticed(block, shell, tried=tried) == ["true azq", "echo a b czq"]
    assert unnoticed(block, shell, tried=tried) == ["echo a b czq"]
    assert unnoticed(block, shell) == ["true azq", "echo a b czq"]


def test_a_block_that_prints_something_else_is_found(tmp_path: Path) -> None:
    shell = Shell(tmp_path, os.environ, tmp_path / "state")
    with pytest.raises(AssertionError, match=r"^expected it to print\na \.\.\. c\n"):
        unnoticed(replace(BLOCK, text="echo a b"), shell)


def test_output_is_shown_of_commands() -> None:
    shown = [
        before.language
        for page in pages()
        for before, block in itertools.pairwise(blocks(page))
        if block.mark("shown") is not None
    ]
    assert set(shown) == {"sh"}


def test_what_is_shown_is_in_order() -> None:
    assert shows("one ... three", "one\ntwo\n  three")
    assert not shows("three ... one", "one two three")


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
