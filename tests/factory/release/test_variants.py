"""Wheel variants: labels and properties from the manifests, one binary in each."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_wheels
import fakes
import pytest

from flashvar.binaries import manifest
from flashvar.binaries.manifest import MinimumDriver
from flashvar_factory.cli import main
from flashvar_factory.config import schema
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive, variant_metadata
from flashvar_factory.release import variants

CONFIG = schema.read(Path(__file__).parents[3] / "variants.toml")
TARGETS = CONFIG.targets.values()
CODES = [target.architecture.code for target in TARGETS if target.toolkit is None]
OLDER = [target.kind.name for target in TARGETS if target.toolkit is not None]
INFO = "flashvar-0.1.0.dist-info"


def binary(
    folder: Path,
    code: str,
    *,
    version: str = "0.1.0",
    driver: tuple[int, int] = (13, 0),
    platform: str = fake_wheels.PLATFORM,
) -> None:
    """Put the wheel of a binary for `code` there."""
    said = replace(
        fakes.manifest(code), version=version, minimum_driver=MinimumDriver(driver, "580")
    )
    fake_wheels.binary(folder, said, platform)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """What `nox -s wheels` leaves."""
    fake_wheels.plain(tmp_path / "dist")
    for code in CODES:
        binary(tmp_path / "dist", code)
    for name in OLDER:
        binary(tmp_path / "dist", name, driver=(12, 0))
    return tmp_path / "dist"


def test_two_wheels_of_one_binary(wheels: Path) -> None:
    """As a build of all kernels beside one of some, of which one would replace the other."""
    binary(wheels, "80", version="0.1.0+hdim64")
    with pytest.raises(PackagingError, match=r"expected one wheel of each binary, found .*hdim64"):
        variants.write(wheels, wheels.parent / "variants", "flashvar")


def made(wheels: Path) -> dict[str, Path]:
    """Label -> variant wheel."""
    paths = variants.write(wheels, wheels.parent / "variants", "flashvar")
    return {
        str(archive.parse_name(path.name).variant_label): path
        for path in paths
        if path.suffix == ".whl"
    }


def metadata(wheel: Path) -> Any:
    return json.loads(archive.read(wheel)[f"{INFO}/variant.json"])


def test_a_label_for_every_architecture_and_null(wheels: Path) -> None:
    found = made(wheels)
    assert set(found) == {
        "null",
        *(target.kind.extra.replace("-", "_") for target in TARGETS),
    }
    tags = {label: archive.parse_name(path.name).tag for label, path in found.items()}
    assert tags.pop("null") == "py3-none-any"
    assert set(tags.values()) == {f"py3-none-{fake_wheels.PLATFORM}"}


@pytest.mark.parametrize("code", CODES)
def test_properties(code: str, wheels: Path) -> None:
    architecture = CONFIG.targets[f"sm_{code.rstrip('a')}"].architecture
    path = made(wheels)[architecture.extra]
    real = f"{architecture.major}{architecture.minor}_real"
    assert metadata(path)["variants"] == {
        architecture.extra: {
            "nvidia": {"cuda_version_lower_bound": ["13.0"], "sm_arch": [real]},
        }
    }


@pytest.mark.parametrize("code", CODES)
def test_the_binary_is_embedded(code: str, wheels: Path) -> None:
    architecture = CONFIG.targets[f"sm_{code.rstrip('a')}"].architecture
    files = archive.read(made(wheels)[architecture.extra])
    folder = f"flashvar/_binaries/{architecture.name}"
    read = manifest.parse(files[f"{folder}/manifest.json"].decode())
    assert read.architecture == architecture
    assert files[f"{folder}/{read.library.file}"] == b"\x7fELF"
    assert files[f"{INFO}/sboms/{read.distribution}.cdx.json"] == b"{}"
    assert sum(name.startswith("flashvar/_binaries/") for name in files) == 2
    assert files[f"{INFO}/WHEEL"].decode().splitlines() == [
        "Wheel-Version: 1.0",
        "Generator: fake",
        "Root-Is-Purelib: false",
        f"Tag: py3-none-{fake_wheels.PLATFORM}",
    ]


def test_null_is_the_plain_wheel_and_its_label(wheels: Path) -> None:
    found = archive.read(made(wheels)["null"])
    (plain,) = wheels.glob("flashvar-*.whl")
    expected = archive.read(plain)
    assert json.loads(found.pop(f"{INFO}/variant.json"))["variants"] == {"null": {}}
    assert b"variant.json" in found.pop(f"{INFO}/RECORD")
    del expected[f"{INFO}/RECORD"]
    assert found == expected


def test_the_list_of_labels_is_that_of_the_wheels(wheels: Path) -> None:
    found = made(wheels)
    listed = json.loads((wheels.parent / "variants" / "flashvar-0.1.0-variants.json").read_text())
    labels = {label: metadata(path)["variants"][label] for label, path in found.items()}
    assert listed.pop("variants") == labels
    assert all(
        {key: value for key, value in metadata(path).items() if key != "variants"} == listed
        for path in found.values()
    )


def test_another_reader_takes_them(wheels: Path) -> None:
    """The published schema is in no package; variantlib's own reader is the judge beside ours."""
    reason = "needs variantlib"
    lists = pytest.importorskip("variantlib.variants_json", reason=reason)
    wheel_info = pytest.importorskip("variantlib.variant_dist_info", reason=reason)
    found = made(wheels)
    listed = json.loads((wheels.parent / "variants" / "flashvar-0.1.0-variants.json").read_text())
    assert set(lists.VariantsJson(copy.deepcopy(listed)).variants) == set(found)
    for label, path in found.items():
        read = wheel_info.VariantDistInfo(archive.read(path)[f"{INFO}/variant.json"], label)
        said = {(one.namespace, one.feature, one.value) for one in read.variants[label].properties}
        assert said == {
            (namespace, feature, value)
            for namespace, features in listed["variants"][label].items()
            for feature, values in features.items()
            for value in values
        }
    listed["variants"]["null"] = {"nvidia": {"sm_arch": ["80 real"]}}
    with pytest.raises(Exception, match="80 real"):
        lists.VariantsJson(listed)


