"""Processes that prepare cases at the same time, and then measure them one after the other.

What Triton and torch compile takes most of a run's time, and stays in the process that compiled it.
So each process prepares a share of the cases; once all are ready, each is told to measure its own
when nobody else works. `fill` is for work whose results are kept in caches on disk, so that any
process can measure.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import Final, Generic, TypeVar

from benchmarks.report import INTERRUPTED, Row, reason

# Compiling in a worker must not start workers of its own.
_ALONE: Final = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
Task = TypeVar("Task")


@dataclass(frozen=True)
class _Worker(Generic[Task]):
    """A process, and what it has to prepare."""

    executor: ProcessPoolExecutor
    pid: Future[int]
    share: list[Task]
    prepared: Future[None]


def run(
    names: Sequence[str],
    processes: int,
    prepare: Callable[[Sequence[str]], None],
    measure: Callable[[str], list[Row]],
    lost: Callable[[str, str], list[Row]],
) -> list[Row]:
    """The rows of all cases in their order.

    Args:
        names: the cases.
        processes: how many work; with 0 this one does, and prepares a case when its turn comes.
        prepare: makes cases ready in the process that it is called in.
        measure: the rows of a case that the process has prepared.
        lost: the rows of a case that broke, whose process ended, or that was not measured yet
            when the run was interrupted, with the reason.
    """
    if processes == 0:
        return _each([(name, partial(_both, prepare, measure)) for name in names], lost)
    with ExitStack() as stack:
        workers = _prepared(stack, names, processes, prepare)
        measures = {
            name: partial(_next, one.executor, one.prepared, measure)
            for one in workers
            for name in one.share
        }
        works = [(name, measures[name]) for name in names]
        return _each(works, lost, [one.pid for one in workers])


def fill(tasks: Sequence[Task], processes: int, do: Callable[[Sequence[Task]], None]) -> None:
    """Have processes do a share of the tasks each, for what these leave in caches on disk.

    A task that fails ends its share. Who measures makes what is missing then, or fails in turn.
    """
    with ExitStack() as stack:
        _prepared(stack, tasks, processes, do)


def _prepared(
    stack: ExitStack,
    tasks: Sequence[Task],
    processes: int,
    prepare: Callable[[Sequence[Task]], None],
) -> list[_Worker[Task]]:
    """Processes that have prepared their shares, or failed to; they end with the stack."""
    os.environ.update({name: os.environ.get(name, value) for name, value in _ALONE.items()})
    workers = []
    for share in shares(tasks, processes):
        context = get_context("spawn")  # CUDA does not survive a fork
        executor = stack.enter_context(ProcessPoolExecutor(1, mp_context=context))
        pid = executor.submit(os.getpid)
        workers.append(_Worker(executor, pid, share, executor.submit(prepare, share)))
    with _ended_by_an_interrupt([one.pid for one in workers]):
        start = perf_counter()
        wait([one.prepared for one in workers])
        seconds = perf_counter() - start
        print(
            f"prepared {len(tasks)} cases in {len(workers)} processes: {seconds:.0f} s",
            file=sys.stderr,
        )
    return workers


@contextmanager
def _ended_by_an_interrupt(pids: Sequence[Future[int]]) -> Iterator[None]:
    """End these processes on an interrupt: else the pool waits for their work."""
    try:
        yield
    except KeyboardInterrupt:
        for pid in pids:
            if pid.done():
                os.kill(pid.result(), signal.SIGTERM)
        raise


def _each(
    works: Sequence[tuple[str, Callable[[str], list[Row]]]],
    lost: Callable[[str, str], list[Row]],
    pids: Sequence[Future[int]] = (),
) -> list[Row]:
    """The rows of all cases; after an interrupt, which ends the processes, the rest are lost."""
    rows: list[Row] = []
    for index, (name, work) in enumerate(works):
        try:
            with _ended_by_an_interrupt(pids):
                rows += _try(work, name, lost)
        except KeyboardInterrupt:
            print(f"interrupted in {name}: what was measured before is kept", file=sys.stderr)
            return rows + [row for one, _ in works[index:] for row in lost(one, INTERRUPTED)]
    return rows


def _both(
    prepare: Callable[[Sequence[str]], None], measure: Callable[[str], list[Row]], name: str
) -> list[Row]:
    prepare([name])
    return measure(name)


def _next(
    worker: ProcessPoolExecutor,
    prepared: Future[None],
    measure: Callable[[str], list[Row]],
    name: str,
) -> list[Row]:
    prepared.result()  # raises what went wrong
    return worker.submit(measure, name).result()


def _try(
    work: Callable[[str], list[Row]], name: str, lost: Callable[[str, str], list[Row]]
) -> list[Row]:
    """Rows of a case; a case that breaks does not take the others with it."""
    try:
        return work(name)
    except Exception as error:
        return lost(name, reason(error))


def shares(tasks: Sequence[Task], count: int) -> list[list[Task]]:
    """At most `count` shares, dealt in turn, as neighbors take about the same time."""
    return [list(tasks[index::count]) for index in range(min(count, len(tasks)))]
