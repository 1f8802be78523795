"""Layers that are called as one: projections of the same input, and convolutions beside each other.

Each call of a layer costs the host a launch, and each projection adds another gradient of the input
to those of the others. Layers are joined only where the result is the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from flashvar.layers.short_convolution import ShortConvolution
from flashvar.ops.autocast import without_promotion
from flashvar.ops.dispatch_modes import PLAIN, is_compiling
from flashvar.ops.unknown_sizes import is_known


def _own_forward(kind: type[nn.Module]) -> Any:
    """The forward that the module of a class defines; None where others have replaced it."""
    defined_in = getattr(kind.forward, "__globals__", {}).get("__name__")
    return kind.forward if defined_in == kind.__module__ else None


# What a joined call computes in place of the layers; others may give a class another forward.
_FORWARDS: Final = {kind: _own_forward(kind) for kind in (nn.Linear, ShortConvolution)}


def project(x: torch.Tensor, layers: Sequence[nn.Module]) -> torch.Tensor:
    """The layers' outputs for x, [..., channels], joined along the channels."""
    if _are_one_projection(x, layers):
        return _one_product(x, layers)
    return joined([layer(x) for layer in layers], -1)


def project_each(x: torch.Tensor, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor]:
    """The layers' outputs for x, one each, which may be views of one tensor."""
    if not _are_one_projection(x, layers):
        return [layer(x) for layer in layers]
    outputs: Sequence[torch.Tensor] = _one_product(x, layers).split(
        [layer.weight.shape[0] for layer in layers], -1
    )
    return outputs


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """torch.cat, also of 16-bit tensors under autocast of the other 16-bit dtype on the CPU."""
    with without_promotion():
        return torch.cat(tensors, dim)


def are_one_convolution(layers: Sequence[nn.Module]) -> bool:
    """Whether one convolution of all channels computes the layers, which may have been replaced."""
    if not all(_does_only_what_its_class_does(layer, ShortConvolution) for layer in layers):
        return False
    if any(layer.activation not in ("silu", "swish") for layer in layers):
        return False
    first, *others = [(layer.kernel_size, layer.bias is None) for layer in layers]
    return all(other == first for other in others)


def _one_product(x: torch.Tensor, layers: Sequence[nn.Module]) -> torch.Tensor:
    return functional.linear(x, joined([layer.weight for layer in layers]))


def _are_one_projection(x: torch.Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether one product is as good as the layers' own, which may have been replaced.

    The backward keeps the joined weights. With few rows they would be more than the product saves;
    a compiled backward joins them again.
    """
    if not all(_does_only_what_its_class_does(layer, nn.Linear) for layer in layers):
        return False
    if any(layer.bias is not None for layer in layers):
        return False
    first, *others = [layer.weight.dtype for layer in layers]
    if any(other != first for other in others):
        return False
    return is_compiling() or is_known(x.numel() >= 2 * x.shape[-1] ** 2)


def _does_only_what_its_class_does(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer has no hooks, no other class and no other forward.

    Others may have given it any of them. Shards of DTensors are not joined to those of other layers
    without communication.
    """
    forward = layer._forward_hooks or layer._forward_pre_hooks
    backward = layer._backward_hooks or layer._backward_pre_hooks
    hooks = forward or backward or _has_any_global_hook()
    if type(layer) is not kind or hooks or "forward" in layer.__dict__:
        return False
    if kind.forward is not _FORWARDS[kind]:
        return False
    return type(layer.weight) in PLAIN
