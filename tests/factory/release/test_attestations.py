"""Attestations are verified by the library itself, whose trust root is the tests' own."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_artifacts import Wheel

from flashvar_factory.cli import main
from flashvar_factory.release import attestations

pytest.importorskip("pypi_attestations", reason="what verifies signatures is not installed")
pytestmark = pytest.mark.usefixtures("auditwheel")

import own_sigstore  # noqa: E402
from own_sigstore import Sigstore  # noqa: E402
from sigstore.models import TrustedRoot  # noqa: E402
from sigstore.verify import Verifier  # noqa: E402

OWNER, WORKFLOW = "someone/kernels", "wheels.yml"
PUBLISHER = f"{OWNER}:{WORKFLOW}"


@pytest.fixture(scope="module")
def signer() -> Sigstore:
    return Sigstore()


@pytest.fixture
def wheel(tmp_path: Path, signer: Sigstore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One wheel, downloaded into a folder that is no project; `signer` is what is trusted."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "trusted_root.json"
    root.write_text(signer.trusted_root(), encoding="utf-8")

    def production(*, offline: bool) -> Verifier:
        assert offline
        return Verifier(trusted_root=TrustedRoot.from_file(str(root)))

    monkeypatch.setattr(Verifier, "production", production)
    return Wheel().write(tmp_path)


def put(wheel: Path, document: object, suffix: str = ".publish.attestation") -> Path:
    path = wheel.with_name(wheel.name + suffix)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def verify(wheel: Path, publisher: str = PUBLISHER) -> int:
    return main(["verify", str(wheel), "--publisher", publisher])


@pytest.mark.parametrize("suffix", [".publish.attestation", ".provenance"])
def test_a_signature_is_verified(
    suffix: str, wheel: Path, signer: Sigstore, capsys: pytest.CaptureFixture[str]
) -> None:
    attestation = signer.attestation(wheel, OWNER, WORKFLOW)
    publisher = {"kind": "GitHub", "repository": OWNER, "workflow": WORKFLOW}
    bundle = {"publisher": publisher, "attestations": [attestation]}
    provenance = {"version": 1, "attestation_bundles": [bundle]}
    put(wheel, provenance if suffix == ".provenance" else attestation, suffix)
    assert verify(wheel) == 0
    assert (
        f"attestation  ok: {wheel.name}{suffix}: {own_sigstore.PUBLISH}" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "publisher", [f"else/kernels:{WORKFLOW}", f"{OWNER}:other.yml", f"{OWNER}s:{WORKFLOW}"]
)
def test_another_publisher_is_a_fault(publisher: str, wheel: Path, signer: Sigstore) -> None:
    put(wheel, signer.attestation(wheel, OWNER, WORKFLOW))
    assert verify(wheel, publisher) == 16


def test_the_signature_of_other_bytes_is_a_fault(
    wheel: Path, signer: Sigstore, capsys: pytest.CaptureFixture[str]
) -> None:
    other = wheel.parent / "other" / wheel.name
    other.parent.mkdir()
    other.write_bytes(b"other bytes")
    put(wheel, signer.attestation(other, OWNER, WORKFLOW))
    assert verify(wheel) == 16
    assert "does not match distribution digest" in capsys.readouterr().out


def test_the_signature_of_another_file_is_a_fault(wheel: Path, signer: Sigstore) -> None:
    other = wheel.with_name("other-1-py3-none-any.whl")
    other.write_bytes(wheel.read_bytes())
    put(wheel, signer.attestation(other, OWNER, WORKFLOW))
    assert verify(wheel) == 16


def test_keys_of_nobody_are_a_fault(wheel: Path) -> None:
    put(wheel, Sigstore().attestation(wheel, OWNER, WORKFLOW))
    assert verify(wheel) == 16


Change = Callable[[dict[str, Any]], object]


def entry(attestation: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = attestation["verification_material"]["transparency_entries"][0]
    return found


def cut(attestation: dict[str, Any]) -> None:
    material = attestation["verification_material"]
    material["certificate"] = material["certificate"][:40]


def forge(attestation: dict[str, Any]) -> None:
    """Another statement under the same signature."""
    said = base64.b64decode(attestation["envelope"]["statement"])
    said = said.replace(b"sha256", b"sha512")
    attestation["envelope"]["statement"] = base64.b64encode(said).decode()


DAMAGES: dict[str, Change] = {
    "another statement": forge,
    "half a certificate": cut,
    "no entry of a log": lambda one: one["verification_material"].update(transparency_entries=[]),
    "an entry of nothing": lambda one: entry(one).clear(),
    "no proof": lambda one: entry(one).pop("inclusionProof"),
    "a proof without end": lambda one: entry(one)["inclusionProof"].update(hashes=["AA=="] * 9),
    "a note of nothing": lambda one: entry(one)["inclusionProof"]["checkpoint"].update(envelope=""),
    "a time beyond time": lambda one: entry(one).update(integratedTime=str(2**62)),
    "a body that is no JSON": lambda one: entry(one).update(canonicalizedBody="AAAA"),
    "another log": lambda one: entry(one)["logId"].update(keyId="AAAA"),
    "no promise": lambda one: entry(one).pop("inclusionPromise"),
    "another version": lambda one: one.update(version=2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_attestation_is_a_fault(
    damage: str, wheel: Path, signer: Sigstore, capsys: pytest.CaptureFixture[str]
) -> None:
    attestation = signer.attestation(wheel, OWNER, WORKFLOW)
    DAMAGES[damage](attestation)
    put(wheel, attestation)
    assert verify(wheel) == 16
    printed = capsys.readouterr()
    assert printed.out.count("ERROR") == 1
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b"\xff", b"[" * 99999], ids=repr)
@pytest.mark.parametrize("suffix", [".publish.attestation", ".provenance"])
def test_what_is_no_attestation_is_a_fault(suffix: str, content: bytes, wheel: Path) -> None:
    wheel.with_name(wheel.name + suffix).write_bytes(content)
    assert verify(wheel) == 16


def test_a_folder_is_no_attestation(wheel: Path) -> None:
    wheel.with_name(f"{wheel.name}.provenance").mkdir()
    assert verify(wheel) == 16


def test_the_library_is_available() -> None:
    assert attestations.is_available()
