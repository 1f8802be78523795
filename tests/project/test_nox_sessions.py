"""What the sessions of noxfile.py refuse before they make an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loaded_noxfile
import pytest

from flashvar_factory.cli import main

ROOT = Path(__file__).parents[2]
CHECK = ("--root", str(ROOT), "check-selection")


class RefusedError(Exception):
    """Nox's own error of a session."""


class Session:
    """What sessions ask of nox before they make an environment."""

    name = "every-wheel"

    def __init__(self, *arguments: str) -> None:
        self.posargs = list(arguments)

    def error(self, text: str) -> None:
        raise RefusedError(text)


@pytest.fixture(scope="module")
def noxfile() -> Any:
    return loaded_noxfile.load(ROOT / "noxfile.py")


def test_every_name_of_a_list_is_that_of_a_file(noxfile: Any) -> None:
    names = [
        (folder, name)
        for folders in (noxfile.FLOOR, noxfile.TRITON)
        for folder, names in folders.items()
        for name in names
    ]
    assert [one for one in names if not noxfile.files_named(*one)] == []
    assert noxfile.files_named("unit", "no_such_*") == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("sm_90", "hdim=64"), "sm_90"),
        (("hdim=64",), "hdim=64"),
        (("hdim=65",), "hdim=65"),
        (("-x", "tests/unit", "op=attention_fwd"), "op=attention_fwd"),
    ],
    ids=str,
)
def test_a_selection_is_not_for_pytest(
    arguments: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, "--tests", "every-wheel", "--", *arguments]) == 2
    said = f"{word}: expected arguments of pytest, found a selection of kernels: every-wheel builds"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tests/unit/test_masks.py", "found none; did you mean tests/kernels/test_masks.py?"),
        ("tests/unit/test_no_such.py::test_one", "test_no_such.py: expected a file or folder"),
    ],
)
def test_tests_that_are_not_there_are_refused(
    path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, "--tests", "tests", "--", "-x", "tests/unit", path]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("-k", "sm_90"),
        ("--ignore", "tests/unit/test_no_such.py"),
        ("-n", "0", "tests/unit/cli/test_show.py"),
        ("tests/unit/cli/test_show.py::test_kernels[hdim=64]", "--override-ini=addopts="),
    ],
    ids=str,
)
def test_arguments_of_pytest_are_its_own(arguments: tuple[str, ...]) -> None:
    assert main([*CHECK, "--tests", "every-wheel", "--", *arguments]) == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("sm_90", "hdim=64"), 0),
        (("--development", "sm_90", "hdim=64"), 0),
        (("hdmi=64",), 2),
        (("--development", "sm_90", "platform=aarch64"), 2),
        (("sm_90", "platform=aarch64"), 0),
    ],
    ids=str,
)
def test_a_selection_is_checked_as_the_session_does(
    arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, *arguments]) == code
    assert (capsys.readouterr().err != "") == bool(code)


def test_an_empty_dist_is_an_error_that_says_how_to_fill_it(
    noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)
    with pytest.raises(RefusedError, match=r"^dist: expected wheels, found none: nox -s wheels"):
        noxfile.run_on_files(Session(), "audit", "audit", "*.whl")
