"""The command line: results on stdout, one message and the error's exit code otherwise."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import CONFIG, project

from flashvar.binaries import install_commands
from flashvar_factory.__main__ import main
from flashvar_factory.build import example, wheel
from flashvar_factory.cli import list_builds
from flashvar_factory.config import this_machine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("before", [True, False], ids=["root first", "root last"])
def test_list_json_is_the_whole_matrix(
    before: bool, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, what = ["--root", str(root)], ["list", "--json"]
    code, out, err = run(capsys, *(where + what if before else what + where))
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert [build["kind"] for build in document["builds"]] == list(CONFIG.targets)
    assert {len(build["kernels"]) for build in document["builds"]} == {12}
    assert document["builds"][-1]["code"] == "90a"


def test_list_for_people(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sm89", "hdim=64", "dtype=bf16")
    code, out, _ = run(capsys, "--root", str(root), "list", *words)
    assert code == 0
    assert out.splitlines() == [
        "flashvar-sm89 1.0+bf16.hdim64: code 89, 1 kernels",
        "  attention_fwd_bf16_hdim64",
    ]


@pytest.mark.parametrize("command", ["list", "configure", "build", "develop", "wheels"])
def test_unknown_word(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--root", str(root), command, "hdmi=64")
    assert (code, out) == (2, "")
    assert err.startswith(f"flashvar_factory {command}: hdmi=64: unknown key")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "program", "guess"),
    [
        (["indx"], "flashvar_factory", "index"),
        (["index", "--outpt", "x"], "flashvar_factory index", "--output"),
        (["index", "--outp", "x"], "flashvar_factory index", "--output"),
        (["--rot", "x", "list"], "flashvar_factory", "--root"),
        (["verify", "x", "--require", "hsh"], "flashvar_factory verify", "hash"),
    ],
    ids=str,
)
def test_a_misspelled_word_gets_a_guess(
    words: list[str], program: str, guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words)
    wrong, suggestion, where = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2
    assert wrong.startswith(f"{program}: ")
    assert suggestion == f"did you mean {guess}?"
    listed = "options" if " " in program else "commands and options"
    assert where == f"`{program} --help` lists the {listed}."


def test_a_root_that_is_left_out_is_an_error_of_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["list", "--root"], program="wheel-factory")
    wrong, where = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2
    assert wrong == "wheel-factory: argument --root: expected one argument"
    assert where == "`wheel-factory --help` lists the commands and options."


@pytest.mark.parametrize(("words", "asked"), [([], False), (["arch=native"], True)], ids=str)
def test_devices_are_asked_for_where_words_need_them(
    words: list[str],
    asked: bool,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[bool] = []

    def capabilities() -> tuple[this_machine.Capability, ...]:
        calls.append(True)
        return ((8, 0),)

    monkeypatch.setattr(this_machine, "capabilities", capabilities)
    code, _, _ = run(capsys, "--root", str(root), "list", *words)
    assert (code, bool(calls)) == (0, asked)


def test_what_the_file_system_refuses_is_an_error_of_the_build(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = root / "nvcc"
    nvcc.write_text("#!/bin/sh\necho release 13.0, V13.0.88\n", encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    (root / "build").write_text("in the way", encoding="utf-8")
    code, _, err = run(capsys, "--root", str(root), "configure", "sm80")
    assert code == 4
    assert err.startswith(f"flashvar_factory configure: {root / 'build'}")
    assert "found: Not a directory" in err


@pytest.mark.parametrize("obstacle", ["a file", "no permission", "no permission above"])
def test_a_folder_that_takes_no_wheels_is_refused_before_they_are_built(
    obstacle: str, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setattr(wheel, "makers", lambda *_: {"pure": built.append})
    output = root / "out"
    refused = root if obstacle.endswith("above") else output
    if obstacle == "a file":
        output.touch()
    else:  # root may write everywhere
        refused.mkdir(exist_ok=True)
        monkeypatch.setattr(os, "access", lambda path, mode: path != refused)
    before = sorted(root.iterdir())
    words = ("wheels", "--project-only", "--output", "out")
    code, _, err = run(capsys, "--root", str(root), *words)
    assert (code, built) == (4, [])
    assert err.startswith(f"flashvar_factory wheels: {refused}: expected ")
    assert err.count("\n") == 1
    assert sorted(root.iterdir()) == before


@pytest.mark.parametrize("output", ["|cat", ">/dev/null", ">log"])
def test_files_that_do_not_fit_are_not_the_output(output: str, tmp_path: Path) -> None:
    """A limit of the process stands for a full disk: both fail while an open file is written."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1.0-py3-none-any.whl").write_bytes(bytes(1 << 16))
    line = f'ulimit -f 1; "$0" -Bm flashvar_factory index --wheels wheels {output}'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src" / "python")},
        stderr=subprocess.PIPE,
        text=True,
    )
    said = "expected room for what the command writes, found: File too large; free space, or "
    assert done.stderr.startswith(f"flashvar_factory index: {said}")
    assert done.returncode == 4


