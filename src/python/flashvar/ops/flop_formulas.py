"""Registers an op's formulas with `torch.utils.flop_counter`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COUNTER: Final = "torch.utils.flop_counter"


def register(formulas: Mapping[Any, Callable[..., int]]) -> None:
    """Register formulas with torch, and with the counters that are already active.

    To be called where a dispatch mode is active. Does not import the counter: that takes 0.1 s,
    also in programs that never count.
    """
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        return
    for op, formula in formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            for op in formulas:
                registry.setdefault(op, counter.flop_registry[op])
