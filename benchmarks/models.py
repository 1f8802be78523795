"""Attention as it is inside of models: the cases named after them, timed as `attention` times."""

from __future__ import annotations

from benchmarks import attention, cases
from benchmarks.report import Options, Report


def run(options: Options) -> Report:
    """Times one layer of each chosen model on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown model or contender.
    """
    return attention.report(cases.models(), options)
