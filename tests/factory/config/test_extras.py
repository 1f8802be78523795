"""Extras under the names that people give them, as installers look them up."""

from __future__ import annotations

import re

import pytest
from matrix import CONFIG
from packaging.specifiers import InvalidSpecifier, Specifier

from flashvar_factory.config import extras

FOUND = extras.extras(CONFIG, "1.2.3")
EVERY = [f"{target.distribution}==1.2.3" for target in CONFIG.targets.values()]


def asked(typed: str) -> list[str]:
    """What an installer takes for `flashvar[typed]`, by PEP 685; markers left out."""
    found = FOUND[re.sub(r"[-_.]+", "-", typed).lower()]
    return [requirement.partition(";")[0] for requirement in found]


@pytest.mark.parametrize("typed", ["sm89", "sm_89", "sm-89", "SM_89"])
def test_one_architecture(typed: str) -> None:
    assert asked(typed) == ["flashvar-sm89==1.2.3"]


@pytest.mark.parametrize("typed", ["sm90", "sm_90", "sm90a", "sm_90a"])
def test_an_architecture_whose_code_has_a_letter(typed: str) -> None:
    assert asked(typed) == ["flashvar-sm90==1.2.3"]


@pytest.mark.parametrize("typed", ["all", "cuda", "CUDA", "gpu"])
def test_all_of_them(typed: str) -> None:
    assert asked(typed) == EVERY


@pytest.mark.parametrize("name", FOUND)
def test_no_name_can_be_compared_as_a_version(name: str) -> None:
    """As most pips before 26 do with a name that can, which is an error of theirs."""
    with pytest.raises(InvalidSpecifier):
        Specifier(f"=={name}")


def test_names_are_as_metadata_has_them() -> None:
    assert [name for name in FOUND if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []
    assert all("extra" not in requirement for found in FOUND.values() for requirement in found)
