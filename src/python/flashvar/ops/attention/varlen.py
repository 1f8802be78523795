"""`flashvar.attention_varlen`: attention of sequences that are packed into one tensor."""

from __future__ import annotations

from typing import Literal, overload

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.arguments import check_flag
from flashvar.ops.attention.call import call, rng_state_of
from flashvar.ops.attention.options import window_pair
from flashvar.ops.attention.problem import pack_options, pack_tensors
from flashvar.selection.request import BackendName


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    seqused_k: torch.Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    backend: BackendName = ...,
) -> torch.Tensor: ...


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    seqused_k: torch.Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    seqused_k: torch.Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    sinks: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
    backend: BackendName = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: BackendName = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each of several sequences that are concatenated in one tensor.

    Each sequence is computed as by `flashvar.attention`, which documents the options.

    Args:
        q: [total_q, heads_q, head_dim]; sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k: [total_k, heads_kv, head_dim], packed as cu_seqlens_k says; or, if cu_seqlens_k is None,
            dense [batch, seqlen_k, heads_kv, head_dim], for example a static KV cache.
        v: Like k; its head dim may differ.
        cu_seqlens_q: Offsets, not lengths: int32 or int64 [batch + 1] on the device of q, the start
            of the first sequence, usually 0, then the end of each, at most total_q. Two equal
            neighbors mean an empty sequence. Tokens outside of every sequence, before the first and
            after the last, are padding: their output is 0 and their log-sum-exp -inf. Kernels take
            int32; int64 is cast at every call.
        cu_seqlens_k: The same for k and v; cu_seqlens_q by default if k is packed.
        max_seqlen_q: An upper bound of the lengths of q; total_q by default. It may be larger than
            the longest sequence, but not smaller. On the CPU a smaller one is an error. On a GPU
            lengths are not read, so the results are undefined and may be NaN. If it is 1, as in
            decoding, keys are read once for all query heads of a group, unless there is dropout, a
            window with `cu_seqlens_k` or `seqused_k`, or a softcap or ALiBi with `cu_seqlens_k`.
        max_seqlen_k: The same for k and v.
        seqused_k: int32 or int64 [batch] on the device of q: only the first seqused_k[b] keys of
            sequence b are used.
        causal: As in attention, with the lengths of each sequence.
        scale: As in attention.
        window_size: As in attention.
        softcap: As in attention.
        sinks: As in attention.
        alibi_slopes: As in attention.
        dropout_p: As in attention.
        rng_state: As in attention.
        deterministic: As in attention.
        return_lse: Also return the log-sum-exp.
        backend: As in attention.

    Returns:
        The output [total_q, heads_q, head_dim_v]; with `return_lse` also the natural log-sum-exp
        [heads_q, total_q] in float32. Rows outside of every sequence have 0 and -inf.

    Raises:
        InvalidInputError: as in attention. Offsets that decrease or exceed the tensor, and
            seqused_k beyond a sequence, are errors on the CPU. On a CUDA device the kernels clamp
            them; with FLASHVAR_STRICT=1 they are errors there too, and every call waits for the
            device.
        BackendUnavailableError: as in attention.
        BinaryError: as in attention.
    """
    if cu_seqlens_q is None:
        raise InvalidInputError(
            "attention_varlen needs cu_seqlens_q, found None: call flashvar.attention for dense "
            "tensors"
        )
    if cu_seqlens_k is None and isinstance(k, torch.Tensor) and k.dim() == 3:
        cu_seqlens_k = cu_seqlens_q
    rng_state = rng_state_of(q, dropout_p, rng_state)
    tensors = pack_tensors(
        None, sinks, alibi_slopes, rng_state, cu_seqlens_q, cu_seqlens_k, seqused_k
    )
    left, right = window_pair(window_size)
    if return_lse is not False and return_lse is not True:
        check_flag("return_lse", return_lse)
    options = pack_options(
        causal,
        scale,
        left,
        right,
        softcap,
        dropout_p,
        deterministic,
        "bshd",
        backend,
        max_seqlen_q,
        max_seqlen_k,
    )
    out, lse = call(q, k, v, tensors, options, return_lse)
    return (out, lse) if lse is not None and return_lse else out
