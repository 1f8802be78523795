"""The modules that stand in for flash-linear-attention where it is not installed."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

from flashvar import layers
from flashvar.compat.fla import __version__, convolution, delta_rule
from flashvar.compat.fla.shared_memory import check_shared_mem
from flashvar.compat.flash_attn import bert_padding
from flashvar.compat.stand_in import modules_of
from flashvar.layers import norms, padding

__all__ = ["modules"]


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch_size: int, seq_len: int
) -> torch.Tensor:
    """Rows [total, ...] as [batch_size, seq_len, ...], padding as zeros."""
    return bert_padding.pad_input(hidden_states, indices, batch_size, seq_len)


def _bound(*objects: Any, **others: Any) -> dict[str, Any]:
    return {one.__name__: one for one in objects} | others


_CHUNK: Final = _bound(delta_rule.chunk_gated_delta_rule, chunk_gdn=delta_rule.chunk_gdn)
_RECURRENT: Final = _bound(
    delta_rule.fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn=delta_rule.fused_recurrent_gdn,
)
_DELTA: Final = _bound(delta_rule.chunk_delta_rule, delta_rule.fused_recurrent_delta_rule)
_CONVOLUTION: Final = _bound(
    *(convolution.causal_conv1d, convolution.causal_conv1d_update),
    *(convolution.fast_causal_conv1d_fn, layers.ShortConvolution),
)
_L2: Final = _bound(norms.L2Norm, norms.l2norm, l2_norm=norms.l2norm)
_RMS: Final = _bound(layers.RMSNorm, norms.rms_norm)
_GATED: Final = _bound(layers.FusedRMSNormGated, norms.rms_norm_gated)
_NORMS: Final = _bound(layers.FusedRMSNormGated, layers.RMSNorm, norms.L2Norm)
_PADDING: Final = _bound(padding.get_unpad_data, bert_padding.index_first_axis, pad_input)

CONTENTS: Final[dict[str, dict[str, Any]]] = {
    "fla": _bound(layers.GatedDeltaNet, __version__=__version__),
    "fla.layers": _bound(layers.GatedDeltaNet),
    "fla.layers.gated_deltanet": _bound(layers.GatedDeltaNet),
    "fla.layers.utils": _PADDING,
    "fla.modules": _NORMS | _bound(layers.ShortConvolution),
    "fla.modules.causal_conv1d": _CONVOLUTION,
    "fla.modules.causal_conv1d.ops": _CONVOLUTION,
    "fla.modules.conv": _CONVOLUTION,
    "fla.modules.conv.causal_conv1d": _CONVOLUTION,
    "fla.modules.conv.short_conv": _CONVOLUTION,
    "fla.modules.convolution": _CONVOLUTION,
    "fla.modules.fused_norm_gate": _GATED,
    "fla.modules.l2norm": _L2,
    "fla.modules.layernorm": _RMS,
    "fla.modules.norm": _NORMS,
    "fla.modules.norm.fused_norm_gate": _GATED,
    "fla.modules.norm.l2norm": _L2,
    "fla.modules.norm.layernorm": _RMS,
    "fla.ops": _CHUNK | _RECURRENT | _DELTA,
    "fla.ops.delta_rule": _DELTA,
    "fla.ops.delta_rule.chunk": _bound(delta_rule.chunk_delta_rule),
    "fla.ops.delta_rule.fused_recurrent": _bound(delta_rule.fused_recurrent_delta_rule),
    "fla.ops.gated_delta_rule": _CHUNK | _RECURRENT,
    "fla.ops.gated_delta_rule.chunk": _CHUNK,
    "fla.ops.gated_delta_rule.fused_recurrent": _RECURRENT,
    "fla.utils": _bound(check_shared_mem),
}


def modules() -> dict[str, ModuleType]:
    """New modules of these names."""
    return modules_of(CONTENTS)
