"""The attribute `torch.nn.functional.scaled_dot_product_attention`, shared with all who replace it.

Others replace it too (torch.distributed's context_parallel, tests, profilers), before flashvar or
after it, and put back what they found in any order. So while flashvar is active its function lies
there only in the place of torch's own: what somebody else puts there stays, and as soon as torch's
own is put back, flashvar's is.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn import functional

__all__ = [
    "OWN",
    "REPLACED",
    "is_replaced_by_others",
    "put",
    "read_as_own",
    "splits_sequences",
    "take_away",
]

# Not what the attribute is at the time of this import: that may be somebody else's.
OWN: Final = torch._C._nn.scaled_dot_product_attention

REPLACED: Final = (
    "torch's scaled_dot_product_attention is replaced by somebody (context_parallel, for example)"
)

_NAME: Final = "scaled_dot_product_attention"
_there: Final = functional.__dict__
_function_modes: Final = torch._C._len_torch_function_stack


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
        replaced = _is_replaced()
        if not replaced:
            _there[_NAME] = _function if _active else OWN
        if _active or replaced:
            functional.__class__ = _FunctionalOfReaders if _readers else _Functional
        else:
            functional.__class__ = ModuleType


def is_replaced_by_others() -> bool:
    """Whether calls of the function are somebody else's, context_parallel's for example."""
    return _is_replaced() or splits_sequences()


def _is_replaced() -> bool:
    found = functional.scaled_dot_product_attention
    return found is not OWN and found is not _function


def splits_sequences() -> bool:
    """Whether context_parallel answers calls of the function: tensors are parts of sequences then.

    It replaces the function or, in torch 2.8, may enter a mode.
    """
    return (_is_replaced() or _function_modes() > 0) and _sends_dtensors_around()


def _sends_dtensors_around() -> bool:
    """Whether DTensors of attention are handled by context_parallel."""
    kinds = sys.modules.get("torch.distributed.tensor")
    if kinds is None:
        return False
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    return flash in kinds.DTensor._op_dispatcher._custom_op_handlers


# Torch.compile asks while it traces, with a guard on the function that is there.
_sends_dtensors_around._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
