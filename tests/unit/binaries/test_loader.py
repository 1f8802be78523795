from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from installed import COMPILER, compile_library, library_source, put_binary

from flashvar.binaries import loader, registry
from flashvar.binaries.registry import Binary
from flashvar.errors import BackendUnavailableError, BinaryError
from flashvar.selection import resolve

pytestmark = [
    pytest.mark.usefixtures("fresh_registry"),
    pytest.mark.skipif(COMPILER is None, reason="makes its libraries with a C compiler"),
]


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library for sm_80 that is as it should be."""
    return compile_library(library_source(), tmp_path_factory.mktemp("good"))


def test_good_library_launches(tmp_path: Path, good: bytes) -> None:
    library = loader.load(put_binary(tmp_path / "good", fakes.manifest("80"), good))
    forward, packed = library.function("attention_fwd"), (208).to_bytes(208, "little")
    forward.launch(packed)
    assert library.last_error() == ""
    assert (forward.workspace(packed), forward.explain(packed)) == (208, "a")
    assert library.function("attention_fwd") is forward


def test_failed_launch_carries_the_library_s_words(tmp_path: Path, good: bytes) -> None:
    library = loader.load(put_binary(tmp_path / "good", fakes.manifest("80"), good))
    with pytest.raises(BinaryError, match=r"libflashvar_sm80\.so: struct_size: expected 208"):
        library.function("attention_fwd").launch((0).to_bytes(208, "little"))


def test_a_library_without_one_function_serves_the_others(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its manifest says that it has them all."""
    put_binary(tmp_path / "good", fakes.manifest("80"), good)
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "good"))
    monkeypatch.setattr(resolve, "gather", lambda: fakes.system(fakes.A100))
    assert resolve.choose(fakes.BF16_64).backend == "cuda"
    backward = replace(fakes.BF16_64, function="attention_bwd")
    assert resolve.choose(backward).backend == "triton"
    with pytest.raises(BackendUnavailableError, match="expected a function flashvar_attention_bwd"):
        resolve.choose(backward, "cuda")
    assert resolve.choose(fakes.BF16_64).backend == "cuda"
    (binary,) = loader.open_all().binaries
    assert [name for name, _ in binary.missing] == ["attention_bwd"]


def test_the_next_binary_serves_a_function_that_the_first_lacks(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first goes on to serve the others; both are of one architecture."""
    whole = compile_library(library_source(functions=fakes.OPS), tmp_path)
    put_binary(tmp_path / "lib/first", fakes.manifest("80"), good)
    put_binary(tmp_path / "lib/second", fakes.manifest("80"), whole)
    put_binary(tmp_path / "lib/third", fakes.manifest("80"), whole)
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "lib"))
    monkeypatch.setattr(resolve, "gather", lambda: fakes.system(fakes.A100))

    def serving(function: str) -> str:
        chosen = resolve.choose(replace(fakes.BF16_64, function=function), "cuda").binary
        assert chosen is not None
        assert chosen.library in loader._libraries
        return chosen.folder.path.name

    assert serving("attention_fwd") == "first"
    assert serving("attention_bwd") == "second"
    resolve.choose.cache_clear()
    assert (serving("attention_bwd"), serving("attention_fwd")) == ("second", "first")
    inventory = loader.open_all()
    assert [one.folder.path.name for one in inventory.binaries] == ["first", "second"]
    (replaced,) = inventory.rejected
    assert replaced.folder.path.name == "third"


def test_a_binary_that_lacks_the_same_function_is_replaced(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by opening it, as its manifest lists the function too."""
    for name in ("first", "second"):
        put_binary(tmp_path / "lib" / name, fakes.manifest("80"), good)
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "lib"))
    inventory = loader.open_all()
    assert [one.folder.path.name for one in inventory.binaries] == ["first"]
    assert [one.folder.path.name for one in inventory.rejected] == ["second"]
    assert len(loader._libraries) == 2


def test_library_is_opened_once(tmp_path: Path, good: bytes) -> None:
    binary = put_binary(tmp_path / "good", fakes.manifest("80"), good)
    assert loader.load(binary) is loader.load(binary)


