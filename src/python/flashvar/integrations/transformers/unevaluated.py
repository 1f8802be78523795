"""Masks that carry their layout, and are evaluated only if other code reads them.

Flashvar's attention reads the layout. Other code (a layer that adds the mask to its own scores, a
module of torch) gets a tensor with the shape, dtype and values of eager attention's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

from flashvar.integrations.transformers.layout import Layout, added

__all__ = ["UnevaluatedMask", "attach", "attached"]

_aten: Final = torch.ops.aten
# These ops pass the mask on: checkpoints detach it, models on several devices copy it.
_COPIES: Final = frozenset(
    (
        _aten.alias.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten._to_copy.default,
    )
)
# Attributes that hold the layout, in eager code and in a traced graph. A graph does not read the
# eager one: guards on its numbers would recompile the graph for every length.
_EAGER_LAYOUT: Final = "_flashvar_layout"
_TRACED_LAYOUT: Final = "_flashvar_layout_in_graph"


class UnevaluatedMask(torch.Tensor):  # type: ignore[misc]
    """A tensor without storage; the first operation on it evaluates it."""

    evaluate: Callable[[], torch.Tensor]
    evaluated: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        layout: Layout,
        evaluate: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> UnevaluatedMask:
        """A mask with the shape, dtype and device of the result of `evaluate`."""
        made: UnevaluatedMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device(device)
        )
        made.evaluate = evaluate
        made.evaluated = None
        setattr(made, _EAGER_LAYOUT, (layout, _version(made)))
        setattr(made, _TRACED_LAYOUT, layout)
        return made

    def values(self) -> torch.Tensor:
        """The mask as an ordinary tensor, evaluated once."""
        if self.evaluated is None:
            self.evaluated = self.evaluate()
        return self.evaluated

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute on the values; copies stay unevaluated."""
        kwargs = kwargs or {}
        mask = args[0] if args else None
        if func in _COPIES and isinstance(mask, cls) and (layout := attached(mask)) is not None:
            dtype = kwargs.get("dtype") or mask.dtype
            device = kwargs.get("device") or mask.device
            if dtype.is_floating_point:
                return cls(
                    layout.to(device),
                    lambda: func(mask.values(), *args[1:], **kwargs),
                    tuple(mask.shape),
                    dtype,
                    device,
                )
        args = tree_map(_values, args)
        if func is _aten.cat.default:
            # A caller's bool mask beside ours: torch would promote True to 1.
            dtype = next(x.dtype for x in args[0] if x.is_floating_point())
            args = ([added(x, dtype) for x in args[0]], *args[1:])
        out = func(*args, **tree_map(_values, kwargs))
        # An in-place operation returns its argument.
        return mask if isinstance(mask, cls) and out is mask.evaluated else out


def attach(mask: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Attach a layout to a mask and return the mask; a write to the mask invalidates the layout."""
    if torch.compiler.is_compiling():
        # The values are not computed if only the layout is read: they are dead code in the graph.
        setattr(mask, _TRACED_LAYOUT, layout)
    else:
        setattr(mask, _EAGER_LAYOUT, (layout, _version(mask)))
    return mask


def attached(mask: torch.Tensor) -> Layout | None:
    """The layout attached to a mask; None if there is none, or the mask may have changed."""
    if torch.compiler.is_compiling():
        traced: Layout | None = getattr(mask, _TRACED_LAYOUT, None)
        return traced
    kept: tuple[Layout, int | None] | None = getattr(mask, _EAGER_LAYOUT, None)
    if kept is None:
        return None
    layout, version = kept
    if version is None:  # code that read the values may also have written to them
        unseen = isinstance(mask, UnevaluatedMask) and mask.evaluated is None
    else:
        unseen = mask._version == version
    return layout if unseen else None


def _version(mask: torch.Tensor) -> int | None:
    """The version counter of a mask, which every write increments; None in inference mode."""
    return None if mask.is_inference() else mask._version


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, UnevaluatedMask) else value