def test_same_bytes_again(wheels: Path) -> None:
    first = {label: path.read_bytes() for label, path in made(wheels).items()}
    assert {label: path.read_bytes() for label, path in made(wheels).items()} == first


def test_older_variants_go(wheels: Path) -> None:
    made(wheels)
    (wheels / "flashvar-0.1.0-py3-none-any.whl").unlink()
    for path in wheels.glob("flashvar_*.whl"):
        path.unlink()
    fake_wheels.plain(wheels, "0.2.0")
    binary(wheels, CODES[0], version="0.2.0")
    made(wheels)
    names = {path.name for path in (wheels.parent / "variants").iterdir()}
    assert len(names) == 3
    assert all("0.2.0" in name for name in names)


def test_the_wheels_themselves_stay(wheels: Path) -> None:
    """Where the variants go into their folder."""
    before = {path: path.read_bytes() for path in wheels.iterdir()}
    for _ in range(2):
        added = variants.write(wheels, wheels, "flashvar")
        assert {*before, *added} == {*wheels.iterdir()}
    assert {path: path.read_bytes() for path in before} == before


def test_every_platform_gets_its_own_wheel(wheels: Path) -> None:
    binary(wheels, CODES[0], platform="manylinux_2_28_other")
    paths = variants.write(wheels, wheels.parent / "variants", "flashvar")
    assert len([path for path in paths if path.suffix == ".whl"]) == len(TARGETS) + 2


def test_a_label_means_one_thing_on_every_platform(wheels: Path) -> None:
    binary(wheels, CODES[0], platform="manylinux_2_28_other", driver=(12, 0))
    with pytest.raises(PackagingError, match="on every platform"):
        made(wheels)


def test_a_subset_of_the_kernels_will_do(wheels: Path) -> None:
    binary(wheels, CODES[0], version="0.1.0+hdim64", platform="manylinux_2_28_other")
    paths = variants.write(wheels, wheels.parent / "variants", "flashvar")
    (subset,) = [path for path in paths if "manylinux_2_28_other" in path.name]
    held = [
        json.loads(text)
        for name, text in archive.read(subset).items()
        if name.endswith(f"/{manifest.FILE_NAME}")
    ]
    assert [one["version"] for one in held] == ["0.1.0+hdim64"]


