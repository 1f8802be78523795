"""`memory_efficient_attention` and what belongs to it, with xformers' signatures, without xformers.

Masks are recognized by the name of their class, so the classes of an installed xformers work, and
copies of them in other code.
"""

from flashvar.integrations.xformers.attention import (
    memory_efficient_attention,
    memory_efficient_attention_partial,
)
from flashvar.integrations.xformers.merge import merge_attentions

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_partial",
    "merge_attentions",
]
