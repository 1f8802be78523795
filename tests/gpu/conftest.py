"""Options, backends and the record of the GPU tests, which need pytest, torch and a device alone.

    python -m pytest tests/gpu --require-device --results results.json --shard 1/2 --seed 7

Fresh random inputs each time; the seed is in the header and in the record.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

_NO_DEVICE = "torch sees no CUDA device"
_SEED = pytest.StashKey[int]()
_RECORD = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashvar")
    group.addoption(
        "--results",
        metavar="FILE",
        default=os.environ.get("FLASHVAR_GPU_RESULTS"),
        help="write every case, run or skipped, as JSON",
    )
    group.addoption(
        "--shard", metavar="I/N", default="1/1", help="run every N-th test from the I-th"
    )
    group.addoption(
        "--require-device",
        action="store_true",
        help="fail where there is no CUDA device, or no binary that serves it",
    )
    group.addoption("--seed", type=int, default=None, help="of all random inputs; fresh by default")


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--seed")
    config.stash[_SEED] = random.SystemRandom().getrandbits(32) if seed is None else seed
    config.stash[_RECORD] = []


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"flashvar: --seed {config.stash[_SEED]}, {device}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_case" in metafunc.fixturenames:
        from random_cases import covering

        cases = covering(metafunc.config.stash[_SEED])
        metafunc.parametrize("random_case", cases, ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, _, count = config.getoption("--shard").partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard expects I/N with 1 <= I <= N, got {index}/{count}")
    part, of = int(index) - 1, int(count)
    config.hook.pytest_deselected(
        items=[item for number, item in enumerate(items) if number % of != part]
    )
    items[:] = items[part::of]
    if config.getoption("--require-device") and (lacking := _lacking()):
        raise pytest.UsageError(f"--require-device: {lacking}")
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=_NO_DEVICE))


def _lacking() -> str | None:
    """Why nothing compiled would be tested here; None where a binary serves the device."""
    from flashvar import registry
    from flashvar.selection import select
    from flashvar.system import gather
    from flashvar.verdicts import Overrides, Request

    if not torch.cuda.is_available():
        return _NO_DEVICE
    system, inventory, device = gather(), registry.installed(), torch.cuda.current_device()
    overrides = Overrides.from_environment("cuda")
    explained = "no binary is installed"
    rows = (row for binary in inventory.binaries for row in binary.manifest.kernels)
    for row in rows:
        request = Request(row.op, row.dtype or "", device, row.head_dim)
        decision = select(request, system, inventory, overrides)
        if decision.chosen:
            return None
        explained = decision.explain()
    return f"no binary serves the device; nox -s build-dev\n{explained}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed this test's random inputs, each test differently."""
    own = random.Random(f"{request.config.stash[_SEED]} {request.node.nodeid}").getrandbits(62)
    torch.manual_seed(own)
    return own


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest, seed: int) -> str:
    """Each backend in turn; inputs are seeded before it is used."""
    name: str = request.param
    return name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    # The phase that decides: a skip or an error may come in setup, everything else from the call.
    if report.when == "call" or report.outcome != "passed":
        skipped = report.outcome == "skipped"
        item.config.stash[_RECORD].append(
            {
                "case": item.nodeid,
                "outcome": report.outcome,
                "seconds": round(report.duration, 4),
                "reason": report.longrepr[2] if skipped else None,
            }
        )
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--results")
    if not target:
        return
    record = session.config.stash[_RECORD]
    outcomes = [case["outcome"] for case in record]
    document = {
        "seed": session.config.stash[_SEED],
        "shard": session.config.getoption("--shard"),
        "forced_architecture": os.environ.get("FLASHVAR_FORCE_ARCH"),
        **_environment(),
        "counts": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "cases": record,
    }
    Path(target).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _environment() -> dict[str, Any]:
    from flashvar import registry
    from flashvar.system import gather

    return {
        "system": asdict(gather()),
        "binaries": [
            {
                "architecture": binary.architecture.name,
                "code_kinds": binary.manifest.code_kinds,
                "version": binary.manifest.version,
                "source": asdict(binary.manifest.source),
                "toolkit": asdict(binary.manifest.toolkit),
            }
            for binary in registry.installed().binaries
        ],
    }
