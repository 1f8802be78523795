"""Rotary position embeddings (Su et al. 2021): checks of the arguments, and a formula in torch.

Pair i of a row at position p is rotated by the angle with cosine cos[p, i] and sine sin[p, i].
bfloat16 and float16 rows are rotated in float32. Plain tensors take one kernel (`torch_library`).
`formula` computes the same with torch functions where the kernel cannot: in transforms of
torch.func, forward mode, tensor subclasses, and gradients of the tables.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch.autograd import forward_ad

from flashvar.errors import DeviceError, DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.arguments import as_bool, check_strided, count, whole_number
from flashvar.ops.autocast import without_promotion
from flashvar.ops.dispatch_modes import PLAIN, are_plain, can_be_read, is_compiling
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.sequences import check_integers, shares_memory
from flashvar.ops.sharding import everywhere
from flashvar.ops.unknown_sizes import differ, is_known

_transforms: Final = torch._C._functorch.peek_interpreter_stack
_is_batched_gradient: Final = torch._C._functorch.is_legacy_batchedtensor


class Rotation(NamedTuple):
    """The arguments of the ops besides x."""

    cos: torch.Tensor  # [positions, pairs]
    sin: torch.Tensor  # [positions, pairs]
    offsets: torch.Tensor | None  # [batch], position of the first row of each sequence
    cu_seqlens: torch.Tensor | None  # [batch + 1]
    offset: int  # added to every position
    interleaved: bool
    conjugate: bool


def checked(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> Rotation:
    """Check the arguments; returns the rotation of x.

    Args:
        x: [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim] with cu_seqlens.
        cos: [positions, pairs] with 2 * pairs <= head_dim.
        sin: Like cos.
        interleaved: Entries 2 i and 2 i + 1 are a pair, rather than i and i + pairs.
        conjugate: Rotate in the opposite direction.
        seqlen_offsets: Position of the first row: one integer for all sequences, or [batch].
        cu_seqlens: int32 or int64 [batch + 1], offsets of the packed sequences.
        max_seqlen: Longest packed sequence; allows the check that cos and sin are long enough.
    """
    check_strided("x", x)
    if x.dtype not in DTYPES:
        raise DtypeError(
            "x must be bfloat16, float16, float32 or float64, found "
            f"{x.dtype}: cast it with .to(cos.dtype)"
        )
    form = "[batch, seqlen, heads, head_dim]"
    if cu_seqlens is not None:
        form = "[total, heads, head_dim] with cu_seqlens"
        _check_integers("cu_seqlens", cu_seqlens, x)
        if cu_seqlens.dim() != 1 or is_known(cu_seqlens.shape[0] == 0):
            raise ShapeError(
                f"cu_seqlens must be [batch + 1], found {tuple(cu_seqlens.shape)}: "
                "pass where each packed sequence begins, and the total"
            )
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise ShapeError(
            f"x must be {form}, found {tuple(x.shape)}: "
            "reshape it, and pass cu_seqlens only for packed sequences"
        )
    check_tables(x, cos, sin)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    longest = None
    # It is for a check alone, so a device is not waited for, and a graph does not depend on it.
    if max_seqlen is not None and (
        not isinstance(max_seqlen, torch.Tensor) or can_be_read(max_seqlen)
    ):
        longest = count("max_seqlen", max_seqlen)
    if cu_seqlens is None:
        longest = x.shape[1]
    offsets, offset = _split_offsets(x, seqlen_offsets, batch)
    if longest is not None:
        check_length(cos, offset, longest)
    flags = as_bool("interleaved", interleaved), as_bool("conjugate", conjugate)
    return Rotation(cos, sin, offsets, cu_seqlens, offset, *flags)


def check_length(cos: torch.Tensor, offset: int, longest: int) -> None:
    """Refuse tables with fewer positions than the longest sequence, which begins at `offset`."""
    if is_known(offset + longest > cos.shape[0]):
        raise ShapeError(
            f"cos and sin must have {offset + longest} positions, for sequences of up to {longest} "
            f"tokens from position {offset} on, found {cos.shape[0]}: pass longer tables"
        )


def check_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Refuse tables of other shapes, or on another device."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_strided(name, table)
        if table.dtype not in DTYPES:
            raise DtypeError(
                f"{name} must be bfloat16, float16, float32 or float64, found {table.dtype}: "
                "cast it with .to(x.dtype)"
            )
        if table.device != x.device:
            raise DeviceError(
                f"{name} must be on the device of x, {x.device}, found {table.device}: "
                "move it with .to(x.device)"
            )
    one_shape = cos.dim() == 2 and not differ(cos.shape, sin.shape)
    if not one_shape or is_known(2 * cos.shape[1] > x.shape[-1]):
        raise ShapeError(
            f"cos and sin must have one shape (positions, at most {x.shape[-1] // 2}), found "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}: pass one entry for each pair"
        )


def _check_integers(name: str, tensor: object, x: torch.Tensor) -> None:
    check_strided(name, tensor)
    check_integers(name, tensor)
    if tensor.device != x.device:  # type: ignore[attr-defined]
        raise DeviceError(
            f"{name} must be on the device of x, {x.device}, found "
            f"{tensor.device}: move it with .to(x.device)"  # type: ignore[attr-defined]
        )


def _split_offsets(
    x: torch.Tensor, given: int | torch.Tensor, batch: int
) -> tuple[torch.Tensor | None, int]:
    """The offsets per sequence, or None, and the offset of all sequences."""
    if isinstance(given, torch.Tensor):
        _check_integers("seqlen_offsets", given, x)
        if given.dim() > 1 or (is_known(given.numel() != 1) and differ(given.shape, (batch,))):
            raise ShapeError(
                f"seqlen_offsets must be an integer or [batch] = [{batch}], found "
                f"{tuple(given.shape)}: pass one position for each sequence"
            )
        return given.expand(batch), 0
    offset = whole_number(given)
    if offset is None:
        raise InvalidInputError(
            f"seqlen_offsets must be an integer or a tensor of them, found "
            f"{type(given).__name__}: pass the position of the first row"
        )
    if is_known(offset < 0):
        raise InvalidInputError(
            f"seqlen_offsets must be at least 0, found {offset}: pass the position of the first row"
        )
    return None, offset


def check_writable(x: torch.Tensor) -> None:
    """Refuse to rotate a tensor in place if its entries share memory."""
    pairs = zip(x.shape, x.stride(), strict=True)
    expanded = any(is_known(step == 0) and is_known(size > 1) for size, step in pairs)
    # Tensors of the compiler, of transforms, and of is_grads_batched have no addresses.
    unknown = is_compiling() or _transforms() is not None or _is_batched_gradient(x)
    if expanded or (not unknown and shares_memory(x)):
        raise LayoutError(
            f"x must not share memory between entries if it is rotated in place, found shape "
            f"{tuple(x.shape)} with strides {x.stride()}: pass x.clone(), or inplace=False"
        )


def needs_formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel, which has a gradient for x only, cannot run the call."""
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return True
    if is_compiling():
        return bool(torch._C._are_functorch_transforms_active())
    return not are_plain(x, cos, sin) or _transforms() is not None or forward_ad._current_level >= 0


