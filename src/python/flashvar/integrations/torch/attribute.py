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


class _Thread(threading.local):
    reads_own = False


_thread: Final = _Thread()
_lock: Final = threading.RLock()
_function: Callable[..., Any] | None = None  # flashvar's
_active = False
_readers = 0  # threads that read torch's own


class _Functional(ModuleType):
    """torch.nn.functional while flashvar is active."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == _NAME:
            _settle()

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


class _FunctionalOfReaders(_Functional):
    """The same while a thread reads torch's own; a look at the attribute takes longer here."""

    @property
    def scaled_dot_product_attention(self) -> Any:
        found = _there[_NAME]
        return OWN if found is _function and _thread.reads_own else found

    @scaled_dot_product_attention.setter
    def scaled_dot_product_attention(self, function: Any) -> None:
        _there[_NAME] = function


def put(function: Callable[..., Any]) -> None:
    """Let flashvar's function lie there whenever torch's own would."""
    global _function, _active
    _function, _active = function, True
    _settle()


def take_away() -> None:
    """Undo `put`."""
    global _active
    _active = False
    _settle()


def _settle() -> None:
    """Put there whose turn it is, and let the module notice the next change."""
    with _lock:
        replaced = is_replaced_by_others()
        if not replaced:
            _there[_NAME] = _function if _active else OWN
        if _active or replaced:
            functional.__class__ = _FunctionalOfReaders if _readers else _Functional
        else:
            functional.__class__ = ModuleType


def is_replaced_by_others() -> bool:
    """Whether calls of the function are somebody else's, context_parallel's for example."""
    found = functional.scaled_dot_product_attention
    return found is not OWN and found is not _function


@contextmanager
def read_as_own() -> Iterator[None]:
    """Torch's own, for who asks in this thread which function it was that was called."""
    global _readers
    before, _thread.reads_own = _thread.reads_own, True
    with _lock:
        _readers += 1
        _settle()
    try:
        yield
    finally:
        _thread.reads_own = before
        with _lock:
            _readers -= 1
            _settle()
