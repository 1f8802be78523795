"""Runs torch's scaled_dot_product_attention with flashvar: `activate` and `deactivate`."""

from flashvar.integrations.torch.activation import (
    RUN,
    RUN_BELOW_DISPATCHER,
    Activation,
    activate,
    active,
    deactivate,
    last_reason,
    report,
)

__all__ = [
    "RUN",
    "RUN_BELOW_DISPATCHER",
    "Activation",
    "activate",
    "active",
    "deactivate",
    "last_reason",
    "report",
]
