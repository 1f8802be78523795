"""What a library states of itself is read from its code and its data."""

from __future__ import annotations

import struct
from dataclasses import replace

import fake_artifacts
import pytest

from flashvar_factory.audit import facts, library_facts
from flashvar_factory.audit.facts import Library

FAKE = fake_artifacts.manifest()
CONSTANTS = {
    "x86_64": (62, b"\xb8" + struct.pack("<I", 7) + b"\xc3", 7),
    "x86_64 with CET": (62, b"\xf3\x0f\x1e\xfa\xb8" + struct.pack("<I", 7) + b"\xc3", 7),
    "aarch64": (183, struct.pack("<II", 0x52800000 | 7 << 5, 0xD65F03C0), 7),
    "aarch64 with BTI": (183, struct.pack("<III", 0xD503245F, 0x528000E0, 0xD65F03C0), 7),
    "no constant": (62, b"\x48\x8d\x05\x00\x00\x00\x00\xc3", None),
    "two instructions": (62, b"\xb8\x07\x00\x00\x00\x90\xc3", None),
    "empty": (62, b"", None),
}


def read(built: bytes) -> Library:
    return facts.read_library("flashvar_sm80/libflashvar_sm80.so", built, "")


@pytest.mark.parametrize(("machine", "code", "number"), CONSTANTS.values(), ids=CONSTANTS)
def test_abi(
    machine: int, code: bytes, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_artifacts.Library, "_code", lambda self: code)
    one = read(replace(fake_artifacts.library(FAKE), machine=machine).build())
    assert library_facts.abi(one, FAKE) == number


@pytest.mark.parametrize("count", [0, 1, 2])
def test_build_info_is_there_once(count: int) -> None:
    text = '{"architecture": "sm_80", "version": "0.1.0", "source_hash": "' + "a" * 64 + '"}\0'
    one = read(replace(fake_artifacts.library(FAKE), info=text * count).build())
    assert library_facts.build_info(one) == (("sm_80", "0.1.0", "a" * 64) if count == 1 else None)
