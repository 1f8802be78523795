"""Registers gated_delta_rule with torch: schemas, implementations, fakes and derivatives."""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.ops.flop_formulas import add
from flashvar.ops.gated_delta_rule import run
from flashvar.ops.gated_delta_rule.autograd import (
    backward_at_autograd_key,
    forward_at_autograd_key,
    update_at_autograd_key,
)
from flashvar.ops.gated_delta_rule.flops import backward_flops, forward_flops, update_flops
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FORWARD, UPDATE
from flashvar.ops.gated_delta_rule.vmap import backward_batched, forward_batched, update_batched

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)

_INPUTS: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? a_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, float? scale, bool qk_l2norm, bool beta_sigmoid, bool allow_neg_eigval, "
    "str state_layout, str backend"
)
_LIBRARY.define(
    f"{FORWARD}(Tensor? initial_state, {_INPUTS}) -> (Tensor out, Tensor final_state)", tags=_TAGS
)
_LIBRARY.define(
    f"{UPDATE}(Tensor(a!) states, Tensor state_indices, {_INPUTS}) -> Tensor out", tags=_TAGS
)
# Gradients of absent tensors are empty.
_LIBRARY.define(
    f"{BACKWARD}(Tensor? grad_out, Tensor? grad_final_state, Tensor? initial_state, {_INPUTS})"
    " -> (Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor a_log, Tensor dt_bias, "
    "Tensor initial_state)",
    tags=_TAGS,
)


def _forward_fake(
    initial_state: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return run.like_forward(run.checked(initial_state, None, arguments), arguments[-2])


def _update_fake(pool: torch.Tensor, indices: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return run.like_forward(run.checked(pool, indices, arguments), arguments[-2])[0]


def _backward_fake(
    grad_out: Any, grad_final_state: Any, initial_state: Any, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    *of_inputs, _, _ = arguments
    return run.like_backward(initial_state, run.given(tuple(of_inputs)))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl(FORWARD, run.forward, _key)
    _LIBRARY.impl(UPDATE, run.update, _key)
    _LIBRARY.impl(BACKWARD, run.backward, _key)
torch.library.register_fake(f"flashvar::{FORWARD}", _forward_fake, lib=_LIBRARY)
torch.library.register_fake(f"flashvar::{UPDATE}", _update_fake, lib=_LIBRARY)
torch.library.register_fake(f"flashvar::{BACKWARD}", _backward_fake, lib=_LIBRARY)
_LIBRARY.impl(FORWARD, forward_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl(BACKWARD, backward_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl(UPDATE, update_at_autograd_key, "Autograd", with_keyset=True)
torch.library.register_vmap(f"flashvar::{FORWARD}", forward_batched, lib=_LIBRARY)
torch.library.register_vmap(f"flashvar::{BACKWARD}", backward_batched, lib=_LIBRARY)
torch.library.register_vmap(f"flashvar::{UPDATE}", update_batched, lib=_LIBRARY)
add(
    {
        torch.ops.flashvar.gated_delta_rule_fwd: forward_flops,
        torch.ops.flashvar.gated_delta_rule_update: update_flops,
        torch.ops.flashvar.gated_delta_rule_bwd: backward_flops,
    }
)

gated_delta_rule_fwd: Final = torch.ops.flashvar.gated_delta_rule_fwd.default
gated_delta_rule_bwd: Final = torch.ops.flashvar.gated_delta_rule_bwd.default
gated_delta_rule_update: Final = torch.ops.flashvar.gated_delta_rule_update.default
