"""The modules that stand in for flash-linear-attention where it is not installed."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from flashvar import layers
from flashvar.compat.fla import __version__, convolution, delta_rule
from flashvar.compat.fla.shared_memory import check_shared_mem
from flashvar.compat.stand_in import modules_of

__all__ = ["modules"]


def _bound(*objects: Any, **others: Any) -> dict[str, Any]:
    return {one.__name__: one for one in objects} | others


_CHUNK: Final = _bound(delta_rule.chunk_gated_delta_rule, chunk_gdn=delta_rule.chunk_gdn)
_RECURRENT: Final = _bound(
    delta_rule.fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn=delta_rule.fused_recurrent_gdn,
)
_DELTA: Final = _bound(delta_rule.chunk_delta_rule, delta_rule.fused_recurrent_delta_rule)
_CONVOLUTION: Final = _bound(
    convolution.causal_conv1d, convolution.causal_conv1d_update, layers.ShortConvolution
)
_NORMS: Final = _bound(layers.FusedRMSNormGated, layers.RMSNorm)

CONTENTS: Final[dict[str, dict[str, Any]]] = {
    "fla": {"__version__": __version__},
    "fla.layers": _bound(layers.GatedDeltaNet),
    "fla.layers.gated_deltanet": _bound(layers.GatedDeltaNet),
    "fla.modules": _NORMS | _bound(layers.ShortConvolution),
    "fla.modules.causal_conv1d": _CONVOLUTION,
    "fla.modules.conv": _CONVOLUTION,
    "fla.modules.convolution": _CONVOLUTION,
    "fla.ops": _CHUNK | _RECURRENT | _DELTA,
    "fla.ops.delta_rule": _DELTA,
    "fla.ops.gated_delta_rule": _CHUNK | _RECURRENT,
    "fla.ops.gated_delta_rule.chunk": _CHUNK,
    "fla.ops.gated_delta_rule.fused_recurrent": _RECURRENT,
    "fla.utils": _bound(check_shared_mem),
}


def modules() -> dict[str, ModuleType]:
    """New modules of these names."""
    return modules_of(CONTENTS)
