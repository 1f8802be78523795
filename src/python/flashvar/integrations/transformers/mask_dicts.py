"""Dicts of bool masks, one for each kind of layer, that a caller passes to a model.

Models pass them to their layers as they are. A model that joins them to masks of our mask function
would count True as 1, so they become masks that are added to the scores.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from transformers.modeling_utils import PreTrainedModel

from flashvar.integrations.transformers.visibility import added

__all__ = ["watch"]

_HANDLE: Final = "_flashvar_dicts"


def watch(model: PreTrainedModel, names: set[str]) -> None:
    """Convert the masks that a model and the models in it get, while they use one of `names`."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or hasattr(part, _HANDLE):
            continue
        if hasattr(part.config, "layer_types"):  # the keys of such dicts
            hook = partial(_convert, names)
            setattr(part, _HANDLE, part.register_forward_pre_hook(hook, with_kwargs=True))


def _convert(
    names: set[str], model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    masks = {name: value for name, value in kwargs.items() if "mask" in name}
    given = any(isinstance(value, dict) for value in (*args, *masks.values()))
    if not given or model.config._attn_implementation not in names:
        return None
    masks = {name: _added(value, model) for name, value in masks.items()}
    return tuple([_added(value, model) for value in args]), {**kwargs, **masks}


def _added(value: Any, model: PreTrainedModel) -> Any:
    if not isinstance(value, dict):
        return value
    return {kind: added(mask, model.dtype) for kind, mask in value.items()}
