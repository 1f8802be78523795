"""Registers causal_conv1d with torch: schemas, implementations, fakes and derivatives."""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.ops.causal_conv1d import run
from flashvar.ops.causal_conv1d.autograd import (
    backward_at_autograd_key,
    backward_formula,
    forward_at_autograd_key,
    update_at_autograd_key,
)
from flashvar.ops.causal_conv1d.flops import backward_flops, forward_flops, update_flops
from flashvar.ops.causal_conv1d.inputs import check, check_update
from flashvar.ops.causal_conv1d.vmap import backward_batched, forward_batched, update_batched
from flashvar.ops.flop_formulas import add

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)

# columns: of the final state; 0 where none is wanted.
_LIBRARY.define(
    "causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? state, "
    "Tensor? cu_seqlens, bool silu, SymInt columns, str layout, str backend)"
    " -> (Tensor y, Tensor final_state)",
    tags=_TAGS,
)
# Of a bias or a state that is absent the gradient has no elements.
_LIBRARY.define(
    "causal_conv1d_bwd(Tensor? grad_y, Tensor? grad_final, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor? state, Tensor? cu_seqlens, bool silu, str layout, str backend)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_state)",
    tags=_TAGS,
)
_LIBRARY.define(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, "
    "Tensor? residual, Tensor? state_indices, Tensor? state_positions, bool silu, str layout, "
    "str backend) -> Tensor y",
    tags=_TAGS,
)


def _forward_fake(
    x: Any, weight: Any, bias: Any, residual: Any, state: Any, cu_seqlens: Any, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _, columns, layout, _ = options
    check(x, weight, bias, residual, state, cu_seqlens, layout)
    return run.like_forward(x, state, cu_seqlens, columns, layout)


def _backward_fake(
    grad_y: Any, grad_final: Any, x: Any, weight: Any, bias: Any, state: Any, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return run.like_backward(x, weight, bias, state)


def _update_fake(
    x: Any, state: Any, weight: Any, bias: Any, residual: Any, *others: Any
) -> torch.Tensor:
    indices, positions, _, layout, _ = others
    check_update(x, state, weight, bias, residual, indices, positions, layout)
    return torch.empty_like(x)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("causal_conv1d_fwd", run.forward, _key)
    _LIBRARY.impl("causal_conv1d_bwd", run.backward, _key)
    _LIBRARY.impl("causal_conv1d_update", run.update, _key)
torch.library.register_fake("flashvar::causal_conv1d_fwd", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::causal_conv1d_bwd", _backward_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::causal_conv1d_update", _update_fake, lib=_LIBRARY)
_LIBRARY.impl("causal_conv1d_fwd", forward_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl("causal_conv1d_bwd", backward_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl("causal_conv1d_update", update_at_autograd_key, "Autograd", with_keyset=True)
# torch.autograd.grad(is_grads_batched=True), which has batches of its own kind.
_LIBRARY.impl("causal_conv1d_bwd", backward_formula, "Batched")
torch.library.register_vmap("flashvar::causal_conv1d_fwd", forward_batched, lib=_LIBRARY)
torch.library.register_vmap("flashvar::causal_conv1d_bwd", backward_batched, lib=_LIBRARY)
torch.library.register_vmap("flashvar::causal_conv1d_update", update_batched, lib=_LIBRARY)
add(
    {
        torch.ops.flashvar.causal_conv1d_fwd: forward_flops,
        torch.ops.flashvar.causal_conv1d_update: update_flops,
        torch.ops.flashvar.causal_conv1d_bwd: backward_flops,
    }
)

causal_conv1d_fwd: Final = torch.ops.flashvar.causal_conv1d_fwd.default
causal_conv1d_update: Final = torch.ops.flashvar.causal_conv1d_update.default
