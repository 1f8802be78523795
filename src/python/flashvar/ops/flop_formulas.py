"""The formulas of ops for `torch.utils.flop_counter`, which counts no op without one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COUNTER: Final = "torch.utils.flop_counter"
_formulas: Final[dict[Any, Callable[..., int]]] = {}


def add(formulas: Mapping[Any, Callable[..., int]]) -> None:
    """Add the formulas of an op."""
    _formulas.update(formulas)


def tell_counters() -> None:
    """Register all formulas with torch, and with the counters that are already active.

    To be called before each call of an op that modes may see. Does not import the counter: that
    takes 0.1 s, also in programs that never count.
    """
    if not torch._C._len_torch_dispatch_stack():
        return
    counter: Any = sys.modules.get(_COUNTER)
    if not hasattr(counter, "register_flop_formula"):  # or another thread is importing it
        return
    for op, formula in _formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            for op in _formulas:
                registry.setdefault(op, counter.flop_registry[op])
