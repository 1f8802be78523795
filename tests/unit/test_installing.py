"""Which binaries are offered for a GPU, where they come from, and who installs them."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from flashvar.binaries import advice
from flashvar.errors import InstallError, SourceError, UnservedDeviceError
from flashvar.installing import installer, offers, source
from flashvar.installing.source import Source
from flashvar_factory.config import extras, schema

CONFIG = schema.read(Path(__file__).parents[2] / "variants.toml")


def requirements(*more: str) -> list[str]:
    """Those of the project's own wheel, as a build backend writes them."""
    found = list(more)
    for name, needed in extras.extras(CONFIG, "1.2").items():
        for one in needed:
            what, _, marker = one.partition("; ")
            found.append(f"{what} ; ({marker or 'os_name == 0'}) and extra == '{name}'")
    return found


EVERY = offers.read(requirements(), "linux_x86_64")


def test_each_architecture_is_offered_once() -> None:
    assert {one.distribution for one in EVERY} == {
        target.distribution for target in CONFIG.targets.values() if "x86_64" in target.platforms
    }
    assert {str(one) for one in EVERY} == {f"{one.distribution}==1.2" for one in EVERY}
    assert sorted(EVERY, key=lambda one: one.architecture, reverse=True) == list(EVERY)


def test_another_processor_is_offered_what_is_made_for_it() -> None:
    names = {one.distribution for one in offers.read(requirements(), "linux_aarch64")}
    made = CONFIG.targets.values()
    assert names == {one.distribution for one in made if "aarch64" in one.platforms}
    assert offers.read(requirements(), "win_amd64") == ()


@pytest.mark.parametrize("extra", ["sm89-cu12", "sm-89-cu12", "8-9-cu12", "89-cu12"])
def test_a_second_binary_of_an_architecture_comes_behind_the_first(extra: str) -> None:
    more = f"flashvar-sm89-cu12==1.2; extra == '{extra}'"
    found = offers.serving((8, 9), offers.read(requirements(more), "linux_x86_64"))
    assert [one.distribution for one in found][:2] == ["flashvar-sm89", "flashvar-sm89-cu12"]


@pytest.mark.parametrize(
    "other", ["torch>=2.8", "rich>=13.7; extra == 'cli'", "flashvar-x==1; extra == 'all'", "x==1"]
)
def test_other_requirements_are_no_offers(other: str) -> None:
    assert offers.read([other], "linux_x86_64") == ()


def test_lower_minors_serve_and_other_majors_do_not() -> None:
    best = [one.architecture.capability for one in offers.serving((8, 8), EVERY)]
    assert best == sorted(best, reverse=True)
    assert best
    assert {major for major, _ in best} == {8}
    assert offers.serving((7, 0), EVERY) == ()


def test_architectures_can_be_named() -> None:
    assert offers.named("sm_89,9.0", EVERY) == [(8, 9), (9, 0)]
    assert offers.named("all", EVERY) == list(
        dict.fromkeys(one.architecture.capability for one in EVERY)
    )
    with pytest.raises(UnservedDeviceError, match="--arch all"):
        offers.named("hopper", EVERY)


def test_the_named_place_is_asked_before_the_variable(tmp_path: Path) -> None:
    (tmp_path / "x.whl").touch()
    found = source.find(
        str(tmp_path), {source.VARIABLE: "https://example.org/"}, architecture="sm1"
    )
    assert found == Source(folder=tmp_path)
    found = source.find(None, {source.VARIABLE: "https://example.org/"}, architecture="sm1")
    assert found == Source(index="https://example.org/")


def test_a_password_is_not_shown() -> None:
    assert str(Source(index="https://me:secret@example.org:1/simple/")) == (
        "https://example.org:1/simple/"
    )


@pytest.mark.parametrize("published", [False, True])
def test_nothing_named_is_the_release_once_there_is_one(
    published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "PUBLISHED", published)
    if published:
        assert source.find(None, {}, architecture="sm1") == Source()
    else:
        with pytest.raises(SourceError, match="nox -s wheels -- sm1"):
            source.find(None, {}, architecture="sm1")


def test_a_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match="no such folder"):
        source.find(str(tmp_path / "file"), {}, architecture="sm1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no wheels in it"):
        source.find(str(tmp_path / "empty"), {}, architecture="sm1")


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InstallError, match="no permission"):
        installer.find({})


@pytest.mark.parametrize("allowed", [False, True])
def test_a_python_of_the_system_is_left_alone(
    allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    environ = {"PATH": "", "PIP_BREAK_SYSTEM_PACKAGES": "1" if allowed else ""}
    if allowed:
        assert isinstance(installer.find(environ), installer.Pip)
    else:
        with pytest.raises(InstallError, match="which the system manages"):
            installer.find(environ)


def test_other_places_do_not_reach_the_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://example.org/")
    monkeypatch.setenv("PIP_CERT", "/certificate")
    kept = installer._environment(Source(index="https://example.org/simple/"))
    assert "PIP_EXTRA_INDEX_URL" not in kept
    assert kept["PIP_CERT"] == "/certificate"
    assert "PIP_EXTRA_INDEX_URL" in installer._environment(Source())
