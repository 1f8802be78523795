"""The ops: one folder for each, and what users call by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flashvar.ops.attention.api import attention
    from flashvar.ops.attention.varlen import attention_varlen

__all__ = ["attention", "attention_varlen"]

# Where each public function is; imported at its first use.
HOMES: Final = MappingProxyType(
    {
        "attention": "flashvar.ops.attention.api",
        "attention_varlen": "flashvar.ops.attention.varlen",
    }
)
