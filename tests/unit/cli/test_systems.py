"""One flashvar for every machine: what runs there, why nothing better, and what would change it.

Each row of MACHINES is judged by the selection and by doctor, as text, as JSON and by exit code.
"""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import fakes
import pytest
from fake_machines import MACHINES, Machine

from flashvar import cli
from flashvar.cli import diagnosis
from flashvar.selection.request import Request
from flashvar.selection.rules import select


def devices(machine: Machine) -> list[int | None]:
    return [device.index for device in machine.system.devices] or [None]


def test_selection(subtests: pytest.Subtests) -> None:
    for (name, machine), op in product(MACHINES.items(), fakes.OPS):
        with subtests.test(machine=name, op=op):
            check_selection(machine, op)


def check_selection(machine: Machine, op: str) -> None:
    decisions = [
        select(
            Request.of(op, machine.dtype, index, head_dim=machine.head_dim),
            machine.system,
            machine.wheels,
        )
        for index in devices(machine)
    ]
    chosen = tuple(one.chosen.candidate if one.chosen else None for one in decisions)
    assert chosen == machine.expected(op)
    candidate, words = machine.reason(op)
    reasons = [one.reason for one in decisions[0].results if one.candidate == candidate]
    assert [reason for reason in reasons if words in reason], decisions[0].explain()


def test_doctor(
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("FLASHVAR_BACKEND", "FLASHVAR_FORCE_ARCH"):
        monkeypatch.delenv(name, raising=False)
    forms = {"text": ([], check_text), "json": (["--json"], check_json)}
    for (name, machine), (words, check) in product(MACHINES.items(), forms.values()):
        wheels = SimpleNamespace(open_all=lambda machine=machine: machine.wheels)
        monkeypatch.setattr(diagnosis, "gather", lambda machine=machine: machine.system)
        monkeypatch.setattr(diagnosis, "loader", wheels)
        with subtests.test(machine=name, words=words):
            code = cli.main(["doctor", *words])
            printed = capsys.readouterr().out
            assert code == machine.exit_code, printed
            check(machine, printed)


def check_json(machine: Machine, printed: str) -> None:
    document = json.loads(printed)
    assert document["healthy"] is (machine.exit_code == 0)
    assert set(document["fixes"]) == set(machine.fixes)
    for op in fakes.OPS:
        asked = [
            one
            for one in document["requests"]
            if (one["function"], one["dtype"], one["axes"].get("head_dim"))
            == (op, machine.dtype, str(machine.head_dim))
        ]
        assert tuple(one["chosen"] for one in asked) == machine.expected(op)
        candidate, words = machine.reason(op)
        results = asked[0]["candidates"]
        assert any(one["candidate"] == candidate and words in one["reason"] for one in results)


def check_text(machine: Machine, printed: str) -> None:
    _, _, better = printed.partition("\nTo run something better\n")
    assert {line.strip() for line in better.splitlines()} == set(machine.fixes)
    for op in fakes.OPS:
        assert machine.reason(op)[1] in printed
        for index, candidate in zip(devices(machine), machine.expected(op), strict=True):
            where = "CPU" if index is None else f"cuda:{index}"
            heads = [line for line in printed.splitlines() if line.startswith(f"  {where}  ")]
            mine = [line for line in heads if op in line and machine.dtype in line]
            served = [line.rpartition(": ")[2] for line in mine]
            assert (candidate or "nothing") in served, printed
