"""Which binaries are offered for a GPU, where they come from, and who installs them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashvar.binaries import install_commands
from flashvar.binaries.kinds import CUDA
from flashvar.errors import ConfigurationError, InstallError, WheelNotFoundError
from flashvar.installing import installer, settings, source, temporary, wheel_requirements
from flashvar.installing.source import WheelSource
from flashvar_factory.config import extras, schema

CONFIG = schema.read(Path(__file__).parents[3] / "variants.toml")


def requirements(*more: str) -> list[str]:
    """Those of the project's own wheel, as a build backend writes them."""
    found = list(more)
    for name, needed in extras.extras(CONFIG, "1.2").items():
        for one in needed:
            what, _, marker = one.partition("; ")
            found.append(f"{what} ; ({marker or 'os_name == 0'}) and extra == '{name}'")
    return found


EVERY = wheel_requirements.read(requirements(), "linux_x86_64")


def test_each_architecture_is_offered_once() -> None:
    assert {one.distribution for one in EVERY} == {
        target.distribution for target in CONFIG.targets.values() if "x86_64" in target.platforms
    }
    assert {str(one) for one in EVERY} == {f"{one.distribution}==1.2" for one in EVERY}
    assert sorted(EVERY, key=lambda one: one.architecture, reverse=True) == list(EVERY)


def test_another_processor_is_offered_what_is_made_for_it() -> None:
    names = {one.distribution for one in wheel_requirements.read(requirements(), "linux_aarch64")}
    made = CONFIG.targets.values()
    assert names == {one.distribution for one in made if "aarch64" in one.platforms}
    assert wheel_requirements.read(requirements(), "win_amd64") == ()


@pytest.mark.parametrize("extra", ["sm89-cu12", "sm-89-cu12", "8-9-cu12", "89-cu12"])
def test_a_second_binary_of_an_architecture_comes_behind_the_first(extra: str) -> None:
    more = f"flashvar-sm89-cu12==1.2; extra == '{extra}'"
    found = wheel_requirements.running_on(
        (8, 9), wheel_requirements.read(requirements(more), "linux_x86_64")
    )
    assert [one.distribution for one in found][:2] == ["flashvar-sm89", "flashvar-sm89-cu12"]


@pytest.mark.parametrize(
    "other", ["torch>=2.8", "rich>=13.7; extra == 'cli'", "flashvar-x==1; extra == 'all'", "x==1"]
)
def test_other_requirements_are_no_offers(other: str) -> None:
    assert wheel_requirements.read([other], "linux_x86_64") == ()


def test_lower_minors_serve_and_other_majors_do_not() -> None:
    best = [one.architecture.capability for one in wheel_requirements.running_on((8, 8), EVERY)]
    assert best == sorted(best, reverse=True)
    assert best
    assert {major for major, _ in best} == {8}
    assert wheel_requirements.running_on((7, 0), EVERY) == ()


def named(text: str) -> list[str]:
    return [kind.name for kind in wheel_requirements.kinds_of(text, EVERY)]


def test_architectures_can_be_named() -> None:
    assert named("sm_89,9.0, 90a-cu12") == ["sm_89", "sm_90", "sm_90-cu12"]
    for text, cuda in (("all", CUDA), ("all-cu12", 12)):
        assert named(text) == [one.kind.name for one in EVERY if one.kind.cuda == cuda]


@pytest.mark.parametrize("text", ["hopper", "all-cu99", "sm_89-cu", "sm_89,,sm_90", ""])
def test_what_names_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"-cu12 for drivers of CUDA 12.*--arch all"):
        wheel_requirements.kinds_of(text, EVERY)


def test_the_named_place_is_asked_before_the_variable(tmp_path: Path) -> None:
    (tmp_path / "x.whl").touch()
    found = source.find(str(tmp_path), {source.VARIABLE: "https://example.org/"}, extra="sm1")
    assert found == WheelSource(folder=tmp_path)
    found = source.find(None, {source.VARIABLE: "https://example.org/"}, extra="sm1")
    assert found == WheelSource(index="https://example.org/")


def test_an_address_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20,é"
    (folder / "flashvar-sm89").mkdir(parents=True)
    address = folder.as_uri()
    assert source.find(address, {}, extra="sm1") == WheelSource(index=address)
    (folder / "x.whl").touch()
    assert source.find(address, {}, extra="sm1") == WheelSource(folder=folder)
    (folder / "index.html").touch()
    assert source.find(address, {}, extra="sm1") == WheelSource(index=address)


