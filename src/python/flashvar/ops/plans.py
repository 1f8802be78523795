"""What the plans of all ops share: the caches of them, and prototypes of outputs.

A plan holds what depends on shapes, strides, dtypes, devices and options alone. Programs repeat
calls with the same of these thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from flashvar.ops.dispatch_modes import PLAIN

# Lengths that grow token by token make a new plan each. A full cache is emptied, which is cheap.
PLANS_KEPT: Final = 4096
# Recent calls with the same key: of other shapes, strides or dtypes.
_RECENT_KEPT: Final = 4
# Where so many are kept, one of this many others takes a place: a check takes longer to make than
# it saves once, and would be thrown away before its call repeats where many calls alternate.
_CALLS_A_PLACE: Final = 8

# Bound once: looking up a module's attribute takes as long as the call.
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_grad_enabled: Final = torch.is_grad_enabled
_STRIDED: Final = torch.strided

_Made = TypeVar("_Made")


# Recent calls with the same key, and arguments of the same types: what takes the tensors out of the
# arguments, None if all are tensors; of each call the check of its tensors, the plan, and whether
# autograd records it.
_Recent: TypeAlias = tuple[
    Callable[[tuple[Any, ...]], tuple[Any, ...]] | None,
    tuple[tuple[Callable[..., bool], _Made, bool], ...],
]


class Plans(dict[Hashable, _Made]):
    """The plans of a function, by what they depend on; and those of recent calls.

    A recent call of plain tensors is found by one check of all its tensors, that of compiled graphs
    in C++. It compares types, dtypes, devices, sizes, strides, requires_grad and the dispatch keys
    that are in effect: those of a negated view, a transform, a trace or autocast differ. Python
    takes three times as long to ask for all of these.
    """

    def __init__(self) -> None:
        """Nothing was made yet."""
        super().__init__()
        self._recent: dict[Hashable, _Recent[_Made]] = {}
        self._without_place = 0

    def keep(self, key: Hashable, made: _Made) -> None:
        """Add a plan."""
        if len(self) >= PLANS_KEPT:
            self.clear()
        self[key] = made

    def recent(self, key: Hashable, given: tuple[object, ...]) -> tuple[_Made, bool] | None:
        """The plan of a recent call like this one, and whether autograd records it.

        `given`, tensors or None, may be anything. None also where something in torch has to see the
        call. Not meaningful while torch.compile traces.

        Raises:
            TypeError: the key cannot be hashed.
        """
        # Neither these modes nor tangents change dispatch keys.
        if _dispatch_modes() or _function_modes() or forward_ad._current_level >= 0:
            return None
        recent = self._recent.get((key, tuple(map(type, given)), _grad_enabled()))
        if recent is None:
            return None
        pick, calls = recent
        tensors: Any = given if pick is None else pick(given)
        # The check reads strides before anything else: without any, it would end the process.
        for x in tensors:
            if x.layout is not _STRIDED or x.is_nested:
                return None
        for check, made, records in calls:
            if check(*tensors):
                return made, records
        return None

    def remember(self, key: Hashable, given: tuple[torch.Tensor | None, ...], made: _Made) -> None:
        """Let `recent` find the plan of a call of plain tensors that nothing intercepts.

        Not if one tensor is passed twice, which the check does not allow.
        """
        places = [place for place, x in enumerate(given) if x is not None]
        tensors = [x for x in given if x is not None]
        if len({*map(id, tensors)}) < len(tensors) or any(type(x) not in PLAIN for x in tensors):
            return
        key = (key, tuple(map(type, given)), _grad_enabled())
        before = self._recent.get(key)
        others = () if before is None else before[1]
        if len(others) >= _RECENT_KEPT:
            self._without_place += 1
            if self._without_place % _CALLS_A_PLACE:
                return
        check = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        ).check
        records = _grad_enabled() and any(x.requires_grad for x in tensors)
        if len(self._recent) >= PLANS_KEPT:
            self._recent.clear()
        pick = None if len(places) == len(given) else _picks(places)
        self._recent[key] = pick, ((check, made, records), *others[: _RECENT_KEPT - 1])


def _picks(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the entries at some places out of a tuple, as a tuple."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)


def prototype(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its memory freed; empty_like of it is the fastest way to allocate.

    Printing it would crash.
    """
    tensor.untyped_storage().resize_(0)
    return tensor
