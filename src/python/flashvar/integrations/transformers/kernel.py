"""The functions that transformers expects of an attention kernel: those of FlashAttention.

`register` gives this module to transformers' kernel loader. Transformers reads the signature of
`flash_attn_varlen_func` to find which arguments it may pass, and passes lengths instead of masks.
"""

from __future__ import annotations

from flashvar.compat.flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flashvar.flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
