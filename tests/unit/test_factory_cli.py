"""The command line: results on stdout, one message and the error's exit code otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashvar_factory.__main__ import main

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["--root", str(ROOT), *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_json_is_the_whole_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "list", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert len(document["builds"]) == 4
    assert {len(build["kernels"]) for build in document["builds"]} == {12}
    assert document["builds"][3]["code"] == "90a"


def test_list_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "sm89", "hdim=64", "dtype=bf16")
    assert code == 0
    assert out.splitlines()[1:] == ["  attention_fwd_bf16_hdim64"]
    assert out.startswith("flashvar-sm89 ")


@pytest.mark.parametrize("command", ["list", "configure", "build", "develop", "wheels"])
def test_unknown_word(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, command, "hdmi=64")
    assert (code, out) == (2, "")
    assert err.startswith(f"{command}: hdmi=64: unknown word")
    assert err.count("\n") == 1


def test_as_a_module_outside_a_project(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashvar_factory", "list"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "src" / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "variants.toml: expected a readable file" in done.stderr
    assert "Traceback" not in done.stderr
