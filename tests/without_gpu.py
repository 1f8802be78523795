"""What tests without a GPU share, for their conftest: how a worker runs, and a Python in forks."""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import catching_logs

# What decides who computes, as variables of the environment.
VARIABLES = ("BACKEND", "FORCE_ARCH", "LIB_DIR", "STRICT", "LOG")

# Torch's compiler, and what it loads only as it compiles.
COMPILER = (
    *("torch._dynamo", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"),
    *("torch._inductor.debug", "torch._inductor.pattern_matcher"),
)

# Lines of sources in compiled kernels take a tenth of their compilation.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

# Garbage is looked for after each file, and not in what was there before it: to look through torch
# again and again took a tenth of all tests.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """End a worker of pytest-xdist once it is done: Python takes seconds to take modules apart."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # called last, as what is registered first


def pytest_collection_finish() -> None:
    """Leave out of account what was imported and collected, and what Dynamo does beside it."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards:
        # Dynamo times the guards of each graph, and empties the caches of the CPU before: 20 ms.
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
        # And it looks for garbage after each: 17 ms.
        sys.modules["torch._dynamo.config"].run_gc_after_compile = False  # type: ignore[attr-defined]
    gc.freeze()


_propagating = 0  # of so many loggers, each hands its records on


def _catch_at_root(catching: catching_logs[logging.Handler]) -> logging.Handler:
    """Catch logs as pytest does, at the root logger, to which every logger hands its records.

    Six times a test, pytest looks through all loggers, of which torch and transformers have more
    than a thousand, for those that keep their records to themselves, and adds a handler to each.
    Torch has fifty, and one of them describes all graphs in full as soon as it has a handler.
    """
    global _propagating
    root = logging.getLogger()
    loggers = root.manager.loggerDict
    if len(loggers) != _propagating:
        _propagating = len(loggers)
        for name, logger in loggers.items():
            if isinstance(logger, logging.Logger) and not logger.propagate:
                logger.propagate = True
                if name.startswith("torch."):
                    logger.handlers.clear()
    root.addHandler(catching.handler)
    catching.attached_loggers.append(root)
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    return catching.handler


catching_logs.__enter__ = _catch_at_root  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Give each test random inputs of its own: the same alone, in any order and on any worker."""
    if "torch" in sys.modules:
        # torch.manual_seed seeds GPUs too, and formats the stack once for each kind of them.
        generator = sys.modules["torch"].default_generator
        generator.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While no other worker of pytest-xdist is in the folder."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def served(python: str, folder: Path, *modules: str) -> Iterator[str]:
    """A program that is Python with modules loaded already (forked.py), the same for all workers.

    The first process that needs it starts its server, the last that is done with it ends that.
    """
    folder.mkdir(exist_ok=True)
    script, address = Path(__file__).with_name("forked.py"), folder / "socket"
    program, server, users = folder / "python", folder / "server", folder / "users"
    with alone(folder):
        count = int(users.read_text()) if users.is_file() else 0
        if count == 0:
            address.unlink(missing_ok=True)
            command = [python, str(script), str(address), *modules]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            server.write_text(done.stdout)
            asking = script.with_name("ask_forked.py")
            line = f'exec "{sys.executable}" -IS "{asking}" "{address}" "$@"\n'
            program.write_text(f"#!/bin/sh\n{line}", encoding="utf-8")
            program.chmod(0o755)
        users.write_text(str(count + 1))
    yield str(program)
    with alone(folder):
        count = int(users.read_text()) - 1
        users.write_text(str(count))
        if count == 0:
            os.kill(int(server.read_text()), signal.SIGTERM)


def of_all_workers(factory: pytest.TempPathFactory) -> Path:
    """A folder that workers share: a worker's own is in it."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _python(folder: Path) -> Iterator[str]:
    yield from served(sys.executable, folder / "python", "torch", "pytest")


def _python_with_models(python: str, folder: Path) -> Iterator[str]:
    models = ["transformers.modeling_utils"] if find_spec("transformers") else []
    yield from served(python, folder / "python_with_models", *COMPILER, *models)


_serving: list[Iterator[str]] = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Start workers that test whole folders as forks, each of which loads no torch of its own."""
    if _serving or not any(Path(word).is_dir() for word in config.args):
        return
    folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    first = _python(folder)
    second = _python_with_models(next(first), folder)
    program = next(second)
    _serving.extend((second, first))
    for spec in specs:
        spec.python = program


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """End what serves the workers, whose folder goes next."""
    for one in _serving:
        next(one, None)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Python with torch and pytest loaded already."""
    yield from _python(of_all_workers(tmp_path_factory))


@pytest.fixture(scope="session")
def python_with_nox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Python with nox loaded already, where it is installed, and what commands import beside it."""
    modules = ["nox._cli"] if find_spec("nox") else []
    folder = of_all_workers(tmp_path_factory) / "python_with_nox"
    yield from served(sys.executable, folder, "inspect", "logging", *modules)


@pytest.fixture(scope="session")
def python_with_models(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Python with torch's compiler loaded already, and transformers where it is installed."""
    yield from _python_with_models(python, of_all_workers(tmp_path_factory))


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what was found, opened and chosen, before and after; and the environment."""
    from flashvar.binaries import loader, registry
    from flashvar.integrations import support
    from flashvar.ops.plans import Plans
    from flashvar.selection import resolve

    for name in VARIABLES:
        monkeypatch.delenv(f"FLASHVAR_{name}", raising=False)
    for module, name in (
        (registry, "_unloadable"),
        (registry, "_missing"),
        (loader, "_libraries"),
        (support, "_kept"),
    ):
        monkeypatch.setattr(module, name, {})
    # Plans hold what was chosen. Of ops that are not imported there are none.
    for module in [one for name, one in sys.modules.items() if name.startswith("flashvar.")]:
        for name, value in [*vars(module).items()]:
            if isinstance(value, Plans):
                monkeypatch.setattr(module, name, Plans())
    monkeypatch.setattr(resolve, "_logged", set())
    cached = registry.installed, resolve.choose
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()
