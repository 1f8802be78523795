"""The functions of FlashAttention 2 (Dao 2023), with its names, argument order and defaults.

Import them from here instead of from `flash_attn`; nothing else changes. Tensors are bfloat16 or
float16. Intended differences:

* CPU tensors are supported too, also in float32 and float64.
* A query that sees no key has log-sum-exp -inf, not +inf.
* With ALiBi the log-sum-exp is exact, also under a causal mask.
* The log-sum-exp has a gradient.
* v may have a head dim of its own.
* Dropout zeroes the same elements of P, the softmax of the scores, in every backend.

Arguments of all functions:

* `dropout_p`: Probability, below 1, that an element of P becomes 0; not together with softcap.
* `softmax_scale`: Factor of the scores; head_dim ** -0.5 by default.
* `causal`: Hide keys after the diagonal, which ends in the bottom right corner.
* `window_size`: (left, right), how many keys beside the diagonal a query sees; negative: all.
* `softcap`: Bound of the scores, softcap * tanh(score / softcap); 0 for no bound.
* `alibi_slopes`: float32 [heads_q] or [batch, heads_q]; -slope * distance is added to the scores.
* `deterministic`: Make the gradients bit-identical between runs.
* `return_attn_probs`: Return (out, softmax_lse, S_dmask): softmax_lse is float32 [batch, heads_q,
  seqlen_q], packed [heads_q, total_q]. S_dmask is for tests: empty without dropout, otherwise
  [batch, heads_q, seqlen_q, seqlen_k] with both lengths rounded up to a multiple of 128. Negative
  entries were dropped. The magnitude of an entry is exp(s - m): s is the score, m the running
  maximum of its query in FlashAttention's kernel, which starts with the last keys.

Errors are those of `flashvar.attention`. The batch must not be empty.
"""

from __future__ import annotations

import torch

from flashvar.ops.arguments import refuses_unknown_subclasses
from flashvar.ops.attention.flash_attn import (
    Result,
    SharedArguments,
    Window,
    dense,
    unpacked,
    varlen,
)
from flashvar.ops.attention.kv_cache import Arguments, with_kv_cache
from flashvar.ops.rotary.rotation import checked
from flashvar.ops.rotary.torch_library import rotate

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attend from q [batch, seqlen_q, heads_q, head_dim] to the keys k, with the values v.

    k is [batch, seqlen_k, heads_kv, head_dim], v [batch, seqlen_k, heads_kv, head_dim_v]; heads_q
    is a multiple of heads_kv. Returns out [batch, seqlen_q, heads_q, head_dim_v].
    """
    arguments = SharedArguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return dense(q, k, v, arguments)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of the slices of qkv [batch, seqlen, 3, heads, head_dim], not copied."""
    arguments = SharedArguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    q, k, v = unpacked("qkv", qkv, 5, 3)
    return dense(q, k, v, arguments)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q and the slices of kv [batch, seqlen_k, 2, heads_kv, head_dim]."""
    arguments = SharedArguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    k, v = unpacked("kv", kv, 5, 2)
    return dense(q, k, v, arguments)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """Attend within each of several packed sequences: q is [total_q, heads_q, head_dim].

    k is [total_k, heads_kv, head_dim], v [total_k, heads_kv, head_dim_v].

    Sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k and v; both
    are int32 or int64 [batch + 1] on the device of q. max_seqlen_q and max_seqlen_k bound the
    lengths. Returns out [total_q, heads_q, head_dim_v].

    With block_table [batch, pages of a sequence] k and v are pools of pages, [pages, page_size,
    heads_kv, head_dim] and head_dim_v, and cu_seqlens_k has the lengths. Few queries read the pages
    in place, as in flash_attn_with_kvcache; otherwise, with dropout, and for gradients,
    max_seqlen_k rows of each sequence are copied first. A sequence whose pages of keys are negative
    is padding: its output is 0.
    """
    arguments = SharedArguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return varlen(q, k, v, *packing, arguments, block_table)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of the slices of qkv [total, 3, heads, head_dim], not copied."""
    arguments = SharedArguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    packing = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    q, k, v = unpacked("qkv", qkv, 4, 3)
    return varlen(q, k, v, *packing, arguments)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q and the slices of kv [total_k, 2, heads_kv, head_dim]."""
    arguments = SharedArguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = unpacked("kv", kv, 4, 2)
    return varlen(q, k, v, *packing, arguments)


@refuses_unknown_subclasses
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Write new keys into a KV cache; attention of q [batch, seqlen_q, heads_q, head_dim] on it.

    Rotation, write and attention are separate kernels. With block_table, cache_batch_idx or
    cache_leftpad a Triton kernel reads the cache in place. Calls with more than 128 queries times
    heads of a group copy keys and values first into a dense tensor: as many as the longest sequence
    has, for which the host waits, or as the cache has room for. There are no gradients.

    A sequence whose length, slot, or page of a key is negative is padding of the batch, as in the
    CUDA graphs of transformers: nothing is written for it, its output is 0, and its log-sum-exp is
    -inf.

    Args:
        q: The queries, which are the last tokens of the sequences.
        k_cache: [slots, capacity, heads_kv, head_dim]; with block_table [pages, page_size, ...] of
            any page size.
        v_cache: As k_cache. With new keys no slot or page may be the memory of that of k_cache.
        k: New keys [batch, seqlen_new, heads_kv, head_dim], written after those in the cache.
        v: As k.
        rotary_cos: [positions, pairs]: rotate k, and q from the position cache_seqlens on; without
            causal, and without a window below the capacity, all of q is at that position.
        rotary_sin: As rotary_cos.
        cache_seqlens: How many keys are in the cache before the call, one number or int32 [batch];
            all by default.
        cache_batch_idx: int32 [batch], the slot of each sequence; in order by default. With new
            keys each slot once: otherwise an error on the CPU, and undefined on a GPU.
        cache_leftpad: int32 [batch], how many rows at the start of each sequence are not used.
        block_table: int32 [batch, pages], the pages of each sequence. Sequences may share pages,
            but not rows of new keys: otherwise an error on the CPU, and undefined on a GPU. More
            keys than it has room for, or a page that k_cache does not have: an error on the CPU,
            NaN on a GPU.
        softmax_scale: As above, like causal, window_size, softcap and alibi_slopes.
        causal: The last query sees all keys.
        window_size: As above.
        softcap: As above.
        rotary_interleaved: Rotate entries 2 i and 2 i + 1 as a pair, rather than i and i + pairs.
        alibi_slopes: As above.
        num_splits: Not used: the kernels choose it.
        return_softmax_lse: Also return the log-sum-exp [batch, heads_q, seqlen_q].
    """
    given = Arguments(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx),
        *(cache_leftpad, block_table, softmax_scale, causal, window_size, softcap),
        *(rotary_interleaved, alibi_slopes),
    )
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    found = with_kv_cache(given, _rotated, return_softmax_lse)
    return found


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, begins: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    return rotate(x, checked(x, cos, sin, interleaved=interleaved, seqlen_offsets=begins))
