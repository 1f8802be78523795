"""A Sigstore of the tests' own: an authority, two logs and a trust root of them, without a network.

What it signs is verified by `sigstore` and `pypi-attestations` as they are; the keys alone are not
those of the public instance.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PUBLISH = "https://docs.pypi.org/attestations/publish/v1"
PAYLOAD = "application/vnd.in-toto+json"
ISSUER = "https://token.actions.githubusercontent.com"
REF = "refs/tags/v1"
# Of the certificate's extensions: who asked for it, in Fulcio's numbers.
CLAIMS = "1.3.6.1.4.1.57264.1"
TIMESTAMPS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
NOW = datetime.now(timezone.utc).replace(microsecond=0)
SHA256 = ec.ECDSA(hashes.SHA256())


def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def der(of: ec.EllipticCurvePrivateKey) -> bytes:
    return of.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def identity(of: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(der(of)).digest()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass
class Sigstore:
    """The keys, and what is signed with them."""

    authority: ec.EllipticCurvePrivateKey = field(default_factory=key)
    certificates: ec.EllipticCurvePrivateKey = field(default_factory=key)  # the log of them
    signatures: ec.EllipticCurvePrivateKey = field(default_factory=key)  # the log of them

    def __post_init__(self) -> None:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        public = self.authority.public_key()
        builder = x509.CertificateBuilder(name, name, public, 1, *_days(-9, 9))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs_certificates=True), True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        self.root = builder.sign(self.authority, hashes.SHA256())

    def trusted_root(self) -> str:
        """The document that a verifier trusts."""
        start = {"start": _days(-9, 9)[0].isoformat().replace("+00:00", "Z")}
        log, other = (
            {
                "baseUrl": "https://tests.invalid",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": text(der(one)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": start,
                },
                "logId": {"keyId": text(identity(one))},
            }
            for one in (self.signatures, self.certificates)
        )
        authority = {
            "subject": {"organization": "tests", "commonName": "tests"},
            "uri": "https://tests.invalid",
            "certChain": {
                "certificates": [{"rawBytes": text(self.root.public_bytes(Encoding.DER))}]
            },
            "validFor": start,
        }
        kind = "application/vnd.dev.sigstore.trustedroot+json;version=0.1"
        return json.dumps(
            {
                "mediaType": kind,
                "tlogs": [log],
                "certificateAuthorities": [authority],
                "ctlogs": [other],
                "timestampAuthorities": [],
            }
        )

    def attestation(self, file: Path, repository: str, workflow: str) -> dict[str, Any]:
        """What a workflow publishes of a file (PEP 740)."""
        signer = key()
        certificate = self._certificate(signer, repository, workflow)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": file.name, "digest": {"sha256": digest}}],
            "predicateType": PUBLISH,
            "predicate": None,
        }
        payload = json.dumps(statement).encode()
        enveloped = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)
        signature = signer.sign(enveloped, SHA256)
        return {
            "version": 1,
            "verification_material": {
                "certificate": text(certificate.public_bytes(Encoding.DER)),
                "transparency_entries": [self._entry(payload, signature, certificate)],
            },
            "envelope": {"statement": text(payload), "signature": text(signature)},
        }

    def _certificate(
        self, signer: ec.EllipticCurvePrivateKey, repository: str, workflow: str
    ) -> x509.Certificate:
        """One that is in the log of certificates, as its last extension proves."""
        address = f"https://github.com/{repository}"
        config = f"{address}/.github/workflows/{workflow}@{REF}"
        claims = {8: ISSUER, 12: address, 13: "0" * 40, 14: REF, 18: config}
        root = x509.SubjectKeyIdentifier.from_public_key(self.authority.public_key())
        name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(config)])
        builder = x509.CertificateBuilder(
            self.root.subject, x509.Name([]), signer.public_key(), 2, *_minutes(-5, 5)
        )
        builder = builder.add_extension(_usage(signs_certificates=False), True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False
        )
        builder = builder.add_extension(name, True)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(root), False
        )
        for number, claim in claims.items():
            value = b"\x0c" + _sized(claim.encode())
            builder = builder.add_extension(
                x509.UnrecognizedExtension(x509.ObjectIdentifier(f"{CLAIMS}.{number}"), value),
                False,
            )
        before = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        moment = struct.pack("!Q", int(NOW.timestamp()) * 1000)
        signed = b"\0\0" + moment + b"\0\1" + identity(self.authority)
        signed += len(before).to_bytes(3, "big") + before + b"\0\0"
        signature = self.certificates.sign(signed, SHA256)
        timestamp = b"\0" + identity(self.certificates) + moment + b"\0\0\4\3"
        timestamp += struct.pack("!H", len(signature)) + signature
        listed = struct.pack("!HH", len(timestamp) + 2, len(timestamp)) + timestamp
        value = b"\x04" + _sized(listed)
        builder = builder.add_extension(x509.UnrecognizedExtension(TIMESTAMPS, value), False)
        return builder.sign(self.authority, hashes.SHA256())

    def _entry(
        self, payload: bytes, signature: bytes, certificate: x509.Certificate
    ) -> dict[str, Any]:
        """The line of the log of signatures, the only one of it, and that it was promised."""
        hashed = {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()}
        pem = text(certificate.public_bytes(Encoding.PEM))
        spec = {
            "payloadHash": hashed,
            "envelopeHash": hashed,
            "signatures": [{"signature": text(signature), "verifier": pem}],
        }
        body = json.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}).encode()
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"tests.invalid\n1\n{text(root)}\n"
        noted = identity(self.signatures)[:4] + self.signatures.sign(note.encode(), SHA256)
        promised = {
            "body": text(body),
            "integratedTime": int(NOW.timestamp()),
            "logID": identity(self.signatures).hex(),
            "logIndex": 0,
        }
        promise = json.dumps(promised, separators=(",", ":")).encode()
        return {
            "logIndex": "0",
            "logId": {"keyId": text(identity(self.signatures))},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(promised["integratedTime"]),
            "inclusionPromise": {
                "signedEntryTimestamp": text(self.signatures.sign(promise, SHA256))
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": text(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 tests.invalid {text(noted)}\n"},
            },
            "canonicalizedBody": text(body),
        }


def _sized(value: bytes) -> bytes:
    """A length of DER, and what is so long."""
    if len(value) < 128:
        return bytes([len(value)]) + value
    length = len(value).to_bytes(2, "big")
    return b"\x82" + length + value


def _days(first: int, last: int) -> tuple[datetime, datetime]:
    return NOW + timedelta(days=first), NOW + timedelta(days=last)


def _minutes(first: int, last: int) -> tuple[datetime, datetime]:
    return NOW + timedelta(minutes=first), NOW + timedelta(minutes=last)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
