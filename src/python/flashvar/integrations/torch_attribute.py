"""The attribute `torch.nn.functional.scaled_dot_product_attention`, shared with all who replace it.

Others replace it too (torch.distributed's context_parallel, tests, profilers), before flashvar or
after it, and put back what they found in any order. So while flashvar is active its function lies
there only in the place of torch's own: what somebody else puts there stays, and as soon as torch's
own is put back, flashvar's is.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn import functional

__all__ = ["OWN", "REPLACED", "is_replaced_by_others", "put", "read_as_own", "take_away"]

# Not what the attribute is at the time of this import: that may be somebody else's.
OWN: Final = torch._C._nn.scaled_dot_product_attention

REPLACED: Final = (
    "torch's scaled_dot_product_attention is replaced by somebody (context_parallel, for example)"
)

_NAME: Final = "scaled_dot_product_attention"
_there: Final = functional.__dict__


class _Reading(threading.local):
    own = False


_reading: Final = _Reading()
_function: Callable[..., Any] | None = None  # flashvar's
_active = False


class _Functional(ModuleType):
    """torch.nn.functional while flashvar is active."""

    @property
    def scaled_dot_product_attention(self) -> Any:
        """The function that lies there."""
        found = _there[_NAME]
        return OWN if found is _function and _reading.own else found

    @scaled_dot_product_attention.setter
    def scaled_dot_product_attention(self, function: Any) -> None:
        _there[_NAME] = function
        _settle()

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def put(function: Callable[..., Any]) -> None:
    """Let flashvar's function lie there whenever torch's own would."""
    global _function, _active
    _function, _active = function, True
    functional.__class__ = _Functional
    _settle()


def take_away() -> None:
    """Undo `put`."""
    global _active
    _active = False
    _settle()


def _settle() -> None:
    if is_replaced_by_others():
        return
    _there[_NAME] = _function if _active else OWN
    if not _active:
        functional.__class__ = ModuleType


def is_replaced_by_others() -> bool:
    """Whether calls of the function are somebody else's, context_parallel's for example."""
    found = functional.scaled_dot_product_attention
    return found is not OWN and found is not _function


@contextmanager
def read_as_own() -> Iterator[None]:
    """Torch's own, for who asks in this thread which function it was that was called."""
    before, _reading.own = _reading.own, True
    try:
        yield
    finally:
        _reading.own = before
