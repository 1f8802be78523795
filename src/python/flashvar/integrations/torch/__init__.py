"""Runs torch's scaled_dot_product_attention with flashvar: `activate` and `deactivate`."""

from flashvar.integrations.torch.activation import (
    SERVED,
    SERVED_BELOW,
    Activation,
    activate,
    active,
    deactivate,
    last_reason,
    report,
)

__all__ = [
    "SERVED",
    "SERVED_BELOW",
    "Activation",
    "activate",
    "active",
    "deactivate",
    "last_reason",
    "report",
]
