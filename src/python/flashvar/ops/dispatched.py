"""Calls of ops through torch's dispatcher, where modes, transforms and subclasses see them."""

from __future__ import annotations

from typing import Any

from flashvar.ops.arguments import refuse_unknown_subclasses
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.flop_formulas import tell_counters


def dispatched(op: Any, *arguments: Any) -> Any:
    """op(*arguments); a tensor subclass that does not implement it raises InvalidInputError."""
    if is_compiling():
        return op(*arguments)
    tell_counters()
    try:
        return op(*arguments)
    except TypeError as error:
        laid_flat = [y for x in arguments for y in (x if isinstance(x, list) else (x,))]
        refuse_unknown_subclasses(error, tuple(laid_flat))
        raise
