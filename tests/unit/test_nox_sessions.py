"""What the sessions of noxfile.py refuse before they make an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import loaded_noxfile
import pytest

ROOT = Path(__file__).parents[2]


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
def test_a_selection_is_not_for_pytest(arguments: tuple[str, ...], word: str, noxfile: Any) -> None:
    with pytest.raises(
        RefusedError, match=f"^{word}: expected arguments of pytest, found a selection"
    ):
        noxfile.refuse_selection(Session(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("-k", "sm_90"),
        ("-n", "0", "tests/unit/test_show.py"),
        ("tests/unit/test_show.py::test_kernels[hdim=64]", "--override-ini=addopts="),
    ],
    ids=str,
)
def test_arguments_of_pytest_are_its_own(arguments: tuple[str, ...], noxfile: Any) -> None:
    noxfile.refuse_selection(Session(*arguments))


def test_an_empty_dist_is_an_error_that_says_how_to_fill_it(
    noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)
    with pytest.raises(RefusedError, match=r"^dist: expected wheels, found none: nox -s wheels"):
        noxfile.run_on_files(Session(), "audit", "audit", "*.whl")
