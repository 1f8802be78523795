"""What becomes of a model that asks for flashvar: looked at as it is made, and as it first runs.

Its layers either ask transformers for an attention function by name, and get ours; or choose among
classes of their own by name, and know none of ours; or compute attention without asking.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any, Final

import torch
from transformers.modeling_utils import PreTrainedModel

from flashvar.integrations.fallback import decline

__all__ = [
    "called",
    "causal_without_mask",
    "chooses_a_class",
    "here",
    "refused",
    "watch",
]

_HANDLES: Final = "_flashvar_handles"


class _Forward:
    """A watched forward, and whether our attention function was called in it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.served = model, False


class _Thread(threading.local):
    """The watched forwards of a thread that have begun and not ended, outermost first."""

    def __init__(self) -> None:
        self.under_way: list[_Forward] = []


here: Final = _Thread()


def called() -> None:
    """Our attention function was called."""
    for forward in here.under_way:
        forward.served = True


def _over(model: torch.nn.Module) -> _Forward | None:
    """Take out the model's forward, and what is left of later ones; None: it did not begin here.

    A hook in a compiled graph does not come here, and the other one of its pair may.
    """
    for place, forward in enumerate(here.under_way):
        if forward.model is model:
            del here.under_way[place:]
            return forward
    return None


_causal: Final[dict[type, bool]] = {}


def causal_without_mask(layer: type) -> bool:
    """Whether a layer that was handed no mask is causal where its flag says so.

    Eager attention hides nothing then. Flags are only right in files whose models are known to
    agree with it on sdpa or a flash attention; and where a layer is nobody's but its caller's.
    """
    if layer not in _causal:
        models: list[Any] = [
            one
            for one in vars(sys.modules[layer.__module__]).values()
            if isinstance(one, type) and issubclass(one, PreTrainedModel)
            if one.__module__ == layer.__module__
        ]
        served = any(one._supports_sdpa or one._supports_flash_attn for one in models)
        _causal[layer] = served or not models
    return _causal[layer]


# While a graph is traced, the answer is a constant of it.
causal_without_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def chooses_a_class(model: PreTrainedModel) -> bool:
    """Whether the model's file has a table of attention classes, by names that are not ours."""
    files = {one.__module__ for one in type(model).__mro__ if issubclass(one, PreTrainedModel)}
    return any(_is_table(value) for file in files for value in vars(sys.modules[file]).values())


def _is_table(value: object) -> bool:
    return (
        isinstance(value, dict)
        and "eager" in value
        and all(
            isinstance(one, type) and issubclass(one, torch.nn.Module) for one in value.values()
        )
    )


def refused(model: PreTrainedModel, instead: str) -> None:
    """Say that the model knows no name but its own, and what it takes."""
    name = type(model).__name__
    decline(name, "its layers choose among attention classes of their own", f"its {instead} class")


def watch(model: PreTrainedModel, names: set[str]) -> None:
    """Look at the model's first forward that is no part of another's, and say if we had no call.

    Unless the model asks for none of our names by then.
    """
    if not hasattr(model, _HANDLES):
        handles = (
            model.register_forward_pre_hook(_begins),
            model.register_forward_hook(partial(_ends, names), always_call=True),
        )
        setattr(model, _HANDLES, handles)


def _begins(model: torch.nn.Module, arguments: Any) -> None:
    if not torch.compiler.is_compiling():
        _over(model)
        # Where another thread's forward of a model was over first, the hook of its end is gone.
        here.under_way[:] = [one for one in here.under_way if hasattr(one.model, _HANDLES)]
        here.under_way.append(_Forward(model))


def _ends(names: set[str], model: PreTrainedModel, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    forward = _over(model)
    # A part of another's forward, or an error.
    if forward is None or here.under_way or output is None:
        return
    attentions = set()
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
        if "Attention" in type(module).__name__:
            attentions.add(type(module).__name__)
    asks = model.config._attn_implementation in names
    if asks and attentions and not forward.served:
        reason = f"its layers ({', '.join(sorted(attentions))}) compute attention themselves"
        decline(type(model).__name__, reason, "the model's own")
