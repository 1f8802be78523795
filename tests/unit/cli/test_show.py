"""`flashvar show`: binaries and kernels as their manifests describe them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from installed import put_binary

import flashvar
from flashvar.binaries.manifest import Manifest
from flashvar.binaries.registry import Inventory
from flashvar.cli import main, page_text, show

SOURCES = Path(flashvar.__file__).parents[1]


def hopper() -> Manifest:
    manifest = fakes.manifest("90a", (64, 96))
    kernels = tuple(
        replace(row, launches=fakes.TWO_FAMILIES, registers=254) for row in manifest.kernels
    )
    return replace(manifest, kernels=kernels)


@pytest.fixture
def folder(fresh_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FLASHVAR_LIB_DIR with two binaries."""
    put_binary(tmp_path / "sm80", fakes.manifest("80"))
    put_binary(tmp_path / "sm90", hopper())
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path))
    return tmp_path


def section(text: str, title: str) -> list[str]:
    return text.partition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()


def test_everything_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith(": 2 binaries, 24 kernels.")
    facts = section(text, "Binaries")
    for line in (
        f"      library  {folder / 'sm80' / 'libflashvar_sm80.so'}",
        "      toolkit  nvcc 13.0.88",
        "      driver   580 or newer (CUDA 13.0)",
        "      code     90a, sass",
    ):
        assert line in facts
    kernels = [" ".join(line.split()) for line in section(text, "Kernels of sm_90")]
    assert kernels == [
        "attention_fwd",
        "head dim dtypes family tile threads regs shared spills",
        "64 bf16, fp16 wgmma 128x64 128 254 48.0 KiB -",
        "96 bf16, fp16 wgmma 128x64 128 254 48.0 KiB -",
        "attention_bwd",
        "head dim dtypes family tile threads regs shared spills",
        "64 bf16, fp16 wgmma 128x64 128 254 48.0 KiB -",
        "96 bf16, fp16 wgmma 128x64 128 254 48.0 KiB -",
        show._OF_SEVERAL,
    ]


@pytest.mark.parametrize("name", ["sm_90", "sm90", "90"])
def test_one_architecture(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name]) == 0
    text = capsys.readouterr().out
    assert "1 binary, 8 kernels." in text
    assert "sm_80" not in text


def test_json_holds_the_manifest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    second = document["binaries"][1]
    assert second["library_path"] == str(folder / "sm90" / "libflashvar_sm90.so")
    kernels = {row["name"]: row for row in second["manifest"]["kernels"]}
    assert kernels["attention_fwd_fp16_hdim96"]["registers"] == 254
    rules = kernels["attention_bwd_bf16_hdim64"]["families"]
    assert [rule["family"] for rule in rules] == ["wgmma", "mma.sync"]


def test_a_library_with_other_bytes_is_not_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_binary(folder / "sm80-second", fakes.manifest("80"))
    (folder / "sm80" / "libflashvar_sm80.so").write_bytes(b"\0\0\0\1")
    assert main(["show", "sm_80", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (used,), (rejected,) = document["binaries"], document["rejected"]
    assert Path(used["library_path"]).parent == folder / "sm80-second"
    assert rejected["directory"] == str(folder / "sm80")
    assert "expected sha256" in rejected["reason"]


@pytest.mark.parametrize("words", [["show"], ["show", "sm_120"]])
def test_nothing_found(
    words: list[str],
    fresh_registry: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if len(words) > 1:
        put_binary(tmp_path / "sm80", fakes.manifest("80"))
        monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path))
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    found = (
        "None of them is installed. Installed: sm_80."
        if len(words) > 1
        else "No binary is installed."
    )
    assert lines[0].endswith(f": {found}")
    assert lines[-1] == "  flashvar doctor"


def test_what_is_no_architecture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "hopper"]) == 2
    assert "expected an architecture such as sm_89 or 8.9" in capsys.readouterr().err


def test_a_refused_binary_is_shown_with_its_reason() -> None:
    inventory = Inventory(fakes.inventory("80").binaries, (fakes.REPLACED,))
    lines = page_text.render(show.page(inventory)).splitlines()
    assert "  /b      replaced by wheel a" in lines


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits(width: int) -> None:
    inventory = Inventory((*fakes.inventory("80", "86", "89").binaries,), (fakes.REPLACED,))
    text = page_text.render(show.page(inventory), width)
    assert max(map(len, text.splitlines())) <= width


def test_it_imports_no_framework() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from flashvar.cli import main; sys.exit(main(['show', '--json']))"
    )
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["schema"] == 1
