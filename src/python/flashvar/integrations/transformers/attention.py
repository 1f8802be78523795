"""The attention function that transformers calls in every layer of a model that uses flashvar."""

from __future__ import annotations

from inspect import signature
from typing import Any, Final

import torch

from flashvar.errors import (
    BackendUnavailableError,
    DtypeError,
    InvalidInputError,
    ShapeError,
)
from flashvar.integrations.torch.attribute import splits_sequences
from flashvar.integrations.transformers.context_parallel import distributed_attention
from flashvar.integrations.transformers.fallback import Call, fall_back
from flashvar.integrations.transformers.lazy_masks import LazyMask, attached
from flashvar.integrations.transformers.model_check import (
    called,
    called_in_graph,
    causal_without_mask,
)
from flashvar.integrations.transformers.rows import Rows, rows_of_positions, same_sequence
from flashvar.integrations.transformers.visibility import (
    Visibility,
    additive,
    as_bias,
    bounded_window,
    padding_visibility,
)
from flashvar.ops.attention.api import attention as dense
from flashvar.ops.attention.validate import rows_contiguous
from flashvar.ops.attention.varlen import attention_varlen
from flashvar.ops.dispatch_modes import have_values

_ROWS: Final = "_flashvar_rows"
# Arguments of a layer that are not supported, and why.
_UNSUPPORTED: Final = {
    "output_attentions": "it keeps no attention weights",
    "head_mask": "it takes no head_mask",
    "block_table": "it does not read paged caches in place",
    "indices": "it does not select keys by indices",
    "block_indices": "it does not select keys by indices",
    "sinks": "it takes no sinks that change with the query",
}
_CHANGING: Final = frozenset((*_UNSUPPORTED, "cu_seq_lens_q"))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a layer, with the signature that transformers expects.

    Args:
        module: The layer; its attribute `is_causal` applies if the argument is None.
        query: [batch, heads_q, seqlen_q, head_dim].
        key: [batch, heads_kv, seqlen_k, head_dim]; rows beyond the mask are not read.
        value: [batch, heads_kv, seqlen_k, head_dim_v].
        attention_mask: The result of flashvar's mask function; or [batch, keys], 0 for padding; or
            [batch or 1, heads or 1, seqlen_q or 1, keys], bool or added to the scores.
        dropout: Probability that a weight becomes 0.
        scaling: Factor of the scores.
        is_causal: Hide later keys.
        sliding_window: Keys that a query sees, including its own; on each side if not causal.
        softcap: Bound of the scores.
        s_aux: [heads_q], the scores of keys without values (attention sinks).
        position_bias: [batch or 1, heads_q, seqlen_q, keys], added to the scores.
        others: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` and `position_ids`
            of packed sequences; the `cache` of continuous batching. Other arguments of a model are
            ignored.

    Returns:
        The output [batch, seqlen_q, heads_q, head_dim_v], finite for padding queries; and None
        instead of the weights, unless the fallback returns weights that the model requested.

    Raises:
        BackendUnavailableError: FLASHVAR_STRICT=1, and flashvar does not support the call; or the
            call is inside torch's context_parallel, which does not support it.
        ShapeError: the mask has another rank.
        DtypeError: a mask of 4 dimensions is of integers.
    """
    if torch.compiler.is_dynamo_compiling():
        called_in_graph(type(module))
    elif not torch.compiler.is_compiling():
        called()
    in_parts = splits_sequences()
    if others.get("cache") is not None and not in_parts:
        key, value = _paged(module, key, value, others)
        attention_mask = None  # it covers only the new queries, not the keys of the cache
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
        if is_causal and attention_mask is None:
            is_causal = causal_without_mask(type(module))
    if in_parts:
        call = Call(query, key, value, dropout, scaling, softcap, s_aux, position_bias)
        # The positions of a part do not describe the whole sequence.
        visibility = _visibility(
            call, attention_mask, is_causal, sliding_window, {**others, "position_ids": None}
        )
        return distributed_attention(module, call, visibility, others), None
    causal, plain, by_mask = is_causal, sliding_window is None, False
    if attention_mask is not None:
        known = attached(attention_mask)
        # A mask of fewer keys hides the others.
        made_for = (query.shape[0], 1, query.shape[2], key.shape[2])
        plain = known is not None and known.plain and attention_mask.shape == made_for
        if known is not None:
            causal, by_mask = known.causal, known.by_mask
    if plain and position_bias is None and _is_plain(others, query, by_mask):
        # Fast path: look-ups dominate the time of small calls. Refused calls take the general path.
        try:
            out = dense(
                *(query, key, value),
                causal=causal,
                scale=scaling,
                softcap=softcap or 0.0,
                sinks=s_aux,
                dropout_p=dropout,
                layout="bhsd->bshd",
            )
            return out, None
        except (BackendUnavailableError, InvalidInputError):
            pass
    call = Call(query, key, value, dropout, scaling, softcap, s_aux, position_bias)
    visibility = _visibility(call, attention_mask, is_causal, sliding_window, others)
    try:
        for name, why in _UNSUPPORTED.items():
            if (given := others.get(name)) is not None and given is not False:
                raise BackendUnavailableError(why)
        return _by_flashvar(call, visibility), None
    except (BackendUnavailableError, InvalidInputError) as error:
        reason = str(error)
    return fall_back(reason, module, call, visibility, others)


def _is_plain(others: dict[str, Any], query: torch.Tensor, by_mask: bool) -> bool:
    """Whether the other arguments of a layer certainly have no effect."""
    for name in others:  # a loop: torch.compile cannot trace isdisjoint of dict keys
        if name in _CHANGING:
            return False
    positions = others.get("position_ids")
    if positions is None or by_mask:
        return True
    shape: tuple[int, ...] = query.shape
    if shape[0] != 1 or shape[2] == 1:
        return True
    if torch.compiler.is_compiling():  # a graph does not know the version of a tensor
        return False
    known = getattr(positions, _ROWS, None)
    return known is not None and known[1] is None and known[0] == positions._version


def _visibility(
    call: Call,
    mask: torch.Tensor | None,
    causal: bool,
    sliding_window: int | None,
    others: dict[str, Any],
) -> Visibility:
    """The visibility of a call: from the mask, or from the other arguments if the mask has none."""
    keys = call.key.shape[2]
    if mask is None:
        visibility = Visibility(causal, _window(causal, sliding_window, keys), keys)
        return _packed_visibility(call, visibility, others)
    known = attached(mask)
    if known is not None and known.plain and not known.causal:
        # It hides nothing. Encoders with a cache create it for the new keys alone.
        return _packed_visibility(call, known._replace(keys=keys), others)
    if known is not None and mask.shape == (call.query.shape[0], 1, call.query.shape[2], keys):
        return _packed_visibility(call, known, others)
    if isinstance(mask, LazyMask):
        mask = mask.values()
    return _visibility_of_mask(call, mask, causal, sliding_window)


def _window(causal: bool, size: int | None, keys: int) -> tuple[int, int]:
    """The sliding window of a layer, as `window_size`."""
    if size is None:
        return (-1, -1)
    return bounded_window((size - 1, -1 if causal else size - 1), keys)


def _packed_visibility(call: Call, visibility: Visibility, others: dict[str, Any]) -> Visibility:
    """The visibility with packed sequences, if the other arguments of a layer describe them."""
    if visibility.rows is not None or visibility.bias is not None:
        return visibility
    if others.get("cu_seq_lens_q") is not None:
        return visibility._replace(rows=_rows_of_offsets(call, others))
    batch, _, seqlen_q, _ = call.query.shape
    keys = call.key.shape[2]
    positions = others.get("position_ids")
    # As in transformers, positions that restart mark sequences only in causal models.
    if (
        positions is not None
        and not visibility.by_mask
        and visibility.causal
        and batch == 1
        and 1 < seqlen_q == keys
        and positions.shape == (1, keys)
    ):
        if not have_values(positions):
            # A bias: a graph must not depend on the number of sequences.
            return visibility._replace(bias=same_sequence(positions))
        return visibility._replace(rows=_rows_of_positions(positions))
    return visibility


def _visibility_of_mask(
    call: Call, mask: torch.Tensor, causal: bool, sliding_window: int | None
) -> Visibility:
    """The visibility of a plain mask; a mask of 4 dimensions already includes causality."""
    keys = min(mask.shape[-1], call.key.shape[2])
    if mask.dim() == 4:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise DtypeError(
                "attention_mask of 4 dimensions must be bool, or of a floating dtype to be added "
                f"to the scores, found {mask.dtype}: cast a mask of ones and zeros with .bool()"
            )
        if mask.shape[-1] == 1:  # broadcast, as eager attention does
            keys = call.key.shape[2]
            mask = mask.expand(-1, -1, -1, keys)
        return Visibility(False, (-1, -1), keys, bias=mask[..., :keys])
    if mask.dim() == 2:
        window = _window(causal, sliding_window, keys)
        return padding_visibility(mask[:, :keys], call.query.shape[2], causal, window)
    raise ShapeError(
        "attention_mask must have 2 dimensions (batch, keys) or 4 (batch, heads, seqlen_q, keys), "
        f"found shape {tuple(mask.shape)}: add the missing ones with unsqueeze()"
    )


def _paged(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, others: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all requests, from the cache of continuous batching.

    The cache writes the lengths of the sequences into the other arguments.
    """
    cache = others.pop("cache")
    if "kwargs" not in signature(type(cache).update).parameters:
        raise BackendUnavailableError(
            "continuous batching needs transformers 5.23 or newer, whose paged cache passes "
            "lengths, found an older one: pip install --upgrade transformers, or choose sdpa"
        )
    pair: tuple[torch.Tensor, torch.Tensor] = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others
    )
    return pair


def _rows_of_offsets(call: Call, others: dict[str, Any]) -> Rows:
    """The rows of sequences that the caller packed; optional arguments default to those of q."""
    offsets_q = others["cu_seq_lens_q"].to(torch.int32)
    offsets_k, longest_q, longest_k = (
        others.get(name) for name in ("cu_seq_lens_k", "max_length_q", "max_length_k")
    )
    batch, _, seqlen_q, _ = call.query.shape
    return Rows(
        None,
        None,
        offsets_q,
        offsets_q if offsets_k is None else offsets_k.to(torch.int32),
        batch * seqlen_q if longest_q is None else int(longest_q),
        batch * call.key.shape[2] if longest_k is None else int(longest_k),
    )


def _rows_of_positions(positions: torch.Tensor) -> Rows | None:
    """The rows of packed positions, computed once for all layers and kept on the tensor."""
    # A tensor of inference mode has no version counter, so changes cannot be detected.
    if positions.is_inference():
        return rows_of_positions(positions)
    found: tuple[int, Rows | None] | None = getattr(positions, _ROWS, None)
    if found is None or found[0] != positions._version:
        found = positions._version, rows_of_positions(positions)
        setattr(positions, _ROWS, found)
    return found[1]


def _by_flashvar(call: Call, visibility: Visibility) -> torch.Tensor:
    """Attention through flashvar, [batch, seqlen_q, heads_q, head_dim_v]."""
    query, key, value = call.query, call.key, call.value
    if visibility.keys < key.shape[2]:
        key, value = key[:, :, : visibility.keys], value[:, :, : visibility.keys]
    if query.dtype != value.dtype or key.dtype != value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    q, k, v = (rows_contiguous(x).transpose(1, 2) for x in (query, key, value))
    if call.position_bias is not None:
        mask = as_bias(visibility, q.shape[0], q.shape[1], q)
        visibility = Visibility(
            False, (-1, -1), visibility.keys, bias=call.position_bias[..., : visibility.keys] + mask
        )
    options: dict[str, Any] = {
        "causal": visibility.causal,
        "scale": call.scaling,
        "window_size": visibility.window,
        "softcap": call.softcap or 0.0,
        "sinks": call.s_aux,
        "dropout_p": call.dropout,
    }
    rows = visibility.rows
    out: Any
    if rows is None:
        bias = None if visibility.bias is None else _fitting(visibility.bias, q)
        out = dense(q, k, v, bias=bias, **options)
    else:
        out = attention_varlen(
            _packed(q, rows.indices_q),
            _packed(k, rows.indices_k),
            _packed(v, rows.indices_k),
            cu_seqlens_q=rows.offsets_q,
            cu_seqlens_k=rows.offsets_k,
            max_seqlen_q=rows.longest_q,
            max_seqlen_k=rows.longest_k,
            **options,
        )
    return out if rows is None else _unpacked(out, rows.indices_q, q.shape[0], q.shape[1])


def _fitting(bias: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The bias, converted to a dtype and strides that the kernels support."""
    if bias.dtype not in (q.dtype, torch.float32):
        bias = additive(bias, q.dtype)
    if bias.shape[2] != q.shape[1]:
        bias = bias.expand(-1, -1, q.shape[1], -1)
    return bias if bias.stride(3) == 1 else bias.contiguous()


def _packed(tensor: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    flat = tensor.flatten(0, 1)
    return flat if indices is None else flat.index_select(0, indices)


def _unpacked(
    out: torch.Tensor, indices: torch.Tensor | None, batch: int, seqlen: int
) -> torch.Tensor:
    if indices is not None:
        out = out.new_zeros((batch * seqlen, *out.shape[1:])).index_copy(0, indices, out)
    return out.unflatten(0, (batch, seqlen))
