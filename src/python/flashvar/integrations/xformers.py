"""`memory_efficient_attention` with the signature of xformers, without xformers.

Masks are recognized by the name of their class, so the classes of an installed xformers work, and
copies of them in other code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from flashvar.errors import DtypeError, InvalidInputError, ShapeError
from flashvar.integrations.torch.sdpa import attend
from flashvar.ops.arguments import check_strided
from flashvar.ops.attention.api import attention
from flashvar.ops.attention.varlen import attention_varlen

__all__ = ["memory_efficient_attention"]


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of query [batch, seqlen_q, heads, head_dim] on key and value, as in xformers.

    The output of a query that sees no key is 0.

    Args:
        query: Dtypes are those of `flashvar.attention`. May also be [batch, seqlen_q, head_dim]
            with one head, or [batch, seqlen_q, groups, heads, head_dim]; key and value that are
            expanded from one head of each group are then not copied.
        key: Like query, with seqlen_k.
        value: Like key, with its own head dim.
        attn_bias: None; a tensor that is added to the scores, [batch or 1, heads or 1, seqlen_q or
            1, seqlen_k], without heads if query has 3 dimensions; or a mask: LowerTriangularMask
            (from the top left), LowerTriangularFromBottomRightMask,
            LocalAttentionFromBottomRightMask, LowerTriangularFromBottomRightLocalAttentionMask,
            BlockDiagonalMask, BlockDiagonalCausalMask, BlockDiagonalCausalFromBottomRightMask.
        p: Dropout: the probability with which an attention probability becomes 0.
        scale: Factor of the scores; head_dim ** -0.5 by default.
        op: Ignored; flashvar chooses the kernel.
        output_dtype: The dtype of the output; that of query by default.

    Returns:
        The output, in the shape of query but with the head dim of value.

    Raises:
        InvalidInputError: another kind of mask, or an argument that `flashvar.attention` refuses.
        BackendUnavailableError: as `flashvar.attention`.
    """
    _check(query, key, value)
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise DtypeError(
            f"output_dtype must be a torch.dtype, got {output_dtype!r}: leave it out for that of "
            "query"
        )
    shape = (*query.shape[:-1], value.shape[-1])
    q, k, v = _with_heads(query, key, value)
    kind = type(attn_bias).__name__
    if attn_bias is None:
        out = attention(q, k, v, dropout_p=p, scale=scale)
    elif kind == _TOP_LEFT:
        out = attend(q, k, v, None, p, True, scale, "bshd", "auto")
    elif kind in _DENSE_MASKS:
        out = attention(q, k, v, dropout_p=p, scale=scale, **_DENSE_MASKS[kind](attn_bias))
    elif kind in _PACKED_MASKS:
        _check_packed((q, k, v), attn_bias, kind)
        out = _packed(q[0], k[0], v[0], attn_bias, p, scale, causal=_PACKED_MASKS[kind])
    elif isinstance(attn_bias, torch.Tensor) and attn_bias.dim() == query.dim():
        check_strided("attn_bias", attn_bias)
        bias = attn_bias.unsqueeze(1) if query.dim() == 3 else attn_bias.flatten(1, -3)
        out = attend(q, k, v, bias, p, False, scale, "bshd", "auto")
    else:
        masks = ", ".join((_TOP_LEFT, *_DENSE_MASKS, *_PACKED_MASKS))
        raise InvalidInputError(
            f"attn_bias must be None, a tensor of {query.dim()} dimensions as query, or one of "
            f"{masks}; got {kind}: materialize it into such a tensor"
        )
    out = out.reshape(shape)
    return out if output_dtype is None else out.to(output_dtype)


_TOP_LEFT: Final = "LowerTriangularMask"
# The options of flashvar.attention for each mask. The size of a window of xformers includes the
# query's own key.
_DENSE_MASKS: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "LowerTriangularFromBottomRightMask": lambda mask: {"causal": True},
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda mask: {
        "window_size": (mask._window_size - 1, 0)
    },
    "LocalAttentionFromBottomRightMask": lambda mask: {
        "window_size": (mask.window_left, mask.window_right)
    },
}
# Masks of packed sequences, and whether each is causal.
_PACKED_MASKS: Final = {
    "BlockDiagonalMask": False,
    "BlockDiagonalCausalMask": True,
    "BlockDiagonalCausalFromBottomRightMask": True,
}


def _check(query: Any, key: Any, value: Any) -> None:
    """Refuse arguments that are not tensors of the same rank, 3, 4 or 5."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_strided(name, tensor)
        if tensor.dim() not in (3, 4, 5) or tensor.dim() != query.dim():
            raise ShapeError(
                f"query, key and value must all have 3, 4 or 5 dimensions, got {name} of shape "
                f"{tuple(tensor.shape)} beside query {tuple(query.shape)}: [batch, seqlen, heads, "
                "head_dim] is the common form"
            )


def _with_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors in 4 dimensions."""
    if q.dim() == 3:
        return q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2)
    if q.dim() == 5:
        if k.stride(3) == 0 and v.stride(3) == 0:  # expanded from one head per group
            return q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0]
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
    return q, k, v


def _check_packed(tensors: tuple[torch.Tensor, ...], mask: Any, kind: str) -> None:
    batches = [tensor.shape[0] for tensor in tensors]
    if batches != [1, 1, 1]:
        raise ShapeError(
            f"{kind} needs a batch of 1, got {', '.join(map(str, batches))} in query, key and "
            "value: concatenate the sequences along the second dimension"
        )
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    # Diagonals of the mask begin in the top left corners, flashvar's end in the bottom right.
    if kind == "BlockDiagonalCausalMask" and not _same_lengths(queries, keys):
        raise InvalidInputError(
            f"{kind} must have equal lengths of queries and keys, got different ones: use "
            "BlockDiagonalCausalFromBottomRightMask if the last query sees all keys"
        )


def _same_lengths(queries: Any, keys: Any) -> bool:
    """Whether both are one object or have equal offsets, as after a copy to another device."""
    if queries is keys:
        return True
    offsets = [getattr(one, "seqstart_py", None) for one in (queries, keys)]
    return offsets[0] is not None and list(offsets[0]) == list(offsets[1] or ())


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    p: float,
    scale: float | None,
    causal: bool,
) -> torch.Tensor:
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=queries.seqstart.to(q.device),
        cu_seqlens_k=keys.seqstart.to(q.device),
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen,
        causal=causal,
        dropout_p=p,
        scale=scale,
    )