@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_copy_that_does_not_fit_names_the_new_file(
    whole_folder: bool,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: object) -> None:
        error = OSError(errno.ENOSPC, "No space left on device", "from", None, "to")
        raise shutil.Error([("from", "to", str(error))]) if whole_folder else error

    monkeypatch.setattr(list_builds, "run", full)
    code, _, err = run(capsys, "--root", str(root), "list")
    assert code == 4
    assert err.startswith("flashvar_factory list: expected room for to, found: No space left on")


def test_as_a_module_outside_a_project(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashvar_factory", "list"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "src" / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "variants.toml: expected a readable file, found none: run this in" in done.stderr
    assert "--root" in done.stderr
    assert "Traceback" not in done.stderr


def test_in_a_folder_that_was_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = run(capsys, "list")
    said = "expected to work in a folder that exists, found: No such file or directory; change to"
    assert (code, said in err) == (4, True)


def test_what_is_to_be_done_next_works_behind_a_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "flashvar_factory-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"its content")
    words = ("--output", str(tmp_path / "a folder"), "--factory", str(wheel))
    code, said, _ = run(capsys, "init", "mine", *words)
    assert code == 0
    assert said.splitlines()[-1].startswith(f"cd '{tmp_path / 'a folder'}' && ")
    assert (tmp_path / "a folder" / "vendor" / wheel.name).read_bytes() == b"its content"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--factory", "no.whl"), "no.whl: expected a wheel of flashvar-factory"),
        (("--factory", "mine-1.0-py3-none-any.whl"), "expected a wheel of flashvar-factory"),
    ],
    ids=["no wheel", "another wheel"],
)
def test_a_new_project_has_the_factory_that_builds_it(
    words: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine-1.0-py3-none-any.whl").touch()
    code, _, said = run(capsys, "--root", str(tmp_path), "init", "mine", *words)
    assert (code, expected in said) == (2, True), said
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("published", [False, True])
def test_a_new_project_says_where_its_factory_comes_from(
    published: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install_commands, "PUBLISHED", published)
    code, said, _ = run(capsys, "--root", str(tmp_path), "init", "mine")
    assert code == 0
    assert ("not on PyPI yet: put its wheel into vendor/" in said) is not published
    assert not (tmp_path / "mine" / "vendor").exists()


@pytest.mark.parametrize("form", [(), ("--json",), ("--matrix",), ("--projects",)], ids=str)
def test_a_selection_of_nothing_is_said_in_words(
    form: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The project of `init` is for x86-64 alone."""
    root = shutil.copytree(example.TEMPLATE, tmp_path / "project")
    code, _, said = run(capsys, "--root", str(root), "list", "platform=aarch64", *form)
    assert code == 2
    assert "platform=aarch64: expected architectures with wheels for it, found none" in said


@pytest.mark.parametrize("words", [["list"], ["init", "mine", "--output", "loop"]], ids=" ".join)
def test_a_loop_of_links_is_said_in_words(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    root = tmp_path if "init" in words else tmp_path / "loop"
    code, _, said = run(capsys, "--root", str(root), *words)
    assert code != 0
    assert f"{words[0]}: " in said
    assert "expected" in said
