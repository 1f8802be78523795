"""Checks whether the layers of a model call flashvar: when it is made, and in its first forward.

Layers may look up an attention function of transformers by name, and get flashvar's. They may also
choose among their own classes by name, which do not include flashvar, or compute attention
themselves.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any, Final

import torch
from transformers.modeling_utils import PreTrainedModel

from flashvar.integrations.fallback import report_fallback

__all__ = [
    "called",
    "called_in_graph",
    "causal_without_mask",
    "has_class_table",
    "here",
    "report_refused",
    "watch",
]

_HANDLES: Final = "_flashvar_handles"


class _Forward:
    """A watched forward, and whether flashvar's attention function was called in it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.called = model, False


class _Thread(threading.local):
    """The watched forwards that are running in a thread, outermost first."""

    def __init__(self) -> None:
        self.running: list[_Forward] = []


here: Final = _Thread()


def called() -> None:
    """Record a call of flashvar's attention function in the running forwards."""
    for forward in here.running:
        forward.called = True


_traced: Final[set[type]] = set()


def called_in_graph(layer: type) -> None:
    """Record that graphs of a class of layers call flashvar's attention function."""
    _traced.add(layer)


# torch.compile calls the function at trace time. A graph also runs in models that it was not
# traced in, so the class is recorded and not a forward.
called_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _take_running(model: torch.nn.Module) -> _Forward | None:
    """Remove and return the model's running forward, and drop later ones; None if not found.

    Only one hook of a pair may run where the other is in a compiled graph, so forwards may be left
    over, or missing.
    """
    for index, forward in enumerate(here.running):
        if forward.model is model:
            del here.running[index:]
            return forward
    return None


_causal: Final[dict[type, bool]] = {}


def causal_without_mask(layer: type) -> bool:
    """Whether the flag `is_causal` of a layer applies if the layer gets no mask.

    Eager attention ignores the flag and hides nothing without a mask. The flag is reliable in files
    whose models support sdpa or a flash attention, and in files without models.
    """
    if layer not in _causal:
        models: list[Any] = [
            one
            for one in vars(sys.modules.get(layer.__module__, layer)).values()
            if isinstance(one, type) and issubclass(one, PreTrainedModel)
            if one.__module__ == layer.__module__
        ]
        supports_sdpa = any(one._supports_sdpa or one._supports_flash_attn for one in models)
        _causal[layer] = supports_sdpa or not models
    return _causal[layer]


# torch.compile calls the function at trace time and treats the result as a constant.
causal_without_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_class_table(model: PreTrainedModel) -> bool:
    """Whether the model's file has a table of attention classes by name, without flashvar."""
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


def report_refused(model: PreTrainedModel, instead: str) -> None:
    """Report that the model uses one of its own attention classes."""
    name = type(model).__name__
    report_fallback(
        name, "its layers choose among attention classes of their own", f"its {instead} class"
    )


def watch(model: PreTrainedModel, names: set[str]) -> None:
    """Watch the model's first outermost forward; report if it never called flashvar.

    Nothing is reported if the model no longer uses one of `names` by then.
    """
    if not hasattr(model, _HANDLES):
        handles = (
            model.register_forward_pre_hook(_begins),
            model.register_forward_hook(partial(_ends, names), always_call=True),
        )
        setattr(model, _HANDLES, handles)


def _begins(model: torch.nn.Module, arguments: Any) -> None:
    if not torch.compiler.is_compiling():
        _take_running(model)
        # If another thread finished the first forward of a model, its hooks are already removed.
        here.running[:] = [one for one in here.running if hasattr(one.model, _HANDLES)]
        here.running.append(_Forward(model))


def _ends(names: set[str], model: PreTrainedModel, arguments: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    forward = _take_running(model)
    # Not an outermost forward, or the forward raised.
    if forward is None or here.running or output is None:
        return
    attentions, was_called = set(), forward.called
    for module in model.modules():
        was_called = was_called or type(module) in _traced
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
        if "Attention" in type(module).__name__:
            attentions.add(type(module).__name__)
    asks = model.config._attn_implementation in names
    if asks and attentions and not was_called:
        reason = f"its layers ({', '.join(sorted(attentions))}) compute attention themselves"
        report_fallback(type(model).__name__, reason, "the model's own")
