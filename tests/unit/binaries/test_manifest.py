from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest

from flashvar.binaries import manifest as manifests
from flashvar.errors import ManifestError

WHOLE = fakes.manifest("90a")
Document = dict[str, Any]


def document() -> Document:
    parsed: Document = json.loads(WHOLE.to_json())
    return parsed


def test_what_is_written_is_read_back() -> None:
    assert manifests.parse(WHOLE.to_json()) == WHOLE


def test_written_keys_are_those_of_the_schema() -> None:
    assert list(document()) == [
        "schema",
        "abi",
        "project",
        "version",
        "distribution",
        "source",
        "architecture",
        "code",
        "code_kinds",
        "toolkit",
        "minimum_driver",
        "platform",
        "library",
        "kernels",
    ]


def test_axes_of_a_kernel_are_the_keys_that_are_not_fixed() -> None:
    row = manifests.parse(WHOLE.to_json()).kernels[0]
    assert row.axes == (("dtype", "bf16"), ("head_dim", 32))
    assert (row.dtype, row.values) == ("bf16", {"head_dim": 32})


def test_kernel_with_a_pair_of_head_dims() -> None:
    pair = fakes.kernel(dtype="bf16", head_dim=192, head_dim_v=128)
    text = replace(WHOLE, kernels=(pair,)).to_json()
    row = json.loads(text)["kernels"][0]
    assert (row["name"], row["head_dim"], row["head_dim_v"]) == (
        "attention_fwd_bf16_hdim192x128",
        192,
        128,
    )
    (read,) = manifests.parse(text).kernels
    assert read == pair
    assert read.values == {"head_dim": (192, 128)}


def test_without_a_pair_values_are_as_wide_as_keys() -> None:
    row = manifests.parse(WHOLE.to_json()).kernels[0]
    assert row.values == {"head_dim": 32}
    assert "head_dim_v" not in document()["kernels"][0]


def test_kernel_without_head_dim() -> None:
    changed = document()
    del changed["kernels"][0]["head_dim"]
    changed["kernels"][0]["name"] = "attention_fwd_bf16"
    assert manifests.parse(json.dumps(changed)).kernels[0].values == {}


def put(value: object, *path: str | int) -> Callable[[Document], None]:
    """A change that sets the value at `path`."""

    def change(changed: Any) -> None:
        for key in path[:-1]:
            changed = changed[key]
        changed[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        pytest.param(put(1, "schema"), "schema", ["expected 2", "found 1"], id="schema"),
        pytest.param(put("1", "abi"), "abi", ["integer", 'found "1"'], id="abi as text"),
        pytest.param(put(True, "abi"), "abi", ["integer", "found true"], id="abi as bool"),
        pytest.param(put(-1, "abi"), "abi", ["not negative", "-1"], id="negative abi"),
        pytest.param(put("", "version"), "version", ["not empty"], id="empty version"),
        pytest.param(put("1\x1b[2J", "version"), "version", ["printable"], id="escape sequence"),
        pytest.param(put("1\nrow", "platform"), "platform", ["printable"], id="two lines"),
        pytest.param(put("\ud800", "version"), "version", ["printable"], id="surrogate"),
        pytest.param(put("1" * 9999, "version"), "version", ["printable"], id="endless"),
        pytest.param(put(1, "extra"), "extra", ["no such key"], id="unknown key"),
        pytest.param(put("sm_80", "architecture"), "architecture", ["90a", "sm_80"], id="mismatch"),
        pytest.param(put("9", "code"), "code", ["an architecture", "'9'"], id="bad code"),
        pytest.param(put(["ptx"], "code_kinds"), "code_kinds", ['["ptx"]'], id="code kinds"),
        pytest.param(put([], "source"), "source", ["an object", "[]"], id="source not an object"),
        pytest.param(put("no", "source", "dirty"), "source.dirty", ["true, false"], id="dirty"),
        pytest.param(put(1, "source", "revision"), "source.revision", ["commit"], id="revision"),
        pytest.param(put("x", "source", "hash"), "source.hash", ["64"], id="source hash"),
        pytest.param(
            put([13], "minimum_driver", "cuda"), "minimum_driver.cuda", ["[13]"], id="driver"
        ),
        pytest.param(
            put("../x.so", "library", "file"), "library.file", ["bare name"], id="path in file"
        ),
        pytest.param(
            put("F" * 64, "library", "sha256"), "library.sha256", ["lower-case"], id="sha256"
        ),
        pytest.param(put([], "kernels"), "kernels", ["not empty"], id="no kernels"),
        pytest.param(put([1], "kernels"), "kernels[0]", ["an object"], id="kernel not an object"),
        pytest.param(
            put("other", "kernels", 0, "name"), "kernels[0].name", ["hdim32"], id="kernel name"
        ),
        pytest.param(
            put([64, "x"], "kernels", 1, "tile"), "kernels[1].tile[1]", ['"x"'], id="tile"
        ),
        pytest.param(
            put(None, "kernels", 2, "threads"), "kernels[2].threads", ["null"], id="threads"
        ),
        pytest.param(
            put(1.5, "kernels", 0, "head_dim"), "kernels[0].head_dim", ["axis"], id="axis value"
        ),
    ],
)
def test_wrong_value_is_named(
    change: Callable[[Document], None], key: str, words: list[str]
) -> None:
    changed = document()
    change(changed)
    with pytest.raises(ManifestError) as caught:
        manifests.parse(json.dumps(changed))
    message = str(caught.value)
    assert message.startswith(f"{key}: ")
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("key", list(document()))
def test_missing_key_is_named(key: str) -> None:
    changed = document()
    del changed[key]
    with pytest.raises(ManifestError, match=f"^{key}: expected a value"):
        manifests.parse(json.dumps(changed))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", WHOLE.to_json()[:-10], "[" * 100_000],
    ids=["empty", "open", "list", "null", "truncated", "deep"],
)
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="expected"):
        manifests.parse(text)


def test_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json: expected a manifest, found no file"):
        manifests.read(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match=r"manifest\.json: expected a readable manifest"):
        manifests.read(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ManifestError, match=r"manifest\.json: schema: expected"):
        manifests.read(tmp_path / "manifest.json")


def test_kernel_listed_twice_is_refused() -> None:
    changed = document()
    changed["kernels"].append(changed["kernels"][0])
    with pytest.raises(ManifestError, match="expected each kernel once, found attention_fwd"):
        manifests.parse(json.dumps(changed))
