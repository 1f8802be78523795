"""Attention of sizes that nobody chose, drawn at random, timed as `attention` times."""

from __future__ import annotations

from benchmarks import attention, cases
from benchmarks.report import Options, Report


def run(options: Options) -> Report:
    """Times each chosen call on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown call or contender.
    """
    return attention.report(cases.random_calls(), options)
