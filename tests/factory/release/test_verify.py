"""Downloaded wheels are verified offline: a check passes, finds a fault, or says why it cannot.

The library that verifies signatures is a stand-in here, which believes what a file says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bounded import SECONDS, bounded
from fake_artifacts import Wheel

from flashvar.errors import ConfigurationError, DamagedWheelError
from flashvar_factory import index
from flashvar_factory.build import example
from flashvar_factory.cli import main
from flashvar_factory.errors import AuditError
from flashvar_factory.release import attestations

pytestmark = pytest.mark.usefixtures("auditwheel")

PUBLISHER = "someone/kernels:wheels.yml"
KIND = "https://docs.pypi.org/attestations/publish/v1"


class RefusedError(ValueError):
    """What the library raises."""


@dataclass(frozen=True)
class Publisher:
    repository: str
    workflow: str


class Distribution:
    @classmethod
    def from_file(cls, path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Attestation:
    said: dict[str, Any]

    @classmethod
    def model_validate_json(cls, text: str) -> Attestation:
        return cls(json.loads(text))

    def verify(self, publisher: Publisher, digest: str, *, offline: bool) -> tuple[str, None]:
        assert offline
        if self.said != {"by": f"{publisher.repository}:{publisher.workflow}", "of": digest}:
            raise RefusedError("does not match\nand more")
        return KIND, None


@dataclass(frozen=True)
class Bundle:
    attestations: list[Attestation]


@dataclass(frozen=True)
class Provenance:
    attestation_bundles: list[Bundle]

    @classmethod
    def model_validate_json(cls, text: str) -> Provenance:
        return cls([Bundle([Attestation(one)]) for one in json.loads(text)])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("pypi_attestations")
    own = {
        "AttestationError": RefusedError,
        "GitHubPublisher": Publisher,
        "Distribution": Distribution,
    }
    own |= {"Distribution": Distribution, "Attestation": Attestation, "Provenance": Provenance}
    vars(module).update(own)
    monkeypatch.setitem(sys.modules, "pypi_attestations", module)
    monkeypatch.setattr(attestations, "is_available", lambda: True)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One wheel, downloaded into a folder that is no project."""
    monkeypatch.chdir(tmp_path)
    return Wheel().write(tmp_path)


def attest(wheel: Path, *, by: str = PUBLISHER, suffix: str = "publish.attestation") -> Path:
    said = {"by": by, "of": Distribution.from_file(wheel)}
    path = wheel.with_name(f"{wheel.name}.{suffix}")
    path.write_text(json.dumps([said] if suffix == "provenance" else said), encoding="utf-8")
    return path


