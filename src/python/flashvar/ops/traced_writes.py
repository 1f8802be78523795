"""Whether the graph that torch.compile traces has written to a tensor: `watch` and `is_intact`.

Dynamo has no version counters: it traces `_version` as a number that is unknown until the graph
runs. The fake tensors it computes with do have them, and an op of our own sees these tensors. It
answers with the length of its result, which is known while the graph is traced.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["is_intact", "watch"]

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_LIBRARY.define(
    "intact(Tensor tensor, bool from_now) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_VERSION: Final = "_flashvar_version"


def _fake(tensor: torch.Tensor, from_now: bool) -> torch.Tensor:
    if tensor.is_inference():  # its writes are not counted
        return tensor.new_empty(0)
    if from_now:
        setattr(tensor, _VERSION, tensor._version)
    # An input of the graph is a new fake tensor, so what another graph began does not count.
    return tensor.new_empty(int(getattr(tensor, _VERSION, None) == tensor._version))


def _no_answer(tensor: torch.Tensor, from_now: bool) -> torch.Tensor:
    """The result that a graph computes when it runs; nothing reads it."""
    return tensor.new_empty(0)


_LIBRARY.impl("intact", _no_answer, "CompositeExplicitAutograd")
torch.library.register_fake("flashvar::intact", _fake, lib=_LIBRARY)


def watch(tensor: torch.Tensor) -> None:
    """Watch a tensor that the traced graph made, until the end of the trace."""
    torch.ops.flashvar.intact(tensor, True)


def is_intact(tensor: torch.Tensor) -> bool:
    """Whether the traced graph made the tensor and has not written to it since `watch`.

    False where it cannot be known.
    """
    answer: torch.Tensor = torch.ops.flashvar.intact(tensor, False)
    return len(answer) == 1
