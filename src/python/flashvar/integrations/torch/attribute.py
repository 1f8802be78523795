"""Replaces the attribute `torch.nn.functional.scaled_dot_product_attention`, which others share.

Other code also replaces it (torch.distributed's context_parallel, tests, profilers), before or
after flashvar, and restores what it found in any order. So flashvar replaces only torch's own
function: a replacement by other code stays, and when that code restores torch's own function, the
attribute becomes flashvar's again.
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

from flashvar.ops.sharding import dtensor

__all__ = [
    "OWN",
    "REPLACED",
    "is_replaced_by_others",
    "read_as_own",
    "replace",
    "restore",
    "splits_sequences",
]

# Not read from the attribute, which may already be another replacement.
OWN: Final = torch._C._nn.scaled_dot_product_attention

REPLACED: Final = (
    "torch's scaled_dot_product_attention is replaced by other code (e.g. context_parallel)"
)

_NAME: Final = "scaled_dot_product_attention"
_attributes: Final = functional.__dict__
_function_modes: Final = torch._C._len_torch_function_stack


class _Thread(threading.local):
    reads_own = False


_thread: Final = _Thread()
_lock: Final = threading.RLock()
_function: Callable[..., Any] | None = None  # flashvar's
_active = False
_readers = 0  # threads inside read_as_own


class _Functional(ModuleType):
    """torch.nn.functional while flashvar is active."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == _NAME:
            _update()

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


class _FunctionalOfReaders(_Functional):
    """As _Functional, while a thread is inside read_as_own; reading the attribute is slower."""

    @property
    def scaled_dot_product_attention(self) -> Any:
        found = _attributes[_NAME]
        return OWN if found is _function and _thread.reads_own else found

    @scaled_dot_product_attention.setter
    def scaled_dot_product_attention(self, function: Any) -> None:
        _attributes[_NAME] = function


def replace(function: Callable[..., Any]) -> None:
    """Replace torch's own function by flashvar's, now and whenever it is restored."""
    global _function, _active
    _function, _active = function, True
    _update()


def restore() -> None:
    """Undo `replace`."""
    global _active
    _active = False
    _update()


def _update() -> None:
    """Set the attribute, and the module's class, which intercepts the next assignment."""
    with _lock:
        replaced = _is_replaced()
        if not replaced:
            _attributes[_NAME] = _function if _active else OWN
        if _active or replaced:
            functional.__class__ = _FunctionalOfReaders if _readers else _Functional
        else:
            functional.__class__ = ModuleType


def is_replaced_by_others() -> bool:
    """Whether other code replaces the function, e.g. context_parallel."""
    return _is_replaced() or splits_sequences()


def _is_replaced() -> bool:
    found = functional.scaled_dot_product_attention
    return found is not OWN and found is not _function


def splits_sequences() -> bool:
    """Whether context_parallel handles calls of the function: tensors are then parts of sequences.

    context_parallel replaces the function or, in torch 2.8, may enter a mode.
    """
    return (_is_replaced() or _function_modes() > 0) and _sends_dtensors_around()


def _sends_dtensors_around() -> bool:
    """Whether DTensors of attention are handled by context_parallel.

    True where torch does not say: a layer then leaves sequences to the function in the attribute,
    or refuses. To attend to a part of a sequence as if it were the whole would be wrong.
    """
    kind = dtensor()
    if kind is None:
        return False
    dispatcher = getattr(kind, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    return handlers is None or flash in handlers


# torch.compile treats the result at trace time as a constant; it guards on the attribute itself.
_sends_dtensors_around._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def read_as_own() -> Iterator[None]:
    """Within the context, this thread reads torch's own function from the attribute."""
    global _readers
    before, _thread.reads_own = _thread.reads_own, True
    with _lock:
        _readers += 1
        _update()
    try:
        yield
    finally:
        _thread.reads_own = before
        with _lock:
            _readers -= 1
            _update()