def sums(wheel: Path) -> Path:
    path = wheel.with_name("SHA256SUMS")
    path.write_text(f"{Distribution.from_file(wheel)}  {wheel.name}\n", encoding="utf-8")
    return path


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("suffix", ["publish.attestation", "provenance"])
@pytest.mark.parametrize("way", ["list", "index"])
def test_all_of_it(way: str, suffix: str, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attest(wheel, suffix=suffix)
    if way == "index":
        (wheel.parent / "dist").mkdir()
        shutil.copy(wheel, wheel.parent / "dist")
        index.write(wheel.parent / "dist", wheel.parent / "site")
    hashes = wheel.parent / "site" if way == "index" else sums(wheel)
    words = ["--hashes", str(hashes), "--publisher", PUBLISHER]
    required = ["--require", "hash", "audit", "sbom", "attestation"]
    assert main(["verify", str(wheel), *words, *required]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" ok: ") == 4
    assert f"{KIND}, wheels.yml of someone/kernels" in printed
    assert "it needs a network" in printed


def test_what_cannot_be_checked_is_said(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(wheel)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" not checked: ") == 2
    assert "--hashes" in printed
    assert f"no {wheel.name}.*.attestation" in printed


@pytest.mark.parametrize(("project", "code"), [("mine", 0), ("flashvar", 6)])
def test_a_project_expects_nothing_of_the_wheels_of_others(
    project: str, code: int, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`flashvar` has other ops here than the wheel of that name."""
    example.write("mine", tmp_path / "here")
    variants = tmp_path / "here" / "variants.toml"
    text = variants.read_text(encoding="utf-8").replace("mine", project).replace("75", "80")
    variants.write_text(text, encoding="utf-8")
    assert main(["--root", str(tmp_path / "here"), "verify", str(wheel)]) == code
    assert ("version with the label of its kernels" in capsys.readouterr().out) is (code != 0)


@pytest.mark.parametrize("check", ["hash", "attestation"])
def test_what_is_required_must_be_checked(check: str, wheel: Path) -> None:
    assert main(["verify", str(wheel), "--require", check]) == DamagedWheelError.exit_code


def test_who_published_must_be_named(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attest(wheel)
    assert main(["verify", str(wheel)]) == 0
    assert "name its publisher with --publisher" in capsys.readouterr().out


def test_without_the_library_signatures_are_not_checked(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attest(wheel)
    monkeypatch.setattr(attestations, "is_available", lambda: False)
    assert main(["verify", str(wheel)]) == 0
    assert main(["verify", str(wheel), "--require", "attestation"]) == DamagedWheelError.exit_code
    assert main(["verify", str(wheel), "--publisher", PUBLISHER]) == DamagedWheelError.exit_code
    assert "pip install pypi-attestations" in capsys.readouterr().err


@pytest.mark.usefixtures("library")
def test_a_publisher_must_have_attested(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(wheel), "--publisher", PUBLISHER]) == DamagedWheelError.exit_code
    printed = capsys.readouterr()
    assert printed.out.count("attestation  ERROR") == 1
    assert f"no {wheel.name}.*.attestation" in printed.err


def test_a_library_that_does_not_import_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypi_attestations", None)
    assert not attestations.is_available()


@pytest.mark.parametrize(
    "error",
    [KeyError("certificate"), RecursionError(), OverflowError("a time"), TypeError()],
    ids=repr,
)
@pytest.mark.usefixtures("library")
def test_whatever_the_library_raises_is_a_fault(
    error: Exception,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def verify(*_: object, **__: object) -> None:
        raise error

    attest(wheel)
    monkeypatch.setattr(Attestation, "verify", verify)
    assert main(["verify", str(wheel), "--publisher", PUBLISHER]) == DamagedWheelError.exit_code
    assert capsys.readouterr().out.count("ERROR") == 1


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("fault", ["other bytes", "not listed", "other publisher", "no JSON"])
def test_faults(fault: str, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hashes = sums(wheel)
    attest(wheel, by="else/kernels:wheels.yml" if fault == "other publisher" else PUBLISHER)
    if fault == "other bytes":
        hashes.write_text(f"{'0' * 64}  {wheel.name}\n", encoding="utf-8")
    if fault == "not listed":
        hashes.write_text(f"{'0' * 64}  other.whl\n", encoding="utf-8")
    if fault == "no JSON":
        wheel.with_name(f"{wheel.name}.publish.attestation").write_text("{", encoding="utf-8")
    words = ["--hashes", str(hashes), "--publisher", PUBLISHER]
    assert main(["verify", str(wheel), *words]) == DamagedWheelError.exit_code
    printed = capsys.readouterr()
    assert printed.out.count("ERROR") == 1
    assert "do not install it" in printed.err


def test_a_damaged_wheel_fails_its_audit(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-40])
    assert main(["verify", str(wheel)]) in (AuditError.exit_code, DamagedWheelError.exit_code)


@pytest.mark.parametrize(
    "words",
    [
        ["absent.whl"],
        ["notes.txt"],
        ["WHEEL", "--publisher", "kernels"],
        ["WHEEL", "--hashes", "notes.txt"],
        ["WHEEL", "--hashes", "."],
        ["WHEEL", "--hashes", "latin.txt"],
        ["WHEEL", "--hashes", "pipe"],
        ["WHEEL", "--hashes", "absent.txt"],
    ],
    ids=" ".join,
)
def test_words_that_mean_nothing(words: list[str], wheel: Path) -> None:
    folder = wheel.parent
    (folder / "notes.txt").write_text("nothing here\n", encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"\xff" * 64 + b"  x.whl\n")
    os.mkfifo(folder / "pipe")
    here = {"WHEEL": wheel, **{name: folder / name for name in ("latin.txt", "pipe", "absent.txt")}}
    given = [str(here.get(word, word)) for word in words]
    assert main(["verify", *given]) == ConfigurationError.exit_code


SUM = "0" * 64
# Files of --hashes that are none.
NO_LISTS = {
    "no text": b"\xff\xfe\x00",
    "nothing": b"\n \n",
    "a name alone": b"x.whl\n",
    "a short hash": b"00  x.whl\n",
    "no name": f"{SUM}  \n".encode(),
    "of another tool": f"SHA256 (x.whl) = {SUM}\n".encode(),
    "a line that is none": f"{SUM}  x.whl\nx\n".encode(),
    "two hashes of a file": f"{SUM}  x.whl\n{'1' * 64}  x.whl\n".encode(),
}


@pytest.mark.parametrize("content", NO_LISTS)
def test_what_is_no_list_of_hashes(
    content: str, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (wheel.parent / "list").write_bytes(NO_LISTS[content])
    assert main(["verify", str(wheel), "--hashes", "list"]) == ConfigurationError.exit_code
    printed = capsys.readouterr().err
    assert printed.startswith("flashvar_factory verify: --hashes list: expected")
    assert printed.count("list: ") == 1


@pytest.mark.parametrize(
    "publisher", ["/:.yml", "a/b:../w.yml", "a/b:w.yml:x.yml", " a/b:w.yml", "a/b:w.yml\n"]
)
def test_who_is_no_publisher(
    publisher: str, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", str(wheel), "--publisher", publisher]
    assert main(words) == ConfigurationError.exit_code
    assert "expected OWNER/REPOSITORY:WORKFLOW.yml, found" in capsys.readouterr().err


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("suffix", ["publish.attestation", "provenance"])
def test_a_pipe_is_no_attestation(
    suffix: str, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(f"{wheel}.{suffix}")
    with bounded():
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        words = ["verify", str(wheel), "--publisher", PUBLISHER]
        assert main(words) == DamagedWheelError.exit_code
    assert "expected a readable file, found none; do not install it" in capsys.readouterr().err


def test_a_pipe_is_no_page(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (wheel.parent / "site" / "x").mkdir(parents=True)
    os.mkfifo(wheel.parent / "site" / "x" / "index.v1.json")
    with bounded():
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        assert main(["verify", str(wheel), "--hashes", "site"]) == ConfigurationError.exit_code
    assert "expected a page of at most" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 1}', '{"files": [{}]}', "[" * 99999])
def test_what_is_no_index(text: str, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (wheel.parent / "site" / "x").mkdir(parents=True)
    (wheel.parent / "site" / "x" / "index.v1.json").write_text(text)
    assert main(["verify", str(wheel), "--hashes", "site"]) == ConfigurationError.exit_code
    assert "--hashes site" in capsys.readouterr().err


def test_a_list_that_is_not_there(wheel: Path) -> None:
    assert main(["verify", str(wheel), "--hashes", "away"]) == ConfigurationError.exit_code


def test_lists_of_other_machines_are_read(wheel: Path) -> None:
    """A byte-order mark, other line ends, capitals, binary mode, a folder, a name with a space."""
    digest = Distribution.from_file(wheel).upper()
    lines = ["", f"{SUM}  release notes.txt", f"{digest} *./dist/{wheel.name}", " "]
    text = "\ufeff" + "\r\n".join(lines)
    (wheel.parent / "list").write_text(text, encoding="utf-8", newline="")
    assert main(["verify", str(wheel), "--hashes", "list", "--require", "hash"]) == 0
