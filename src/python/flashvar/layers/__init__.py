"""Layers of models, with the constructors and state dicts of flash-linear-attention.

    from flashvar.layers import GatedDeltaNet

    layer = GatedDeltaNet(hidden_size=1024, head_dim=128, num_heads=6)
    out, _, _ = layer(hidden_states)

flash-linear-attention need not be installed. State dicts load both ways.
"""

from flashvar.layers.gated_deltanet import GatedDeltaNet
from flashvar.layers.norms import (
    FusedRMSNormGated,
    L2Norm,
    RMSNorm,
    l2norm,
    rms_norm,
    rms_norm_gated,
)
from flashvar.layers.short_convolution import ShortConvolution
from flashvar.layers.state_cache import StateCache

__all__ = [
    "FusedRMSNormGated",
    "GatedDeltaNet",
    "L2Norm",
    "RMSNorm",
    "ShortConvolution",
    "StateCache",
    "l2norm",
    "rms_norm",
    "rms_norm_gated",
]
