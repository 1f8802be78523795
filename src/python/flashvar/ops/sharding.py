"""What the sharding rules of all ops for torch's DTensor share.

Rules are registered once DTensor is imported: flashvar does not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

DTENSORS: Final = "torch.distributed.tensor"

# A rule gets the op's arguments, specs in place of tensors, and gives pairs of placements: those of
# the results, and those of the arguments, lists of tensors laid flat.
Rule = Callable[..., "list[tuple[list[Any], list[Any]]]"]

_registered: set[Any] = set()


def register(rules: dict[Any, Rule]) -> None:
    """Register rules, by op, if DTensor is imported and they are not registered yet."""
    if DTENSORS not in sys.modules or _registered.issuperset(rules):
        return
    register_sharding: Any = import_module(f"{DTENSORS}.experimental").register_sharding
    for op, rule in rules.items():
        _registered.add(op)
        register_sharding(op)(rule)


def shard(dim: int) -> Any:
    """Over a dimension."""
    return import_module(DTENSORS).Shard(dim)


def replicate() -> Any:
    """Whole on every rank."""
    return import_module(DTENSORS).Replicate()


def partial() -> Any:
    """A sum over the ranks."""
    return import_module(DTENSORS).Partial()
