"""The smoke test's stand-ins satisfy what they stand for; its report is text for a terminal."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from flashvar_factory.release import smoke

REQUIREMENTS = {
    "torch": "1",
    "torch>=2.8": "2.8",
    "torch<3,>=2.8": "2.8",
    "torch~=2.8": "2.8",
    "torch==2.*": "2",
    "torch===2.0": "2.0",
    "torch>2.8": "2.8.1",
    "torch!=1": "1.1",
    "torch<1": "0",
}


@pytest.mark.parametrize("text", REQUIREMENTS)
def test_the_version_of_a_stand_in(text: str) -> None:
    requirement = Requirement(text)
    found = smoke._lowest(requirement)
    assert found == REQUIREMENTS[text]
    assert requirement.specifier.contains(found)


def test_what_was_printed_is_no_command_of_a_terminal() -> None:
    check = smoke.Check("3.12", "pip", (), ("a",), 1.0, "red: \x1b[31m", None)
    assert "red: \\x1b[31m" in smoke.Report((check,)).text()
