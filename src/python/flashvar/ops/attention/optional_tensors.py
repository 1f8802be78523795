"""Checks of the optional tensors: packed offsets, lengths, bias, sinks, slopes and rng_state."""

from __future__ import annotations

from typing import Final

import torch

from flashvar.errors import DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.arguments import check_device
from flashvar.ops.attention.problem import BiasStrides
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.sequences import check_integers
from flashvar.ops.unknown_sizes import differ, is_known

_SINKS: Final = (torch.float32, torch.bfloat16, torch.float16)


def check_numbers(name: str, tensor: torch.Tensor, length: int, device: torch.device) -> None:
    """Check offsets or lengths: integers, contiguous, `length` entries."""
    check_integers(name, tensor)
    check_device(name, tensor, device, "q")
    if differ(tensor.shape, (length,)):
        raise ShapeError(
            f"{name} must have shape ({length},), found {tuple(tensor.shape)}: pass batch + 1 "
            "offsets, or batch lengths in seqused_k"
        )
    if is_known(tensor.stride(0) != 1) and is_known(length > 1):
        raise LayoutError(
            f"{name} must be contiguous, found stride {tensor.stride(0)}: call {name}.contiguous()"
        )


def sequences(cu_seqlens_q: torch.Tensor) -> int:
    """The number of sequences that the offsets describe."""
    if cu_seqlens_q.dim() != 1 or is_known(cu_seqlens_q.shape[0] < 1):
        raise ShapeError(
            "cu_seqlens_q must have shape (batch + 1,), found "
            f"{tuple(cu_seqlens_q.shape)}: pass a 0 and then torch.cumsum of the lengths"
        )
    batch: int = cu_seqlens_q.shape[0] - 1
    return batch


def check_slopes(slopes: torch.Tensor, batch: int, heads_q: int, device: torch.device) -> int:
    """Check ALiBi slopes; returns their batch stride, 0 where the whole batch shares them."""
    if slopes.dtype != torch.float32:
        raise DtypeError(
            f"alibi_slopes must be torch.float32, found {slopes.dtype}: call .float() on them"
        )
    check_device("alibi_slopes", slopes, device, "q")
    if differ(slopes.shape, (heads_q,)) and differ(slopes.shape, (batch, heads_q)):
        raise ShapeError(
            f"alibi_slopes must have shape ({heads_q},) or ({batch}, {heads_q}), found "
            f"{tuple(slopes.shape)}: pass one slope for each query head"
        )
    if is_known(slopes.stride(-1) != 1) and is_known(heads_q > 1):
        raise LayoutError(
            f"alibi_slopes must be contiguous in the heads, found strides {slopes.stride()}: "
            "call alibi_slopes.contiguous()"
        )
    return 0 if slopes.dim() == 1 or is_known(slopes.shape[0] <= 1) else slopes.stride(0)


def check_rng(rng_state: torch.Tensor | None, dropout_p: float, device: torch.device) -> None:
    """Check the seed and offset of dropout, which a positive dropout_p requires."""
    if rng_state is None:
        if dropout_p > 0:
            raise InvalidInputError(
                "dropout_p > 0 needs rng_state, found none: pass int64 [seed, offset] on the "
                "device of q (flashvar.attention draws it when it is left out)"
            )
        return
    if rng_state.dtype != torch.int64:
        raise DtypeError(
            f"rng_state must be torch.int64, found {rng_state.dtype}: pass [seed, offset] as int64"
        )
    check_device("rng_state", rng_state, device, "q")
    if tuple(rng_state.shape) != (2,) or rng_state.stride(0) != 1:
        raise ShapeError(
            f"rng_state must be two contiguous numbers, found shape {tuple(rng_state.shape)}: "
            "pass [seed, offset]"
        )


def check_bias(
    bias: torch.Tensor,
    q: torch.Tensor,
    sizes: tuple[int, int, int, int],
) -> BiasStrides:
    """Check a bias; returns its strides, 0 where it is broadcast.

    `sizes` are batch, heads_q, seqlen_q and seqlen_k.
    """
    if bias.dtype not in (q.dtype, torch.float32):
        # A mask that is cast would add 0 and 1 to the scores, and hide nothing.
        mask = "pass zeros with -inf where the mask is False"
        raise DtypeError(
            f"bias must have the dtype of q or float32, found {bias.dtype} with {q.dtype}: "
            f"{mask if bias.dtype == torch.bool else 'cast it with .to(q.dtype)'}"
        )
    check_device("bias", bias, q.device, "q")
    seqlen_q, seqlen_k = sizes[2:]
    if bias.dim() != 4 or any(
        is_known(found != size) and (index > 1 or is_known(found != 1))
        for index, (found, size) in enumerate(zip(bias.shape, sizes, strict=True))
    ):
        broadcast = ("1" if is_known(size == 1) else f"{size} (or 1)" for size in sizes[:2])
        wanted = f"[{', '.join(broadcast)}, {seqlen_q}, {seqlen_k}]"
        raise ShapeError(
            f"bias must have shape {wanted}, found {tuple(bias.shape)}: unsqueeze() missing "
            "dimensions, and expand() the query dimension (an expanded one is not copied)"
        )
    if all(is_known(x) for x in (bias.stride(3) != 1, seqlen_k > 1, bias.numel() > 0)):
        raise LayoutError(
            f"bias must be contiguous in the keys (stride 1), found strides {bias.stride()}: "
            "call bias.contiguous()"
        )
    return bias_strides(bias)


def check_sinks(sinks: torch.Tensor, q: torch.Tensor, heads_q: int) -> str:
    """Check sinks; returns the name of their dtype."""
    if sinks.dtype not in _SINKS and sinks.dtype != q.dtype:
        raise DtypeError(
            f"sinks must be float32, bfloat16 or float16, found {sinks.dtype}: cast them with "
            ".float()"
        )
    check_device("sinks", sinks, q.device, "q")
    if differ(sinks.shape, (heads_q,)):
        raise ShapeError(
            f"sinks must have shape ({heads_q},), found {tuple(sinks.shape)}: pass one for each "
            "query head"
        )
    if is_known(sinks.stride(0) != 1) and is_known(heads_q > 1):
        raise LayoutError(
            f"sinks must be contiguous, found stride {sinks.stride(0)}: call sinks.contiguous()"
        )
    return DTYPES[sinks.dtype]


def bias_strides(bias: torch.Tensor) -> BiasStrides:
    """The strides of a bias or its gradient, 0 where it is broadcast."""
    batch, heads, query = (
        0 if is_known(size <= 1) else stride
        for stride, size in zip(bias.stride()[:3], bias.shape[:3], strict=True)
    )
    return BiasStrides(batch, heads, query)
