"""`doctor --json` is what `doctor --schema` says, on every fake machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fakes
import pytest
from fake_machines import MACHINES, examined

from flashvar.binaries.registry import Inventory
from flashvar.cli import diagnosis, main, speed
from flashvar.cli.diagnosis import examine
from flashvar.cli.speed import Result, Speed
from flashvar.ops.attention.speed import CELLS
from flashvar.selection.request import Overrides

SCHEMA = json.loads(diagnosis.SCHEMA_FILE.read_text(encoding="utf-8"))
RESULTS = tuple(
    Result("attention", cell, "cuda sm_90", {"flashvar": 400.0}, {"sdpa-cudnn": "no"})
    for cell in CELLS
)


@pytest.fixture(scope="module")
def valid() -> Callable[[Any], bool]:
    """Whether a document is what the schema says."""
    import jsonschema  # takes seconds

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    found: Callable[[Any], bool] = jsonschema.Draft202012Validator(SCHEMA).is_valid
    return found


def document(machine: str, measured: Speed | None = None) -> Any:
    return json.loads(replace(examined(machine), speed=measured).to_json())


def test_the_schema_is_one(valid: Callable[[Any], bool]) -> None:
    assert SCHEMA["properties"]["schema"] == {"const": diagnosis.SCHEMA}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine(machine: str, valid: Callable[[Any], bool]) -> None:
    assert valid(document(machine))


@pytest.mark.parametrize(
    "measured",
    [
        Speed(0, "NVIDIA H200", RESULTS, speed.record_of("NVIDIA H200")),
        Speed(0, "NVIDIA A10", RESULTS),
        Speed(3, None, why="torch sees no cuda:3"),
    ],
    ids=["recorded", "not recorded", "no device"],
)
def test_a_measured_machine(measured: Speed, valid: Callable[[Any], bool]) -> None:
    assert valid(document("H200", measured))


def test_what_is_not_in_the_schema_is_refused(valid: Callable[[Any], bool]) -> None:
    found = document("H200")
    for broken in ({**found, "more": 1}, {key: found[key] for key in found if key != "fixes"}):
        assert not valid(broken)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_a_strict_report_fits_too(valid: Callable[[Any], bool]) -> None:
    skewed = Inventory((fakes.binary("90a", version="0.0.9"),))
    found = json.loads(
        examine(fakes.system(fakes.H100), skewed, Overrides("cuda", "sm_90", True)).to_json()
    )
    assert valid(found)
    assert len(found["errors"]) == 1
