"""What the plans of all ops share: the caches of them, and prototypes of outputs.

A plan holds what depends on shapes, strides, dtypes, devices and options alone. Programs repeat
calls with the same of these thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from flashvar.ops.dispatch_modes import PLAIN

# Lengths that grow token by token make a new plan each. A full cache is emptied, which is cheap.
PLANS_KEPT: Final = 4096
# Recent calls with the same key: of other shapes, strides or dtypes.
_RECENT_KEPT: Final = 4

# Bound once: looking up a module's attribute takes as long as the call.
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_grad_enabled: Final = torch.is_grad_enabled
_STRIDED: Final = torch.strided

_Made = TypeVar("_Made")


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
        self._recent: dict[Hashable, tuple[tuple[Callable[..., bool], _Made, bool], ...]] = {}

    def keep(self, key: Hashable, made: _Made) -> None:
        """Add a plan."""
        if len(self) >= PLANS_KEPT:
            self.clear()
        self[key] = made

    def recent(self, key: Hashable, tensors: tuple[torch.Tensor, ...]) -> tuple[_Made, bool] | None:
        """The plan of a recent call like this one, and whether autograd records it.

        `tensors` may be anything. None also where something in torch has to see the call. Not
        meaningful while torch.compile traces.

        Raises:
            TypeError: the key cannot be hashed.
        """
        # Neither these modes nor tangents change dispatch keys.
        if _dispatch_modes() or _function_modes() or forward_ad._current_level >= 0:
            return None
        # The check reads strides before anything else: without any, it would end the process.
        for x in tensors:
            if type(x) not in PLAIN or x.layout is not _STRIDED or x.is_nested:
                return None
        for check, made, records in self._recent.get((key, _grad_enabled()), ()):
            if check(*tensors):
                return made, records
        return None

    def remember(self, key: Hashable, tensors: tuple[torch.Tensor, ...], made: _Made) -> None:
        """Let `recent` find the plan of a call of plain tensors that nothing intercepts."""
        check = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        ).check
        if not check(*tensors):  # one tensor is passed twice
            return
        key = (key, _grad_enabled())
        records = _grad_enabled() and any(x.requires_grad for x in tensors)
        if len(self._recent) >= PLANS_KEPT:
            self._recent.clear()
        others = self._recent.get(key, ())[: _RECENT_KEPT - 1]
        self._recent[key] = ((check, made, records), *others)


def prototype(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its memory freed; empty_like of it is the fastest way to allocate.

    Printing it would crash.
    """
    tensor.untyped_storage().resize_(0)
    return tensor
