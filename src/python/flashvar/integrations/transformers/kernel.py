"""The module shape that transformers expects of an attention kernel: FlashAttention's functions.

`register` gives it to transformers' loader of kernels. It looks at the arguments of
`flash_attn_varlen_func` for what it may ask, and has no mask but lengths.
"""

from __future__ import annotations

from flashvar.compat.flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flashvar.flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
