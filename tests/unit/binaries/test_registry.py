from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from installed import put_binary, put_wheel

from flashvar._version import __version__
from flashvar.binaries import registry
from flashvar.binaries.manifest import ABI, Manifest
from flashvar.binaries.registry import BinaryFolder, Inventory, list_binaries

pytestmark = pytest.mark.usefixtures("fresh_registry")


def put(directory: Path, manifest: Manifest) -> BinaryFolder:
    return put_binary(directory, manifest).folder


def names(inventory: Inventory) -> list[str]:
    return [binary.architecture.name for binary in inventory.binaries]


def test_intact_binaries_are_sorted_by_architecture(tmp_path: Path) -> None:
    codes = ("90a", "80", "89")
    inventory = list_binaries(put(tmp_path / code, fakes.manifest(code)) for code in codes)
    assert names(inventory) == ["sm_80", "sm_89", "sm_90"]
    assert inventory.rejected == ()


def truncate_library(directory: Path) -> None:
    next(directory.glob("*.so")).write_bytes(b"\0")


def remove_library(directory: Path) -> None:
    next(directory.glob("*.so")).unlink()


def truncate_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate_library, "to have 4 bytes, found 1"),
        (remove_library, "next to its manifest, found: No such file"),
        (truncate_manifest, "expected JSON"),
        (remove_manifest, "found no file"),
    ],
)
def test_damaged_binary_is_refused_with_its_reason(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    found = put(tmp_path / "binary", fakes.manifest("80"))
    damage(found.path)
    inventory = list_binaries([found])
    assert inventory.binaries == ()
    (refusal,) = inventory.rejected
    assert reason in refusal.reason
    assert refusal.fix == "install it again"


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (replace(fakes.manifest("80"), abi=ABI + 1), f"expected ABI {ABI}, found {ABI + 1}"),
        (replace(fakes.manifest("80"), platform="plan9_mips"), "found one for plan9_mips"),
    ],
    ids=["other ABI", "other platform"],
)
def test_foreign_binary_is_refused(tmp_path: Path, manifest: Manifest, reason: str) -> None:
    inventory = list_binaries([put(tmp_path / "binary", manifest)])
    assert inventory.binaries == ()
    assert [reason in refusal.reason for refusal in inventory.rejected] == [True]


def test_first_of_one_architecture_wins_and_the_loser_names_it(tmp_path: Path) -> None:
    first = put(tmp_path / "first", fakes.manifest("80"))
    second = put(tmp_path / "second", fakes.manifest("80"))
    inventory = list_binaries([first, second])
    assert [binary.folder for binary in inventory.binaries] == [first]
    assert [refusal.reason for refusal in inventory.rejected] == [
        "replaced by wheel first, which comes first"
    ]


def test_damaged_binary_replaces_nothing(tmp_path: Path) -> None:
    first = put(tmp_path / "first", fakes.manifest("80"))
    truncate_library(first.path)
    second = put(tmp_path / "second", fakes.manifest("80"))
    assert [one.folder for one in list_binaries([first, second]).binaries] == [second]


def test_refused_binary_lets_the_next_one_move_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_binary(tmp_path / "lib/first", fakes.manifest("80"))
    put_binary(tmp_path / "lib/second", fakes.manifest("80"))
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "lib"))
    (first,) = registry.installed().binaries
    inventory = registry.reject(first, "dlopen refused it")
    assert [one.folder.path.name for one in inventory.binaries] == ["second"]
    assert inventory.rejected[0].reason == "dlopen refused it"
    assert registry.installed() is inventory


def test_precedence_is_directory_then_wheel_then_embedded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = put(tmp_path / "named", fakes.manifest("80")).path
    wheel = put_wheel(tmp_path / "site", fakes.manifest("80"))
    embedded = put(tmp_path / "flashvar/_binaries/sm_80", fakes.manifest("80")).path
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(named))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "flashvar/binaries/registry.py"))
    inventory = registry.installed()
    assert [one.folder.path for one in inventory.binaries] == [named]
    losers = [one.folder.path for one in inventory.rejected]
    assert losers == [wheel, embedded]


