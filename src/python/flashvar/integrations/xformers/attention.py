"""`memory_efficient_attention` with the signature of xformers, and the same with a log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.integrations.torch.sdpa import attend, attend_with_lse
from flashvar.integrations.xformers.masks import DENSE, PACKED, begins_top_left
from flashvar.integrations.xformers.output import check_dtype
from flashvar.ops.arguments import check_strided
from flashvar.ops.attention.api import attention
from flashvar.ops.attention.varlen import attention_varlen
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.sequences import shares_memory
from flashvar.ops.unknown_sizes import differ, is_known

__all__ = ["memory_efficient_attention", "memory_efficient_attention_partial"]

# Class of a mask from the top left corner -> the tensor that is added to the scores too.
_TOP_LEFT: Final[dict[str, Callable[[Any], Any]]] = {
    "LowerTriangularMask": lambda mask: None,
    "LowerTriangularMaskWithTensorBias": lambda mask: mask._bias,
}


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
            expanded from one head of each group are then not copied, unless a gradient is kept in
            the expanded tensor.
        key: Like query, with seqlen_k.
        value: Like key, with its own head dim.
        attn_bias: None; a tensor that is added to the scores, [batch or 1, heads or 1, seqlen_q or
            1, seqlen_k], without heads if query has 3 dimensions, with groups or 1 before the heads
            if it has 5; or a mask of a class of xformers, known by its name. With Gappy and Paged
            masks keys and values are copied.
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
    return _attention(query, key, value, attn_bias, p, scale, output_dtype, False)[0]


def memory_efficient_attention_partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `memory_efficient_attention`, with the log-sum-exp, which `merge_attentions` takes.

    It is [batch, heads, seqlen_q], with groups [batch, groups, heads, seqlen_q], and -inf for a
    query that sees no key. Both results have gradients.
    """
    out, lse = _attention(query, key, value, attn_bias, p, scale, output_dtype, True)
    assert lse is not None
    return out, lse.unflatten(1, query.shape[2:4]) if query.dim() == 5 else lse


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any,
    p: float,
    scale: float | None,
    output_dtype: torch.dtype | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output in the shape of query, and the log-sum-exp [batch, heads, seqlen_q] if wanted."""
    _check(query, key, value)
    check_dtype(output_dtype, "query")
    q, k, v = _with_heads(query, key, value)
    kind = type(attn_bias).__name__
    common: dict[str, Any] = {"dropout_p": p, "scale": scale, "return_lse": return_lse}
    found: Any
    if attn_bias is None:
        found = attention(q, k, v, **common)
    elif kind in DENSE:
        found = attention(q, k, v, **common, **DENSE[kind](attn_bias))
    elif kind in PACKED:
        _check_packed((q, k, v), kind)
        packed = _backwards if begins_top_left(attn_bias, kind) else _packed
        found = packed(q[0], k[0], v[0], attn_bias, kind, common)
        found = (found[0], found[1][None]) if return_lse else found
    elif kind in _TOP_LEFT or isinstance(attn_bias, torch.Tensor):
        top_left = kind in _TOP_LEFT
        bias = _TOP_LEFT[kind](attn_bias) if top_left else attn_bias
        bias = None if bias is None else _in_four_dimensions(bias, query)
        arguments = (q, k, v, bias, p, top_left, scale)
        found = attend_with_lse(*arguments) if return_lse else attend(*arguments, "bshd", "auto")
    else:
        masks = ", ".join((*_TOP_LEFT, *DENSE, *PACKED))
        raise InvalidInputError(
            f"attn_bias must be None, a tensor or one of {masks}; found {kind}: materialize it "
            "into a tensor"
        )
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    return out if output_dtype is None else out.to(output_dtype), lse


def _in_four_dimensions(given: Any, query: torch.Tensor) -> torch.Tensor:
    """A tensor that is added to the scores, in 4 dimensions."""
    check_strided("attn_bias", given)
    if given.dim() != query.dim():
        raise ShapeError(
            f"attn_bias must have {query.dim()} dimensions, as query has, found {given.dim()}: "
            "add dimensions of size 1 for batch and heads"
        )
    if query.dim() == 3:
        return given.unsqueeze(1)
    return given if query.dim() == 4 else _of_all_heads(given, *query.shape[2:4])


def _of_all_heads(given: torch.Tensor, groups: int, heads: int) -> torch.Tensor:
    """[batch, groups or 1, heads or 1, ...] as [batch, groups * heads or 1, ...]."""
    found = given.shape[1:3]
    pairs = zip(found, (groups, heads), strict=True)
    if any(is_known(have != want) and is_known(have != 1) for have, want in pairs):
        raise ShapeError(
            f"attn_bias must have {groups} (or 1) groups of {heads} (or 1) heads, found "
            f"{tuple(given.shape)}: transpose or expand() the second and third dimension"
        )
    if not (is_known(found[0] == 1) and is_known(found[1] == 1)):
        given = given.expand(-1, groups, heads, -1, -1)
    return given.flatten(1, 2)


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    kind: str,
    common: dict[str, Any],
) -> Any:
    """The results of packed sequences, with a batch of 1."""
    find_keys, options = PACKED[kind]
    queries, keys = mask.q_seqinfo, find_keys(mask, k, v)
    found = attention_varlen(
        q,
        keys.k,
        keys.v,
        cu_seqlens_q=queries.seqstart.to(q.device),
        cu_seqlens_k=keys.cu_seqlens_k,
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen_k,
        seqused_k=keys.seqused_k,
        **common,
        **options(mask),
    )
    return found


def _backwards(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    kind: str,
    common: dict[str, Any],
) -> Any:
    """`_packed` with diagonals from the top left corners.

    With queries and keys in reverse order they end in the bottom right corners, and what was to the
    left of them is to the right.
    """
    _, options = PACKED[kind]
    seen, _ = options(mask).get("window_size", (-1, 0))
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    if (len(q), len(k)) != (queries.seqstart_py[-1], keys.seqstart_py[-1]):
        raise ShapeError(
            f"{kind} must be of all tokens, {len(q)} queries and {len(k)} keys, found sequences of "
            f"{queries.seqstart_py[-1]} and {keys.seqstart_py[-1]}: leave other tokens out"
        )
    ends_q, ends_k = queries.seqstart.to(q.device), keys.seqstart.to(q.device)
    found = attention_varlen(
        q.flip(0),
        k.flip(0),
        v.flip(0),
        cu_seqlens_q=ends_q[-1] - ends_q.flip(0),
        cu_seqlens_k=ends_k[-1] - ends_k.flip(0),
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen,
        window_size=(0, seen),
        **common,
    )
    return (found[0].flip(0), found[1].flip(1)) if isinstance(found, tuple) else found.flip(0)


def _check_packed(tensors: tuple[torch.Tensor, ...], kind: str) -> None:
    batches = [tensor.shape[0] for tensor in tensors]
    if batches != [1, 1, 1]:
        raise ShapeError(
            f"{kind} needs a batch of 1, found {', '.join(map(str, batches))} in query, key and "
            "value: concatenate the sequences along the second dimension"
        )


def _check(query: Any, key: Any, value: Any) -> None:
    """Refuse arguments that are not tensors of the same rank, 3, 4 or 5, or do not fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_strided(name, tensor)
        if tensor.dim() not in (3, 4, 5) or tensor.dim() != query.dim():
            raise ShapeError(
                f"query, key and value must all have 3, 4 or 5 dimensions, found {name} of shape "
                f"{tuple(tensor.shape)} with query {tuple(query.shape)}: [batch, seqlen, heads, "
                "head_dim] is the common form"
            )
    if differ(key.shape[1:-1], value.shape[1:-1]):
        raise ShapeError(
            f"key and value must have the same sequence length and heads, found "
            f"{tuple(key.shape)} and {tuple(value.shape)}: pass one value for each key"
        )
    if query.dim() == 5 and differ(query.shape[2:4], key.shape[2:4]):
        raise ShapeError(
            "query, key and value of 5 dimensions must have the same groups and heads, found "
            f"{tuple(query.shape)} and {tuple(key.shape)}: expand() the heads of key and value"
        )


def _with_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors in 4 dimensions."""
    if q.dim() == 3:
        return q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2)
    if q.dim() == 5:
        if _is_of_one_head(k) and _is_of_one_head(v):
            return q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0]
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
    return q, k, v


def _is_of_one_head(tensor: torch.Tensor) -> bool:
    """Whether each group is expanded from one head, and gradients of its heads are only summed.

    The gradient of all heads is in the first one then. It would be wrong in a tensor that keeps it,
    or in one whose own memory is that of one head.
    """
    if tensor.stride(3) != 0:
        return False
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return True
    if tensor.is_leaf or tensor.retains_grad:
        return False
    if is_compiling():  # Dynamo does not know of what a tensor is a view
        return True
    base = tensor._base
    if base is None or not base.requires_grad:
        return False
    return not shares_memory(base)
