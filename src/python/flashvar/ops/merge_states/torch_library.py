"""Registers merge_states with torch: schemas, implementations, fakes and derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from flashvar.ops.merge_states import run
from flashvar.ops.merge_states.autograd import (
    backward_at_autograd_key,
    backward_formula,
    forward_at_autograd_key,
)
from flashvar.ops.merge_states.inputs import check
from flashvar.ops.merge_states.vmap import backward_batched, forward_batched

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)

# stacked: each list is one tensor with the parts in its first dimension.
_ARGUMENTS: Final = "Tensor[] outs, Tensor[] lses, bool stacked, str layout, str backend"
_LIBRARY.define(f"merge_states_fwd({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
# The gradients are stacked, also those of parts that are not. wanted: a flag for each tensor of
# outs and of lses, or none for all. grad_outs has the parts that are; grad_lses has all or none.
_LIBRARY.define(
    f"merge_states_bwd(Tensor? grad_out, Tensor? grad_lse, {_ARGUMENTS}, bool[] wanted=[])"
    " -> (Tensor grad_outs, Tensor grad_lses)",
    tags=_TAGS,
)


def _forward_fake(
    outs: Any, lses: Any, stacked: bool, layout: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check(outs, lses, stacked, layout)
    return run.like_forward(outs, lses, stacked, layout)


def _backward_fake(
    grad_out: Any,
    grad_lse: Any,
    outs: Any,
    lses: Any,
    stacked: bool,
    layout: str,
    backend: str,
    wanted: Sequence[bool] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    return run.like_backward(outs, lses, stacked, wanted)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("merge_states_fwd", run.forward, _key)
    _LIBRARY.impl("merge_states_bwd", run.backward, _key)
torch.library.register_fake("flashvar::merge_states_fwd", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::merge_states_bwd", _backward_fake, lib=_LIBRARY)
_LIBRARY.impl("merge_states_fwd", forward_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl("merge_states_bwd", backward_at_autograd_key, "Autograd", with_keyset=True)
# torch.autograd.grad(is_grads_batched=True), which has batches of its own kind.
_LIBRARY.impl("merge_states_bwd", backward_formula, "Batched")
torch.library.register_vmap("flashvar::merge_states_fwd", forward_batched, lib=_LIBRARY)
torch.library.register_vmap("flashvar::merge_states_bwd", backward_batched, lib=_LIBRARY)

merge_states_fwd: Final = torch.ops.flashvar.merge_states_fwd.default
