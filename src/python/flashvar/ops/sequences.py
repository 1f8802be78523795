"""What ops of sequences have in common: checks of cu_seqlens and of indices of states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from flashvar.errors import DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.dispatch_modes import are_plain, as_list, is_compiling
from flashvar.ops.unknown_sizes import differ, is_known

# What torch says of a tensor that is neither dense nor expanded.
_TOO_HARD: Final = 2
_INTEGERS: Final = (torch.int32, torch.int64)
_INT32: Final = -(2**31), 2**31 - 1


def check_cu_seqlens(cu_seqlens: Any, name: str, x: Any, batch: int, rows: int) -> None:
    """Refuse offsets of another shape or dtype, and offsets together with a batch of x."""
    if is_known(batch != 1):
        raise ShapeError(
            f"{name} must have batch 1 with cu_seqlens, found {tuple(x.shape)}: concatenate the "
            "sequences, or leave cu_seqlens out"
        )
    if cu_seqlens.dim() != 1 or is_known(cu_seqlens.shape[0] < 1):
        raise ShapeError(
            f"cu_seqlens must be [sequences + 1], found {tuple(cu_seqlens.shape)}: pass 0 and the "
            "cumulative sum of the lengths"
        )
    if is_known(cu_seqlens.shape[0] == 1) and is_known(rows > 0):
        raise ShapeError(
            f"cu_seqlens must have an end for each sequence of the {rows} rows, found one offset: "
            "pass 0 and the cumulative sum of the lengths"
        )
    check_integers("cu_seqlens", cu_seqlens)


def check_offsets(cu_seqlens: torch.Tensor, rows: int) -> None:
    """Refuse values that are not the offsets of so many rows.

    On the CPU only: reading them elsewhere would wait for a device.
    """
    if cu_seqlens.is_cpu:
        check_ends("cu_seqlens", as_list(cu_seqlens), rows)


def check_ends(name: str, ends: list[int], rows: int, *, padding: bool = False) -> None:
    """Refuse a list that is not the offsets of so many rows.

    With `padding`, rows before the first and after the last offset may belong to no sequence.
    """
    fits = ends[0] >= 0 and ends[-1] <= rows if padding else (ends[0], ends[-1]) == (0, rows)
    if not fits or sorted(ends) != ends:
        shown = str(ends) if len(ends) <= 8 else f"[{ends[0]}, ..., {ends[-1]}]"
        rule = f"start at 0, not decrease, and end at the number of rows, {rows}"
        if padding:
            rule = f"start at 0 or later, not decrease, and not exceed the {rows} rows"
        raise ShapeError(
            f"{name} must {rule}, found {shown}: pass 0 and the cumulative sum of the lengths"
        )


def check_one_for_each(name: str, x: Any, sequences: int) -> None:
    """Refuse what is not an integer for each sequence."""
    if differ(x.shape, (sequences,)):
        raise ShapeError(
            f"{name} must be [sequences], that is ({sequences},), found {tuple(x.shape)}: pass one "
            "for each sequence"
        )
    check_integers(name, x)


def check_state_indices(indices: torch.Tensor, states: int) -> None:
    """Refuse indices beyond a pool of so many states, and two of one; as `check_offsets`."""
    if not indices.is_cpu:
        return
    used = [index for index in as_list(indices) if index >= 0]
    if used and max(used) >= states:
        raise ShapeError(
            f"state_indices must be below the {states} states of the pool, found {max(used)}: "
            "correct them, or pass -1 for a sequence without a state"
        )
    if len(set(used)) != len(used):
        twice = next(index for index in used if used.count(index) > 1)
        raise InvalidInputError(
            f"state_indices must be distinct, found {twice} more than once: give every "
            "sequence a state of its own"
        )


def check_integers(name: str, x: Any) -> None:
    """Refuse dtypes other than int32 and int64."""
    if x.dtype not in _INTEGERS:
        raise DtypeError(
            f"{name} must be int32 or int64, found {x.dtype}: cast it with .to(torch.int32)"
        )


def as_int32(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets or lengths as kernels take them, which limit them: large ones must not wrap."""
    if lengths.dtype == torch.int64:
        lengths = lengths.clamp(*_INT32)
    return lengths.int()


def check_own_memory(name: str, x: Any) -> None:
    """Refuse a state that is written in place and whose elements share memory."""
    if shares_memory(x):
        raise LayoutError(
            f"{name} must have memory of its own for each element to be written in place, found "
            f"strides {x.stride()} of {tuple(x.shape)}: make it contiguous first"
        )


def check_not_negated(name: str, x: torch.Tensor) -> None:
    """Refuse a state that is written in place and whose memory holds other values.

    Torch fails in such a call in words of its own.
    """
    if not is_compiling() and x.is_neg():
        raise LayoutError(
            f"{name} must hold its own values to be written in place, found a negated view, such "
            "as the imaginary part of a conjugate: pass resolve_neg() of it"
        )


def shares_memory(x: Any) -> bool:
    """Whether two elements of a tensor lie at one address."""
    known = torch._debug_has_internal_overlap(x)
    if known != _TOO_HARD:
        return bool(known)
    steps = sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    if any(isinstance(number, torch.SymInt) for step in steps for number in step):
        return False
    # Two elements differ by d[i] in dimension i, and the last d that is not 0 is positive. As many
    # as 2 * size - 1 numbers are between -size and size.
    differences = [(step, 2 * size - 1) for step, size in steps]
    return any(
        _add_up_to(differences[:i], ahead * step + _reach(steps[:i]))
        for i, (step, size) in enumerate(steps)
        for ahead in range(1, min(size, _reach(steps[:i]) // step + 1))
    )


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether an element of one tensor lies at the address of an element of another of its dtype.

    False where sizes are not known.
    """
    first, second = (x.data_ptr(), y.data_ptr()) if are_plain(x, y) else (0, 0)
    if first and second and x.is_contiguous() and y.is_contiguous():  # sooner than below
        return bool(second < first + x.nbytes and first < second + y.nbytes)
    numbers = (*x.shape, *x.stride(), *y.shape, *y.stride())
    if any(isinstance(number, torch.SymInt) for number in numbers) or 0 in (*x.shape, *y.shape):
        return False
    if x.untyped_storage()._cdata == y.untyped_storage()._cdata:
        ahead = y.storage_offset() - x.storage_offset()
    elif first and second:
        ahead = (second - first) // x.element_size()
    else:  # no memory, such as that of a fake tensor
        return False
    sizes: dict[int, int] = {}
    for step, size in zip(x.stride() + y.stride(), x.shape + y.shape, strict=True):
        sizes[step] = sizes.get(step, 1) + size - 1
    behind = _reach(zip(y.stride(), y.shape, strict=True))
    # An element of x from the first of x, and one of y from the last of y, add up to the distance.
    return _add_up_to(sorted(sizes.items()), ahead + behind)


def _add_up_to(steps: list[tuple[int, int]], distance: int) -> bool:
    """Whether sum(i * step) is a distance for some i from 0 to size - 1; steps are sorted."""
    if not 0 <= distance <= _reach(steps):
        return False
    if distance == 0:
        return True
    *smaller, (step, size) = steps
    least = max(0, -((_reach(smaller) - distance) // step))
    most = min(size - 1, distance // step)
    return any(_add_up_to(smaller, distance - by * step) for by in range(least, most + 1))


def _reach(steps: Iterable[tuple[int, int]]) -> int:
    """How far apart two elements are at most."""
    return sum(step * (size - 1) for step, size in steps)
