"""Commands whose output goes nowhere, and commands of a flashvar that is an archive."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashvar
from flashvar.cli import output

SOURCES = Path(flashvar.__file__).parents[1]
ROOT = SOURCES.parents[1]
WITHOUT_TORCH = Path(__file__).with_name("without_torch")
# Where something is to be printed, whatever the machine is.
COMMANDS = {
    "doctor": ("flashvar", "doctor"),
    "doctor --schema": ("flashvar", "doctor", "--schema"),
    "show": ("flashvar", "show"),
    "help": ("flashvar", "--help"),
    "help of a command": ("flashvar", "tune", "--help"),
    "version": ("flashvar", "--version"),
    "factory list": ("flashvar_factory", "list"),
    "factory list --json": ("flashvar_factory", "list", "--json"),
    "factory help": ("flashvar_factory", "--help"),
}
# Of each program, and of argparse: what fails at a line that is printed, not at the end.
UNBUFFERED = ("doctor", "help", "factory list", "factory help")
every_command = pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)


def ways(*names: str) -> pytest.MarkDecorator:
    """These commands with a buffered output, and some of them with an unbuffered one."""
    found = [(name, True) for name in names] + [(x, False) for x in UNBUFFERED if x in names]
    return pytest.mark.parametrize(
        ("words", "buffered"),
        [(COMMANDS[name], buffered) for name, buffered in found],
        ids=[name if buffered else f"{name}, unbuffered" for name, buffered in found],
    )


def environment(*path: Path, buffered: bool = True) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if "FLASHVAR" not in name}
    found["PYTHONPATH"] = os.pathsep.join(map(str, path))
    found |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": ""}
    return found if buffered else {**found, "PYTHONUNBUFFERED": "1"}


def shell(
    words: tuple[str, ...],
    behind: str,
    *path: Path,
    buffered: bool = True,
    python: str = sys.executable,
) -> tuple[int, str]:
    """Run a command with a redirection behind it; its exit code, and what stderr has."""
    line = f'"$0" -m "$@" {behind}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line, python, *words],
        cwd=ROOT,
        env=environment(SOURCES, *path, buffered=buffered),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


@ways(*COMMANDS)
def test_a_reader_that_has_seen_enough_is_no_error(
    words: tuple[str, ...], buffered: bool, python_with_nox: str
) -> None:
    read, write = os.pipe()
    os.close(read)  # before the command begins, so that it always meets nobody
    process = subprocess.Popen(
        [python_with_nox, "-m", *words],
        cwd=ROOT,
        env=environment(SOURCES, WITHOUT_TORCH, buffered=buffered),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    _, complaints = process.communicate()
    assert (process.returncode, complaints) == (141, "")


@every_command
def test_a_closed_output_is_no_error(words: tuple[str, ...]) -> None:
    code, complaints = shell(words, ">&-", WITHOUT_TORCH)
    assert complaints == ""
    # Of the machine, not of the output: nothing but the reference, and no binary.
    assert code == (1 if words[1:] in {("doctor",), ("show",)} else 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
@ways(*COMMANDS)
def test_a_full_disk_is_told_in_a_sentence(
    words: tuple[str, ...], buffered: bool, python_with_nox: str
) -> None:
    given = {"buffered": buffered, "python": python_with_nox}
    code, complaints = shell(words, ">/dev/full", WITHOUT_TORCH, **given)
    said = f"{words[0]}: expected to write the output, found: No space left on device\n"
    assert (code, complaints) == (1, said)


def test_errors_go_nowhere_where_stderr_is_closed() -> None:
    code, _ = shell(("flashvar", "tune", "--head-dim", "65"), "2>&-", WITHOUT_TORCH)
    assert code == 1
    assert shell(("flashvar", "docter"), ">&- 2>&-", WITHOUT_TORCH) == (2, "")


def test_an_error_of_a_file_is_not_one_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(FileNotFoundError):
        output.delivered("program", lambda: len(Path("/no/such/file").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flashvar in one file, from which Python imports."""
    file = tmp_path_factory.mktemp("archive") / "flashvar.zip"
    with zipfile.ZipFile(file, "w") as made:
        for path in sorted((SOURCES / "flashvar").rglob("*")):
            if "__pycache__" not in path.parts:
                made.write(path, path.relative_to(SOURCES))
    return file


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("doctor",), 1),
        (("doctor", "--schema"), 0),
        (("doctor", "--bench"), 1),
        (("show",), 1),
        (("tune",), 1),
        (("--help",), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_commands_of_an_archive(
    words: tuple[str, ...], code: int, archive: Path, python: str
) -> None:
    done = subprocess.run(
        [python, "-m", "flashvar", *words],
        cwd=archive.parent,
        env=environment(archive),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if "--schema" in words:
        assert json.loads(done.stdout)["properties"]


def test_records_of_an_archive(archive: Path, python: str) -> None:
    program = "from flashvar.cli.speed import record_of as of; print(of('NVIDIA H200').gpu)"
    done = subprocess.run(
        [python, "-c", program], env=environment(archive), capture_output=True, text=True
    )
    assert done.stdout == "NVIDIA H200\n", done.stderr
