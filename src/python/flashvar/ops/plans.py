"""Parts of the plans of all ops: the caches of them, and how outputs are made.

A plan holds what depends on shapes, strides, dtypes, devices and options alone. Programs repeat
calls with the same of these thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch._C._dynamo.guards import TensorGuards, _empty_strided_cpu, _empty_strided_cuda
from torch.autograd import forward_ad

from flashvar.ops.dispatch_modes import PLAIN

# Lengths that grow token by token make a new plan each. A full cache is emptied, which is cheap.
PLANS_KEPT: Final = 4096
# Recent calls with the same key: of other shapes, strides or dtypes.
_RECENT_KEPT: Final = 4
# If _RECENT_KEPT calls are kept, only every n-th other call replaces one. Making a check takes
# longer than it saves once, and where many calls alternate it is dropped before its call repeats.
_CALLS_PER_REPLACEMENT: Final = 8

# Bound once: looking up a module's attribute takes as long as the call.
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_grad_enabled: Final = torch.is_grad_enabled
_STRIDED: Final = torch.strided

_Made = TypeVar("_Made")

# Makes a tensor that is not yet written.
Maker: TypeAlias = Callable[[], torch.Tensor]


# A recent call: the function that takes its tensors, each once, out of the arguments, or None if it
# takes all of them; the indices of arguments that are None, and of pairs that are one tensor; the
# check of the tensors; the plan; whether autograd records the call.
_Recent: TypeAlias = tuple[
    Callable[[tuple[Any, ...]], tuple[Any, ...]] | None,
    tuple[int, ...],
    tuple[tuple[int, int], ...],
    Callable[..., bool],
    _Made,
    bool,
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
        self._recent: dict[Hashable, tuple[_Recent[_Made], ...]] = {}
        self._not_remembered = 0

    def __repr__(self) -> str:
        """The number of plans. Not their tensors: prototypes have no memory to print."""
        return f"Plans of {len(self)} kinds of calls"

    def keep(self, key: Hashable, made: _Made) -> None:
        """Add a plan."""
        if len(self) >= PLANS_KEPT:
            self.clear()
        self[key] = made

    def recent(self, key: Hashable, given: tuple[Any, ...]) -> tuple[_Made, bool] | None:
        """The plan of a recent call like this one, and whether autograd records it.

        `given`, tensors or None, may be anything. None also where something in torch has to see the
        call. Not meaningful while torch.compile traces.

        Raises:
            TypeError: the key cannot be hashed.
        """
        # Neither these modes nor tangents change dispatch keys.
        if _dispatch_modes() or _function_modes() or forward_ad._current_level >= 0:
            return None
        calls = self._recent.get((key, len(given), _grad_enabled()))
        if calls is None:
            return None
        # A check reads strides before anything else: without any, it would end the process.
        for x in given:
            if x is not None and (type(x) not in PLAIN or x.layout is not _STRIDED or x.is_nested):
                return None
        for pick, absent, pairs, check, made, records in calls:
            if pick is None:
                if check(*given):
                    return made, records
            elif _are_alike(given, absent, pairs) and check(*pick(given)):
                return made, records
        return None

    def remember(self, key: Hashable, given: tuple[torch.Tensor | None, ...], made: _Made) -> None:
        """Let `recent` find the plan of a call of plain tensors that nothing intercepts."""
        key = (key, len(given), _grad_enabled())
        others = self._recent.get(key, ())
        if len(others) >= _RECENT_KEPT:
            self._not_remembered += 1
            if self._not_remembered % _CALLS_PER_REPLACEMENT:
                return
        first = {id(x): index for index, x in reversed([*enumerate(given)]) if x is not None}
        tensors = [x for index, x in enumerate(given) if x is not None and first[id(x)] == index]
        if any(type(x) not in PLAIN for x in tensors):
            return
        check = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        ).check
        records = _grad_enabled() and any(x.requires_grad for x in tensors)
        if len(self._recent) >= PLANS_KEPT:
            self._recent.clear()
        absent = tuple(index for index, x in enumerate(given) if x is None)
        pairs = tuple(
            (first[id(x)], index)
            for index, x in enumerate(given)
            if x is not None and first[id(x)] != index
        )
        pick = None if len(tensors) == len(given) else getter(sorted(first.values()))
        call = pick, absent, pairs, check, made, records
        self._recent[key] = (call, *others[: _RECENT_KEPT - 1])


def _are_alike(
    given: tuple[object, ...], absent: tuple[int, ...], pairs: tuple[tuple[int, int], ...]
) -> bool:
    """Whether the arguments `absent` are None, and those of each pair are one object."""
    for index in absent:
        if given[index] is not None:
            return False
    for first, second in pairs:  # noqa: SIM110 (a generator takes twice as long)
        if given[first] is not given[second]:
            return False
    return True


def getter(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The function that takes the entries at indices out of a tuple, as a tuple."""
    if len(indices) == 1:
        return itemgetter(slice(indices[0], indices[0] + 1))
    return itemgetter(*indices)


def maker(like: torch.Tensor) -> Maker:
    """The function that makes tensors like `empty_like(like)`."""
    return maker_of(torch.empty_like(like, device="meta"), like.device)


def maker_of(dense: torch.Tensor, device: torch.device) -> Maker:
    """The function that makes tensors like `dense`, as compiled graphs make theirs.

    It skips the dispatcher, which takes as long as the allocation itself. Plans may do so: torch
    sees the call of an op, not what is within.
    """
    size, strides, dtype = tuple(dense.shape), dense.stride(), dense.dtype
    if device.type == "cpu":
        return partial(_empty_strided_cpu, size, strides, dtype)
    through_dispatcher = partial(torch.empty_strided, size, strides, dtype=dtype, device=device)
    if device.type != "cuda":
        return through_dispatcher
    index, current_device = device.index, torch._C._cuda_getDevice

    def make() -> torch.Tensor:
        # Torch's shorter way takes the current device.
        if current_device() == index:
            return _empty_strided_cuda(size, strides, dtype)
        return through_dispatcher()

    return make


def prototype(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its memory freed: what zeros_like needs of it. Printing it would crash."""
    tensor.untyped_storage().resize_(0)
    return tensor
