"""Conditions on sizes that a traced graph may not know.

A size that depends on values, such as the number of entries that nonzero() finds, is unknown until
the graph runs, and conditions on it have no truth value before. Checks that such conditions decide
are left to the run of the op, which checks its arguments again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashvar.ops.dispatch_modes import is_compiling


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold."""
    # While torch.compile traces, a symbol also counts as a bool.
    if not is_compiling() and not isinstance(condition, torch.SymBool):
        return bool(condition)
    # Imported here because it takes long; where there are symbols it has been.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def differ(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are known to differ."""
    if len(sizes) != len(others):
        return True
    return any(is_known(one != other) for one, other in zip(sizes, others, strict=True))


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two sizes, which may be symbols."""
    # torch.compile of torch 2.8 traces no sym_min of numbers.
    if type(one) is int and type(other) is int:
        return min(one, other)
    return torch.sym_min(one, other)