def test_wheel_is_found_beside_its_metadata_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = put_wheel(tmp_path, fakes.manifest("90a"), "0.1.0+hdim64")
    (wheel / "__init__.py").write_text("raise AssertionError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (binary,) = registry.installed().binaries
    assert binary.folder.path == wheel
    assert binary.folder.origin == "wheel flashvar-sm90 0.1.0+hdim64"
    assert "flashvar_sm90" not in sys.modules


def test_second_distribution_of_one_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(tmp_path / "a", fakes.manifest("80"), "0.1.0")
    put_wheel(tmp_path / "b", fakes.manifest("80"), "0.1.0+hdim64")
    monkeypatch.syspath_prepend(tmp_path / "a")
    monkeypatch.syspath_prepend(tmp_path / "b")
    (refusal,) = registry.installed().rejected
    assert refusal.reason == "replaced by wheel flashvar-sm80 0.1.0+hdim64, which comes first"


def test_foreign_malformed_entry_points_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: broken\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[console_scripts]\nno equals sign", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    put_wheel(tmp_path / "good", fakes.manifest("80"))
    monkeypatch.syspath_prepend(tmp_path / "good")
    assert names(registry.installed()) == ["sm_80"]


def test_directory_without_a_binary_is_shown_as_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "nowhere"))
    (refusal,) = registry.installed().rejected
    assert "nowhere" in refusal.reason
    assert refusal.fix == "build it again, or unset FLASHVAR_LIB_DIR"


@pytest.mark.parametrize(
    ("version", "skewed"),
    [("0.1.0", False), ("0.1.0+hdim64", False), ("0.0.9", True), ("0.1.1+hdim64", True)],
)
def test_only_public_versions_are_compared(version: str, skewed: bool) -> None:
    binary = fakes.binary("89", version=version)
    assert (binary.version_mismatch is not None) == skewed
    assert binary.version_mismatch is None or binary.version_mismatch.endswith(
        "for the same version of both: reinstall it"
    )


def test_skewed_wheel_is_replaced_by_the_version_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(tmp_path, replace(fakes.manifest("89"), version="9.9"), "9.9")
    monkeypatch.syspath_prepend(tmp_path)
    (binary,) = registry.installed().binaries
    assert binary.version_mismatch is not None
    assert binary.version_mismatch.endswith(f"flashvar-sm89=={__version__}")
    assert binary.folder.wheel == "flashvar-sm89"


def test_development_build_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As build-dev leaves it, no index has another."""
    put_wheel(tmp_path, replace(fakes.manifest("89"), version="9.9"), "9.9+hdim64")
    (info,) = tmp_path.glob("*.dist-info")
    (info / "INSTALLER").write_text(f"{registry.DEVELOPMENT}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (binary,) = registry.installed().binaries
    assert binary.folder.fix == "nox -s build-dev -- arch=sm_89"
    assert binary.folder.wheel is None


def put_foreign(
    site: Path, entry_points: bytes, metadata: str = "Name: foreign\nVersion: 1\n"
) -> None:
    info = site / "foreign-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_bytes(entry_points)


@pytest.mark.parametrize(
    "entry_points",
    [
        pytest.param(b"[console_scripts]\ncaf\xe9 = cafe:main\n", id="latin-1"),
        pytest.param(b"[flashvar.binaries]\nno value\n", id="no value"),
        pytest.param(b"[flashvar.binaries.extra]\nno value\n", id="another section"),
        pytest.param(b"[flashvar.binaries]\nsm_80 = a\0b\n", id="NUL"),
        pytest.param(b"\xff\xfe[flashvar.binaries]\n", id="UTF-16"),
    ],
)
def test_malformed_packages_do_not_matter(
    entry_points: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_foreign(tmp_path, entry_points)
    put_wheel(tmp_path, fakes.manifest("89"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    inventory = registry.installed()
    assert names(inventory) == ["sm_89"]
    assert inventory.rejected == ()


def test_package_without_a_name_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_foreign(tmp_path, b"[flashvar.binaries]\nsm_80 = nothing\n", metadata="")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (refusal,) = registry.installed().rejected
    assert "manifest.json" in refusal.reason


@pytest.mark.parametrize("name", ["~/own", "~nobody-here/own"])
def test_a_home_folder_may_be_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the files that describe containers and services, which no shell expands."""
    put_binary(tmp_path / "own", fakes.manifest("80"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHVAR_LIB_DIR", name)
    found = [one.folder.path for one in registry.installed().binaries if one.folder.from_lib_dir]
    assert found == ([tmp_path / "own"] if name.startswith("~/") else [])


@pytest.mark.parametrize("part", ["y" * 300, "y/" * 2500], ids=["name", "path"])
def test_directory_with_too_long_a_name_is_refused(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / part))
    (refusal,) = [one for one in registry.installed().rejected if "LIB_DIR" in one.folder.origin]
    assert "File name too long" in refusal.reason


def test_directory_that_may_not_be_looked_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(os, "open", refuse)
    assert "Permission denied" in registry.installed().rejected[0].reason


def test_loop_of_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "a"))
    (refusal,) = [one for one in registry.installed().rejected if "LIB_DIR" in one.folder.origin]
    assert "manifest.json" in refusal.reason
