"""Has torch's CausalBias recognize torch's own function while the attribute is flashvar's.

A CausalBias has no values: it takes part in a call by comparing the called function with
`torch.nn.functional.scaled_dot_product_attention`. A caller may have bound torch's own function
before flashvar replaced that attribute; torch would then read values that were never written.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final

import torch

from flashvar.integrations.torch.attribute import OWN

__all__ = ["recognize_own", "restore"]

_MODULE: Final = "torch.nn.attention.bias"  # not imported here: that takes a second
_HANDLER: Final = "__torch_function__"

_replaced: tuple[Any, Any] | None = None  # CausalBias, and torch's handler of it


class _Package(ModuleType):
    """torch.nn.attention while flashvar is active: sees when the module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if getattr(value, "__name__", None) == _MODULE:
            _replace(value)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def recognize_own() -> None:
    """From now on, calls of torch's own function with a CausalBias are what they are in torch."""
    torch.nn.attention.__class__ = _Package
    if (module := sys.modules.get(_MODULE)) is not None:
        _replace(module)


def restore() -> None:
    """Undo `recognize_own`."""
    global _replaced
    torch.nn.attention.__class__ = ModuleType
    if _replaced is not None:
        kind, torchs = _replaced
        setattr(kind, _HANDLER, torchs)
        _replaced = None


def _replace(module: ModuleType) -> None:
    """Wrap the handler of the module's CausalBias, so that it also knows torch's own function."""
    global _replaced
    if _replaced is not None:
        return
    kind = module.CausalBias
    torchs = kind.__dict__[_HANDLER]
    _replaced = kind, torchs

    def handle(
        cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is OWN:
            return cls._dispatch(*args, **(kwargs or {}))
        return torchs.__func__(cls, func, types, args, kwargs)

    setattr(kind, _HANDLER, classmethod(handle))
