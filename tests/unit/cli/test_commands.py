"""The command line itself: help, and what a misspelled word is told."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashvar
from flashvar import cli
from flashvar.cli import commands, main
from flashvar.cli.parser import Parser

SOURCES = Path(flashvar.__file__).parents[1]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_a_device_is_of_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device goes with --bench" in refusal(capsys, "doctor", "--device", "1")


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (("docter",), "doctor"),
        (("tun",), "tune"),
        (("--verison",), "--version"),
        (("doctor", "--jsno"), "--json"),
        (("tune", "--head-dims", "64"), "--head-dim"),
        (("tune", "--head-dims=64"), "--head-dim"),
        (("tune", "--direction", "forwards"), "forward"),
    ],
    ids=str,
)
def test_a_misspelled_word_gets_a_guess(
    words: tuple[str, ...], guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, suggestion, where = refusal(capsys, *words).splitlines()
    assert words[-1].partition("=")[0] in wrong or words[-2] in wrong
    assert suggestion == f"did you mean {guess}?"
    listed = "commands and options" if len(words) == 1 else "options"
    assert where.endswith(f"--help` lists the {listed}.")


@pytest.mark.parametrize(
    "words", [("zzz",), ("doctor", "zzz"), ("tune", "--head-dim", "many"), ("tune", "--op", "nope")]
)
def test_what_is_like_nothing_gets_no_guess(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean" not in refusal(capsys, *words)


def test_an_abbreviation_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --json?" in refusal(capsys, "doctor", "--jso")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys).startswith("usage: flashvar ")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", [None, *commands._COMMANDS])
def test_help_fits_its_terminal(
    command: str | None,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as caught:
        main([*([command] if command else []), "--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("--json" in line or "doctor" in line for line in lines)


def parser_of(command: str) -> Parser:
    """The parser of a command, as a command line that names it has it."""
    return commands._parser([command])[1][command]


@pytest.mark.parametrize("command", commands._COMMANDS)
def test_every_option_has_a_help(command: str) -> None:
    parser = parser_of(command)
    assert parser._actions[1:], "options beside --help"
    for action in parser._actions:
        assert action.help not in (None, ""), (parser.prog, action.dest)
        assert action.help is not argparse.SUPPRESS


def test_only_the_command_that_is_named_has_its_options() -> None:
    """Every other one would start in twice the time."""
    for words in ([], ["--help"], ["doctor"], ["docter"]):
        made = commands._parser(words)[1]
        assert not {"--bias", "--head-dim"}.intersection(made["warmup"].option_names())
    assert "--bias" in parser_of("warmup").option_names()


def test_help_says_where_the_options_of_other_ops_are() -> None:
    helps = {name: " ".join(parser_of(name).format_help().split()) for name in ("warmup", "tune")}
    assert "`flashvar warmup OP --help` lists the options of another" in helps["warmup"]
    assert "OP --help" not in helps["tune"]  # one op has tiles to measure


def test_an_option_of_another_op_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, whose, where = refusal(
        capsys, "warmup", "gated_delta_rule", "--causal", "--head-dim", "64"
    ).splitlines()
    assert wrong == "flashvar warmup: unrecognized arguments: --causal"
    assert whose == "--causal is an option of attention"
    assert where == "`flashvar warmup gated_delta_rule --help` lists the options."


def test_help_lists_commands_without_a_line_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "\ncommands:\n    doctor " in shown


def test_the_module_is_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "COLUMNS": "80"}
    code = "import sys; from flashvar.cli import main; sys.argv[0] = 'flashvar'; sys.exit(main())"
    shown = [
        subprocess.run(
            [sys.executable, *how, "--help"], env=environment, capture_output=True, check=True
        ).stdout
        for how in (("-m", "flashvar"), ("-c", code))
    ]
    assert shown[0] == shown[1] != b""


def run(*words: str, **environment: str) -> subprocess.Popen[str]:
    everything = {**os.environ, "PYTHONPATH": str(SOURCES), **environment}
    command = [sys.executable, "-m", "flashvar", *words]
    return subprocess.Popen(
        command, env=everything, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_terminal_that_knows_ascii_alone_is_told_all(tmp_path: Path) -> None:
    folder = str(tmp_path / "gr\u00fcn")
    process = run("show", PYTHONIOENCODING="ascii", FLASHVAR_LIB_DIR=folder)
    said, complaints = process.communicate()
    assert "gr\\xfcn" in said
    assert complaints == ""


def test_torch_without_numpy_says_nothing() -> None:
    """Its warning would stand above the summary."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "CUDA_VISIBLE_DEVICES": ""}
    code = "import sys; sys.modules['numpy'] = None; from flashvar import cli; cli.main(['doctor'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.stdout.startswith("flashvar ")
    assert done.stderr == ""


def test_an_interrupt_is_told_in_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(chosen: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._RUN, "show", interrupted)
    assert main(["show"]) == 130
    assert capsys.readouterr() == ("", "flashvar: interrupted\n")
