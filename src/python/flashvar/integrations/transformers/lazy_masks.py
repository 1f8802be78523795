"""Masks that carry their visibility, and are evaluated only if other code reads them.

Flashvar's attention reads the visibility. Other code (a layer that adds the mask to its own scores,
a module of torch) gets a tensor with the shape, dtype and values of eager attention's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from flashvar.integrations.transformers.visibility import Visibility, added
from flashvar.ops.traced_writes import is_intact, watch

__all__ = ["LazyMask", "attach", "attached"]

_aten: Final = torch.ops.aten
# These ops pass the mask on: checkpoints detach it, models on several devices copy it.
_ALIASES: Final = frozenset((_aten.alias.default, _aten.detach.default))
_COPIES: Final = frozenset((*_ALIASES, _aten.clone.default, _aten._to_copy.default))
# The attributes of an ordinary mask that hold its visibility. Graphs have one of their own: guards
# on the numbers of the eager one would recompile a graph for every length.
_EAGER_VISIBILITY: Final = "_flashvar_visibility"
_TRACED_VISIBILITY: Final = "_flashvar_visibility_in_graph"


class _Content:
    """What a mask shares with its aliases: its visibility, and its values once they are evaluated.

    `exposed`: an operation wrote to the values, or returned a view that code may write to. The
    visibility counts no longer. Version counters would miss writes through `.data`, and are no
    numbers in a traced graph.
    """

    def __init__(self, visibility: Visibility, evaluate: Callable[[], torch.Tensor]) -> None:
        self.visibility, self.evaluate = visibility, evaluate
        self.evaluated: torch.Tensor | None = None
        self.exposed = False


class LazyMask(torch.Tensor):  # type: ignore[misc]
    """A tensor without storage; the first operation on it evaluates it."""

    content: _Content

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        visibility: Visibility,
        evaluate: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> LazyMask:
        """A mask with the shape, dtype and device of the result of `evaluate`."""
        made: LazyMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device(device)
        )
        made.content = _Content(visibility, evaluate)
        return made

    def values(self) -> torch.Tensor:
        """The mask as an ordinary tensor, evaluated once."""
        content = self.content
        if content.evaluated is None:
            content.evaluated = content.evaluate()
        return content.evaluated

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on the values; copies stay lazy."""
        kwargs = kwargs or {}
        mask = args[0] if args else None
        if func in _COPIES and isinstance(mask, cls) and not mask.content.exposed:
            dtype = kwargs.get("dtype") or mask.dtype
            device = kwargs.get("device") or mask.device
            if dtype.is_floating_point:
                # Of the values before any write to the mask: a copy may be read after it.
                evaluate = mask.content.evaluate
                copy = cls(
                    mask.content.visibility.to(device),
                    lambda: func(evaluate(), *args[1:], **kwargs),
                    tuple(mask.shape),
                    dtype,
                    device,
                )
                if func in _ALIASES:
                    copy.content = mask.content
                return copy
        if func.is_view or func._schema.is_mutable:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, cls):
                    one.content.exposed = True
        args = tree_map(_values, args)
        if func is _aten.cat.default:
            # A caller's bool mask beside ours: torch would promote True to 1.
            dtype = next(x.dtype for x in args[0] if x.is_floating_point())
            args = ([added(x, dtype) for x in args[0]], *args[1:])
        out = func(*args, **tree_map(_values, kwargs))
        # An in-place operation returns its argument.
        return mask if isinstance(mask, cls) and out is mask.content.evaluated else out


def attach(mask: torch.Tensor, visibility: Visibility) -> torch.Tensor:
    """Attach a visibility to a mask and return the mask; a write to the mask invalidates it."""
    if torch.compiler.is_dynamo_compiling():
        # Values are not computed if only the visibility is read: they are dead code in the graph.
        watch(mask)
        setattr(mask, _TRACED_VISIBILITY, visibility)
    elif not mask.is_inference():  # writes are not counted in inference mode
        setattr(mask, _EAGER_VISIBILITY, (visibility, mask._version))
    return mask


def attached(mask: torch.Tensor) -> Visibility | None:
    """The visibility attached to a mask; None if there is none, or the mask may have changed."""
    if isinstance(mask, LazyMask):
        return None if mask.content.exposed else mask.content.visibility
    if torch.compiler.is_dynamo_compiling():
        traced: Visibility | None = (
            getattr(mask, _TRACED_VISIBILITY, None) if is_intact(mask) else None
        )
        return traced
    kept: tuple[Visibility, int] | None = getattr(mask, _EAGER_VISIBILITY, None)
    return kept[0] if kept is not None and kept[1] == mask._version else None


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, LazyMask) else value
