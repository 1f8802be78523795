"""Masks that carry their layout, and are evaluated only if a model looks at them.

Our attention reads the layout. Whatever else touches the mask (a layer that adds it to scores of
its own, a module of torch's) finds a tensor of the shape, dtype and values of eager attention's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

from flashvar.integrations.transformers.layout import Layout

__all__ = ["UnevaluatedMask", "attach", "attached"]

_aten: Final = torch.ops.aten
# These only hand the mask on: checkpoints detach it, models on several devices copy it.
_COPIES: Final = frozenset(
    (
        _aten.alias.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten._to_copy.default,
    )
)
# A layout that was attached outside of a graph is not read in it: a guard on its numbers would
# compile the graph again for each length.
_MADE: Final = "_flashvar_layout"
_TRACED: Final = "_flashvar_layout_in_graph"


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
        """A mask that looks like what `evaluate` will give."""
        made: UnevaluatedMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device(device)
        )
        made.evaluate = evaluate
        made.evaluated = None
        setattr(made, _MADE, (layout, _version(made)))
        setattr(made, _TRACED, layout)
        return made

    def values(self) -> torch.Tensor:
        """The mask as an ordinary tensor, the same one each time."""
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
        out = func(*tree_map(_values, args), **tree_map(_values, kwargs))
        # An operation in place returns what it was given.
        return mask if isinstance(mask, cls) and out is mask.evaluated else out


def attach(mask: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The mask, which carries its layout from here on, as long as nobody writes into it."""
    if torch.compiler.is_compiling():
        # What is handed on is not computed then: its values are dead code in the graph.
        setattr(mask, _TRACED, layout)
    else:
        setattr(mask, _MADE, (layout, _version(mask)))
    return mask


def attached(mask: torch.Tensor) -> Layout | None:
    """The layout that a mask carries; None if it has none, or may have changed."""
    if torch.compiler.is_compiling():
        traced: Layout | None = getattr(mask, _TRACED, None)
        return traced
    kept: tuple[Layout, int | None] | None = getattr(mask, _MADE, None)
    if kept is None:
        return None
    layout, version = kept
    if version is None:  # whoever looked at it may have written, too
        unseen = isinstance(mask, UnevaluatedMask) and mask.evaluated is None
    else:
        unseen = mask._version == version
    return layout if unseen else None


def _version(mask: torch.Tensor) -> int | None:
    """What changes when somebody writes into the mask or a view; inference mode does not count."""
    return None if mask.is_inference() else mask._version


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, UnevaluatedMask) else value