def formula(x: torch.Tensor, rotation: Rotation, heads: int) -> torch.Tensor:
    """A new tensor in which the first `heads` heads are rotated."""
    pairs = rotation.cos.shape[1]
    cos, sin, known = _of_rows(x, rotation)
    # Not by slices: is_grads_batched has no batching rule for one that takes all columns.
    part = x.narrow(-2, 0, heads).narrow(-1, 0, 2 * pairs)
    wide = part.to(torch.promote_types(x.dtype, torch.float32))
    rotated = rotate_rows(wide, cos.to(wide.dtype), sin.to(wide.dtype), rotation.interleaved)
    rotated = rotated.to(x.dtype)
    if known is not None:
        rotated = torch.where(known[..., None, None], rotated, part)
    with without_promotion():
        rotated = torch.cat((rotated, x[..., :heads, 2 * pairs :]), -1)
        return torch.cat((rotated, x[..., heads:, :]), -2)


def rotate_rows(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate rows [..., heads, 2 * pairs] by tables [..., pairs] that have an entry per row."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, -1)
    rotated = (first * cos - second * sin, first * sin + second * cos)
    with without_promotion():
        if interleaved:
            return torch.stack(rotated, -1).reshape(x.shape)
        return torch.cat(rotated, -1)


def _of_rows(
    x: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tables with an entry per row, and a mask of rows that have a position; None: all have."""
    cos, sin, offsets, cu_seqlens, offset, _, conjugate = rotation
    if conjugate:
        sin = -sin
    if offsets is None and cu_seqlens is None:
        rows = slice(offset, offset + x.shape[1])
        return cos[rows], sin[rows], None
    positions, inside = positions_of_rows(x, rotation)
    known = inside & (positions >= 0) & (positions < cos.shape[0])
    rows = torch.where(known, positions, 0)
    if cos.shape[0] == 0:
        cos = sin = cos.new_zeros(1, cos.shape[1])
    return cos[rows], sin[rows], known


def positions_of_rows(x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, Any]:
    """Positions [batch, seqlen] or [total], and a mask of rows that belong to a sequence."""
    _, _, offsets, cu_seqlens, offset, _, _ = rotation
    rows = torch.arange(x.shape[0 if cu_seqlens is not None else 1], device=x.device) + offset
    if not is_compiling():
        rows = everywhere(rows, x)
    if cu_seqlens is None:
        assert offsets is not None
        return rows + offsets[:, None], True
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    if begins.shape[0] == 0:
        return rows, torch.zeros_like(rows, dtype=torch.bool)
    packed_rows = rows - offset
    if type(ends) in PLAIN or is_compiling():
        sequence = torch.searchsorted(ends.contiguous(), packed_rows, right=True)
    else:  # DTensor has no searchsorted
        sequence = (packed_rows[:, None] >= ends).sum(-1)
    inside = (sequence < begins.shape[0]) & (packed_rows >= begins[0])
    sequence = sequence.clamp(max=begins.shape[0] - 1)
    positions = rows - begins[sequence]
    return positions + (0 if offsets is None else offsets[sequence]), inside