def test_version_mismatch(wheels: Path) -> None:
    binary(wheels, CODES[0], version="0.0.9", platform="manylinux_2_28_other")
    with pytest.raises(PackagingError, match=r"expected version 0\.1\.0, .* found 0\.0\.9"):
        made(wheels)


def test_no_binaries(tmp_path: Path) -> None:
    fake_wheels.plain(tmp_path)
    with pytest.raises(PackagingError, match="expected wheels of binaries"):
        variants.write(tmp_path, tmp_path / "out", "flashvar")


@pytest.mark.parametrize("versions", [(), ("0.1.0", "0.2.0")], ids=["none", "two"])
def test_one_plain_wheel(versions: tuple[str, ...], tmp_path: Path) -> None:
    for version in versions:
        fake_wheels.plain(tmp_path, version)
    with pytest.raises(PackagingError, match="expected one wheel of flashvar itself"):
        variants.write(tmp_path, tmp_path / "out", "flashvar")


def test_a_wheel_without_a_binary(wheels: Path) -> None:
    tag = f"py3-none-{fake_wheels.PLATFORM}"
    fake_wheels.put(wheels, "flashvar_extra", "0.1.0", tag, {})
    with pytest.raises(PackagingError, match=r"expected one <package>/manifest\.json, found 0"):
        made(wheels)


def valid() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        variant_metadata.document(
            {"sm1": {"cuda_version_lower_bound": ["13.0"], "sm_arch": ["10_real"]}, "null": {}}
        )
    )
    return document


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("default-priorities"),
        lambda d: d["default-priorities"].update(namespace=[]),
        lambda d: d["default-priorities"].update(feature={}),
        lambda d: d["variants"].update({"SM2": d["variants"]["sm1"]}),
        lambda d: d["variants"]["sm1"]["nvidia"].update(sm_arch=[]),
        lambda d: d["variants"]["sm1"]["nvidia"].update(sm_arch=["90a_real"]),
        lambda d: d["variants"]["sm1"]["nvidia"].pop("cuda_version_lower_bound"),
        lambda d: d["variants"].update({"null": d["variants"]["sm1"]}),
        lambda d: d["variants"].update({"sm2": {}}),
        lambda d: d["providers"].update(nvidia={"requires": []}),
        lambda d: d.pop("providers"),
        lambda d: d.update({"$schema": "https://example.org"}),
        lambda d: d.update(more=1),
    ],
    ids=[
        "no-priorities",
        "empty-priorities",
        "unknown-priority",
        "capital-label",
        "no-value",
        "code-of-an-a",
        "no-driver-bound",
        "null-with-properties",
        "label-without-properties",
        "provider-without-plugin",
        "no-providers",
        "other-schema",
        "unknown-key",
    ],
)
def test_the_schema_refuses(spoil: Callable[[Any], object]) -> None:
    spoiled = valid()
    variant_metadata.check(spoiled)
    spoil(spoiled)
    with pytest.raises(PackagingError, match=r"schema\.json: "):
        variant_metadata.check(spoiled)


def test_experimental_is_said(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(Path(__file__).parents[3])]
    output = wheels.parent / "the variants"
    command = [*root, "variants", "--wheels", str(wheels), "--output", str(output)]
    assert main(command) == 2
    assert "expected --experimental" in capsys.readouterr().err
    assert not output.exists()
    assert main([*command, "--experimental"]) == 0
    printed = capsys.readouterr().out
    assert "uv pip install --preview-features wheel-variants" in printed
    assert printed.count(f"'{output}'") == 2


@pytest.mark.parametrize("name", OLDER)
def test_a_variant_for_older_drivers_asks_for_less(name: str, wheels: Path) -> None:
    kind = CONFIG.targets[name].kind
    label = kind.extra.replace("-", "_")
    (properties,) = metadata(made(wheels)[label])["variants"].values()
    assert properties["nvidia"]["cuda_version_lower_bound"] == [f"{kind.cuda}.0"]
    assert f"flashvar/_binaries/{name}/manifest.json" in archive.read(made(wheels)[label])