@pytest.mark.parametrize("published", [False, True])
def test_an_empty_name_is_no_other_source(published: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `--from "$WHEELS"` with a variable that is not set."""
    monkeypatch.setattr(install_commands, "PUBLISHED", published)
    with pytest.raises(WheelNotFoundError, match="found an empty text"):
        source.find("", {source.VARIABLE: "https://example.org/"}, extra="sm1")


def test_a_password_is_not_shown() -> None:
    assert str(WheelSource(index="https://me:secret@example.org:1/simple/")) == (
        "https://example.org:1/simple/"
    )


@pytest.mark.parametrize("published", [False, True])
def test_nothing_named_is_the_release_once_there_is_one(
    published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_commands, "PUBLISHED", published)
    if published:
        assert source.find(None, {}, extra="sm1") == WheelSource()
    else:
        with pytest.raises(WheelNotFoundError, match="nox -s wheels -- sm1"):
            source.find(None, {}, extra="sm1")


def test_a_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WheelNotFoundError, match="found a file"):
        source.find(str(tmp_path / "file"), {}, extra="sm1")
    with pytest.raises(WheelNotFoundError, match="no such folder"):
        source.find(str(tmp_path / "away"), {}, extra="sm1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WheelNotFoundError, match="no wheels in it"):
        source.find(str(tmp_path / "empty"), {}, extra="sm1")
    with pytest.raises(WheelNotFoundError, match=r"home directory.*~nobody-here/dist"):
        source.find("~nobody-here/dist", {}, extra="sm1")


@pytest.mark.parametrize("address", ["http://[::1", "https://me:secret@[x/"])
def test_an_address_that_is_none_is_no_source(address: str) -> None:
    with pytest.raises(
        WheelNotFoundError, match="--from: expected the address of an index"
    ) as refused:
        source.find(address, {}, extra="sm1")
    assert "secret" not in str(refused.value)


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


def test_what_a_user_set_for_other_calls_does_not_reach_the_installer() -> None:
    reach = {"PIP_CERT": "/certificate", "UV_OFFLINE": "1", "HTTPS_PROXY": "http://proxy/"}
    places = {"PIP_EXTRA_INDEX_URL": "https://other/", "UV_INDEX_OTHER_PASSWORD": "secret"}
    others = {
        *("PIP_TARGET", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "PIP_USER", "PIP_DRY_RUN"),
        *("UV_REQUIRE_HASHES", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE_NEWER", "UV_LINK_MODE"),
    }
    environ = {**reach, **places, **dict.fromkeys(others, "x"), "PIP_REQUIRE_HASHES": "1"}
    named = settings.variables(environ, WheelSource(index="https://example.org/simple/"))
    configured = settings.variables(environ, WheelSource())
    for found in (named, configured):
        assert found.items() >= reach.items()
        assert not others & found.keys()
        assert found["PIP_REQUIRE_HASHES"] == "0"
    assert not places.keys() & named.keys()
    for variable in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        assert named[variable] == "https://example.org/simple/"
    assert configured.items() >= places.items()
    assert "PIP_CONFIG_FILE" not in configured


@pytest.mark.parametrize(("told", "allowed"), [("1", True), ("true", True), ("0", False)])
@pytest.mark.parametrize("tool", ["PIP", "UV"])
def test_what_allows_one_installer_allows_both(tool: str, told: str, allowed: bool) -> None:
    variable = f"{tool}_BREAK_SYSTEM_PACKAGES"
    found = settings.variables({variable: told}, WheelSource())
    assert (found.get("PIP_BREAK_SYSTEM_PACKAGES") == "1") is allowed
    assert (found.get("UV_BREAK_SYSTEM_PACKAGES") == "1") is allowed
    assert settings.may_change_the_system({variable: told}) is allowed


@pytest.mark.parametrize("has_ensurepip", [False, True])
def test_what_adds_an_installer_is_there(
    has_ensurepip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "_has", lambda module: module == "ensurepip" and has_ensurepip)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(InstallError, match="ensurepip" if has_ensurepip else "install uv"):
        installer.find({"PATH": ""})


def test_a_capability_that_is_named_twice_is_one() -> None:
    assert named("sm_89,8.9,sm89") == ["sm_89"]
    assert named("all,sm_89") == named("all")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_no_room_for_the_temporary_folder(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with (
        pytest.raises(InstallError, match=f"{os.strerror(number)}; nothing was installed"),
        temporary.folder(),
    ):
        pass


def test_the_temporary_folder_is_gone_afterwards() -> None:
    with temporary.folder() as folder:
        (folder / "wheel").touch()
    assert not folder.exists()


# How Python handles what ends a process, unless its caller has it ignore that.
USUAL = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@pytest.fixture
def usual_signals() -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in USUAL.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", USUAL)
def test_the_temporary_folder_is_gone_after_a_signal(number: signal.Signals) -> None:
    def interrupted(folder: Path) -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # a second one changes nothing
            (folder / "wheel").touch()

    with pytest.raises(temporary.Ended) as ended, temporary.folder() as folder:
        interrupted(folder)
    assert ended.value.args == (number,)
    assert not folder.exists()
    assert {one: signal.getsignal(one) for one in USUAL} == USUAL


@pytest.mark.usefixtures("usual_signals")
def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with temporary.folder() as folder:
        signal.raise_signal(signal.SIGHUP)
        assert folder.is_dir()


SHOWN = {
    "pip": (
        "WARNING: Retrying\nERROR: Could not find a version (from versions: none)\nERROR: No match",
        "Could not find a version (from versions: none)",
    ),
    "pip, of a page": (
        "Could not fetch URL http://here/x/: connection error: refused - skipping\n"
        "ERROR: Could not find a version",
        "Could not find a version; Could not fetch URL http://here/x/: connection error: refused "
        "- skipping",
    ),
    "uv": (
        "error: Failed to fetch\n  Caused by: a\n  Caused by: refused",
        "Failed to fetch; refused",
    ),
    "uv, of an index that asks for a password": (
        "error: No solution found\n  cause: Because a was not found\n\nhint: An index URL "
        "(http://here/) could not be queried (401 Unauthorized)\n",
        "No solution found; An index URL (http://here/) could not be queried (401 Unauthorized)",
    ),
    "uv, which draws a tree": (
        "Resolved\n  \u00d7 No solution found when\n  │ resolving:\n  ├─▶ at first\n"
        "  ╰─▶ Because a\n      was not found, your\n      requirements are unsatisfiable.\n",
        "No solution found when resolving; Because a was not found, your requirements are "
        "unsatisfiable.",
    ),
    "uv, which draws a tree and hints": (
        "  \u00d7 No solution found:\n  ╰─▶ Because of\n      a\n\n      hint: it is there\n",
        "No solution found; it is there",
    ),
    "nothing": ("", "it printed nothing"),
}


@pytest.mark.parametrize("tool", SHOWN)
def test_what_an_installer_says_is_passed_on(tool: str) -> None:
    printed, words = SHOWN[tool]
    done = subprocess.CompletedProcess([], 1, "", printed)
    assert installer._reason(done) == words


YANKED = {
    "pip": ("Reason for being yanked: wrong results\n", "wrong results"),
    "pip, without a reason": ("Reason for being yanked: <none given>\n", "<none given>"),
    "uv": ('warning: `a==1.0` is yanked (reason: "wrong \x1b[31mresults")\n', "wrong [31mresults"),
    "uv, in two lines": (
        'warning: `a==1.0` is yanked (reason: "wrong "v2"):\n results (of all)")\n',
        'wrong "v2"): results (of all)',
    ),
    "uv, without a reason": ("warning: `a==1.0` is yanked\n", "<none given>"),
    "of none": ("warning: `a==1.0` is a wheel\n", None),
}


@pytest.mark.parametrize("tool", YANKED)
def test_what_was_withdrawn_is_said(tool: str) -> None:
    printed, reason = YANKED[tool]
    done = subprocess.CompletedProcess([], 0, "saved\n", f"first\n{printed}last\n")
    assert installer._withdrawn(done) == reason


# What an interrupted `flashvar install` does: it begins, is interrupted, and would end. A job in
# the background of a shell ignores the signal, and so do its children unless they set a handler.
INTERRUPTED = '''
import os, signal, sys
from flashvar.installing import installer
signal.signal(signal.SIGINT, signal.default_int_handler)
program = """
import pathlib, time
pathlib.Path("begun").touch()
while not pathlib.Path("interrupted").exists():
    time.sleep(0.01)
pathlib.Path("ended").touch()
"""
installer._run([sys.executable, "-c", program], os.environ, to_its_end=sys.argv[1] == "install")
'''


@pytest.mark.parametrize("call", ["fetch", "install"])
def test_an_interrupted_change_goes_to_its_end(call: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, call],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src" / "python")},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    (tmp_path / "interrupted").touch()
    _, printed = process.communicate()
    assert b"KeyboardInterrupt" in printed
    assert (tmp_path / "ended").exists() is (call == "install")


def test_the_temporary_folder_of_another_thread() -> None:
    """Python sets handlers of signals in the main thread alone."""

    def made() -> bool:
        with temporary.folder() as folder:
            return folder.is_dir()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(made).result()
