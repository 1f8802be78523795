"""Options, backends and the record of the GPU tests, which need pytest, torch and a device alone.

    python -m pytest tests/gpu --require-device --results results.json --shard 1/3 --seed 7
    python -m pytest tests/gpu --rehearse            # the tests themselves, on the CPU's reference
    python -m pytest tests/gpu tests/gpu/test_merge_states.py     # that file alone
    python tests/gpu/shards.py -j 14 --results results.json

Fresh random inputs each time; the seed is in the header and in the record.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

_BACKENDS = ["cuda", "triton"]
_MOST_CACHED = 1 << 30  # bytes
_NO_DEVICE = "torch sees no CUDA device"
_SEED = pytest.StashKey[int]()
_RECORD = pytest.StashKey[list[dict[str, Any]]]()
_LEFT_OUT = pytest.StashKey[int]()
# A run with one of these has reached its last test.
_AT_THE_END = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashvar")
    group.addoption(
        "--results",
        metavar="FILE",
        default=os.environ.get("FLASHVAR_GPU_RESULTS"),
        help="write every case, run or skipped, as JSON",
    )
    group.addoption(
        "--shard",
        metavar="I/N",
        default="1/1",
        help="run the I-th of N parts: the last has the tests marked large, the others the rest",
    )
    group.addoption(
        "--require-device",
        action="store_true",
        help="fail where there is no CUDA device, or no binary that serves it",
    )
    group.addoption(
        "--rehearse", action="store_true", help="run on the CPU, with the reference as the backend"
    )
    group.addoption(
        "--backend",
        choices=_BACKENDS,
        help="leave out tests of the other backend's kernels; the record counts for this one",
    )
    group.addoption("--seed", type=int, default=None, help="of all random inputs; fresh by default")
    group.addoption(
        "--without", metavar="FILE", help="leave out the cases that this record has: run the others"
    )


def pytest_configure(config: pytest.Config) -> None:
    # As Ctrl-C: what was run until then is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "large: takes much of a device's memory; the last part of --shard has these"
    )
    config.addinivalue_line(
        "markers", "kernels_of(backend): runs this backend's kernels, and no other's"
    )
    _narrow(config)
    seed = config.getoption("--seed")
    config.stash[_SEED] = random.SystemRandom().getrandbits(32) if seed is None else seed
    config.stash[_RECORD] = []
    config.stash[_LEFT_OUT] = 0


def _narrow(config: pytest.Config) -> None:
    """Take files of this folder for a choice of them: nox and shards.py name the folder as well."""
    files = [one for one in config.args if _place(config, one) != _HERE]
    if files and all(_place(config, one).is_relative_to(_HERE) for one in files):
        config.args[:] = files


def _place(config: pytest.Config, argument: str) -> Path:
    """The file or folder that an argument names, behind which may be a test's name."""
    return (config.invocation_params.dir / argument.partition("::")[0]).resolve()


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"flashvar: --seed {config.stash[_SEED]}, {device}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_case" in metafunc.fixturenames:
        from random_cases import covering

        cases = covering(metafunc.config.stash[_SEED])
        metafunc.parametrize("random_case", cases, ids=str)
    if "backend" in metafunc.fixturenames:
        rehearsed = metafunc.config.getoption("--rehearse")
        mark = metafunc.definition.get_closest_marker("kernels_of")
        named = list(mark.args) if mark else _BACKENDS
        backends = ["reference"] if rehearsed else named
        metafunc.parametrize("backend", backends, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose among the tests of this folder; `pytest tests` collects others too."""
    index, _, count = config.getoption("--shard").partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard expects I/N with 1 <= I <= N, found {index}/{count}")
    own = [item for item in items if item.path.is_relative_to(_HERE)]
    if backend := config.getoption("--backend"):
        wanted = [item for item in own if _backend(item) in (backend, "other")]
        _deselect(config, items, set(own).difference(wanted))
        own = wanted
    if record := config.getoption("--without"):
        from benchmarks import result_file

        known = {case["case"] for case in result_file.read(Path(record))["cases"]}
        wanted = [item for item in own if item.nodeid not in known]
        _deselect(config, items, set(own).difference(wanted))
        own = wanted
    others = set(own) - _part(own, int(index) - 1, int(count))
    config.stash[_LEFT_OUT] = len(others)
    _deselect(config, items, others)
    if config.getoption("--require-device") and (lacking := _lacking()):
        raise pytest.UsageError(f"--require-device: {lacking}")
    if not (torch.cuda.is_available() or config.getoption("--rehearse")):
        for item in own:
            item.add_marker(pytest.mark.skip(reason=_NO_DEVICE))


def _deselect(config: pytest.Config, items: list[pytest.Item], left: set[pytest.Item]) -> None:
    """Leave tests out of those that are collected."""
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def _backend(item: pytest.Item) -> str:
    """The backend that a test asks for: by the mark `kernels_of`, or by a parameter."""
    mark = item.get_closest_marker("kernels_of")
    if mark:
        return str(mark.args[0])
    params = item.callspec.params if hasattr(item, "callspec") else {}
    names = (value for value in params.values() if isinstance(value, str))
    return next((name for name in names if name in _BACKENDS), "other")


def _part(items: list[pytest.Item], part: int, count: int) -> set[pytest.Item]:
    """The tests of one of `count` parts."""
    if count == 1:
        return set(items)
    from shares import seconds_before, shares

    large = {item for item in items if item.get_closest_marker("large")}
    if part == count - 1:
        return large
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item not in large:
            groups.setdefault(_kernel(item), []).append(item)
    cases = {kernel: [item.nodeid for item in group] for kernel, group in groups.items()}
    share_of = shares(cases, seconds_before(), count - 1)
    return {item for kernel, group in groups.items() if share_of[kernel] == part for item in group}


def _kernel(item: pytest.Item) -> str:
    """What decides the kernels of a test, so that a shard compiles Triton's once: not its name.

    Nor what its module says that it decides none, SAME_KERNELS.
    """
    params = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    same = getattr(getattr(item, "module", None), "SAME_KERNELS", ())
    deciding = sorted((name, str(value)) for name, value in params.items() if name not in same)
    return f"{item.path.name} {deciding}"


def _lacking() -> str | None:
    """Why nothing compiled would be tested here; None where a binary serves the device."""
    from flashvar.binaries import registry
    from flashvar.machine.system import gather
    from flashvar.selection.request import Overrides, Request
    from flashvar.selection.rules import select

    if not torch.cuda.is_available():
        return _NO_DEVICE
    system, inventory, device = gather(), registry.installed(), torch.cuda.current_device()
    overrides = Overrides.from_environment("cuda")
    explained = "no binary is installed"
    rows = (row for binary in inventory.binaries for row in binary.manifest.kernels)
    for row in rows:
        request = Request.of(row.function, row.dtype or "", device, **row.values)
        decision = select(request, system, inventory, overrides)
        if decision.chosen:
            return None
        explained = decision.explain()
    return f"no binary serves the device; nox -s build-dev\n{explained}"


@pytest.fixture(scope="session", autouse=True)
def _context_of_backwards() -> None:
    """Give autograd's thread a CUDA context: torch warns of a thread that calls cuBLAS first."""
    if torch.cuda.is_available():
        x = torch.ones(1, device="cuda", requires_grad=True)
        (x * x).sum().backward()


@pytest.fixture(autouse=True)
def _cached_memory() -> Iterator[None]:
    """Give back what a test leaves cached: others share the device, or need most of it."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > _MOST_CACHED:
        torch.cuda.empty_cache()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed this test's random inputs, each test differently."""
    own = random.Random(f"{request.config.stash[_SEED]} {request.node.nodeid}").getrandbits(62)
    torch.manual_seed(own)
    return own


@pytest.fixture
def backend(request: pytest.FixtureRequest, seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend in turn; inputs are seeded before it is used, and nothing stands in for it."""
    name: str = request.param
    if name != "reference":
        from flashvar.backends.reference import attention as reference

        for function in ("prepare_forward", "prepare_backward"):
            monkeypatch.setattr(reference, function, _refuse)
    return name


def _refuse(*_: object) -> None:
    raise AssertionError("the reference was asked in place of the backend that was named")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    # The phase that decides: a skip or an error may come in setup, everything else from the call.
    if report.when == "call" or report.outcome != "passed":
        item.config.stash[_RECORD].append(
            {
                "case": item.nodeid,
                "backend": _backend(item),
                "outcome": report.outcome,
                # Whole seconds of slow cases alone: so that two records can be diffed.
                "seconds": round(report.duration) or None,
                "reason": _reason(report),
            }
        )
    return report


def _reason(report: pytest.TestReport) -> str | None:
    """Why a test was skipped, or the first line of what failed."""
    if report.outcome == "skipped":
        reason: str = report.longrepr[2]  # type: ignore[index]
        return reason
    crash = getattr(report.longrepr, "reprcrash", None)
    return None if crash is None else crash.message.partition("\n")[0]


def _chosen(config: pytest.Config) -> list[str]:
    """The words by which a part of the tests was chosen; none of a run of all of them."""
    options = {"-k": "keyword", "-m": "markexpr", "--deselect": "deselect", "--ignore": "ignore"}
    options |= {"--ignore-glob": "ignore_glob", "--lf": "lf", "--sw": "stepwise"}
    # Those of pytest's cache are not there without its plugin.
    found = [
        f"{word} {value}"
        for word, name in options.items()
        if (value := config.getoption(name, None))
    ]
    named = [(one, _place(config, one)) for one in config.args]
    return [*found, *(_from_root(one, place) for one, place in named if place != _HERE)]


def _from_root(argument: str, place: Path) -> str:
    """What an argument names, however it was written."""
    root = _HERE.parents[1]
    path = place.relative_to(root).as_posix() if place.is_relative_to(root) else str(place)
    return path + argument[len(argument.partition("::")[0]) :]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    target = session.config.getoption("--results")
    if target:
        from record import write

        about = {
            "seed": session.config.stash[_SEED],
            "shard": session.config.getoption("--shard"),
            "left_to_other_shards": session.config.stash[_LEFT_OUT],
            "chosen": _chosen(session.config),
            "ended_early": exitstatus not in _AT_THE_END,
        }
        write(Path(target), about, session.config.stash[_RECORD])