def truncate(library: bytes) -> bytes:
    return library[: len(library) // 2]


def flip_a_bit(library: bytes) -> bytes:
    middle = len(library) // 2
    return library[:middle] + bytes([library[middle] ^ 1]) + library[middle + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
def test_damaged_library_is_refused_before_it_is_opened(
    tmp_path: Path, good: bytes, damage: Callable[[bytes], bytes]
) -> None:
    binary = put_binary(tmp_path / "bad", fakes.manifest("80"), good)
    binary.library.write_bytes(damage(good))
    with pytest.raises(BinaryError, match=r"expected sha256 .* the file is damaged"):
        loader.load(binary)


def test_library_that_vanished_is_refused(tmp_path: Path, good: bytes) -> None:
    binary = put_binary(tmp_path / "gone", fakes.manifest("80"), good)
    binary.library.unlink()
    with pytest.raises(BinaryError, match="expected a readable file"):
        loader.load(binary)


@pytest.mark.parametrize("content", [b"#!/bin/sh\n", b"MZ" + bytes(100)], ids=["short", "long"])
def test_a_file_that_is_no_library_is_not_opened(tmp_path: Path, content: bytes) -> None:
    binary = put_binary(tmp_path / "text", fakes.manifest("80"), content)
    with pytest.raises(BinaryError, match=r"expected .* ELF library"):
        loader.load(binary)


def test_a_library_of_another_processor_keeps_the_words_of_dlopen(
    tmp_path: Path, good: bytes
) -> None:
    machine = 18  # e_machine
    other = good[:machine] + b"\xff\xff" + good[machine + 2 :]
    with pytest.raises(BinaryError, match=r"dlopen refused it: .+"):
        loader.load(put_binary(tmp_path / "other", fakes.manifest("80"), other))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "int foreign(void) { return 0; }",
            "expected a function flashvar_abi_version, found none",
            id="foreign library",
        ),
        pytest.param(library_source(abi=7), "expected ABI 2, found 7", id="other ABI"),
        pytest.param(
            library_source(info='{"architecture": "sm_90"}'),
            "expected code for sm_80, found sm_90",
            id="other architecture",
        ),
        pytest.param(library_source(info="sm_80"), "expected build information", id="no JSON"),
        pytest.param(library_source(info="[]"), "expected build information", id="no object"),
    ],
)
def test_wrong_library_is_refused(tmp_path: Path, source: str, message: str) -> None:
    library = compile_library(source, tmp_path)
    with pytest.raises(BinaryError, match=message):
        loader.load(put_binary(tmp_path / "wrong", fakes.manifest("80"), library))


def test_open_all_replaces_what_does_not_open_by_the_next(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_binary(tmp_path / "a_bad", fakes.manifest("80"), b"text")
    put_binary(tmp_path / "b_good", fakes.manifest("80"), good)
    put_binary(tmp_path / "c_bad", fakes.manifest("90a"), b"text")
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path))
    inventory = loader.open_all()
    assert [one.folder.path.name for one in inventory.binaries] == ["b_good"]
    refused = {one.folder.path.name: one.reason for one in inventory.rejected}
    assert set(refused) == {"a_bad", "c_bad"}
    assert "expected an ELF library" in refused["a_bad"]
    assert registry.installed() is inventory


@pytest.fixture
def older(tmp_path: Path, good: bytes) -> Binary:
    """A good binary of an earlier version."""
    return put_binary(tmp_path / "older", replace(fakes.manifest("80"), version="0.0.9"), good)


def test_other_version_is_logged_once(older: Binary, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flashvar"):
        loader.load(older)
        loader.load(older)
    (record,) = caplog.records
    assert "holds version 0.0.9, flashvar is" in record.getMessage()


def test_same_public_version_is_silent(
    tmp_path: Path, good: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    subset = replace(fakes.manifest("80"), version="0.1.0+hdim64")
    loader.load(put_binary(tmp_path / "subset", subset, good))
    assert caplog.records == []


@pytest.mark.parametrize("named", [".", "good"])
def test_a_relative_folder_is_the_one_that_was_named(
    tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """dlopen searches a bare name elsewhere; and the program may change its folder."""
    folder = tmp_path / "good"
    put_binary(folder, fakes.manifest("80"), good)
    monkeypatch.chdir(folder if named == "." else tmp_path)
    monkeypatch.setenv("FLASHVAR_LIB_DIR", named)
    (binary,) = registry.installed().binaries
    monkeypatch.chdir("/")
    assert loader.load(binary).path == folder / binary.library.name
