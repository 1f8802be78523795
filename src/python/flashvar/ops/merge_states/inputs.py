"""Checks that outs and lses fit together; views of them in the order of backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import torch

from flashvar.errors import DeviceError, DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.arguments import (
    check_backend,
    check_layout,
    check_operand,
    check_strided,
    refuse_unknown_subclasses,
)
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.merge_states.problem import Parts
from flashvar.ops.unknown_sizes import differ, is_known

Layout = Literal["bshd", "bhsd", "bhsd->bshd"]
LAYOUTS: Final[tuple[str, ...]] = get_args(Layout)
_DENSE: Final = "a dense one, or pass its values as packed rows"


def given(outs: Any, lses: Any) -> tuple[list[Any], list[Any], bool]:
    """The arguments as lists, and whether each is one tensor with the parts in front."""
    stacked = isinstance(outs, torch.Tensor)
    if stacked and isinstance(lses, torch.Tensor):
        return [outs], [lses], True
    lses = listed("lses", lses)
    if stacked and all(isinstance(one, torch.Tensor) for one in lses) and _alike(lses):
        return [outs], [torch.stack(lses)], True
    return listed("outs", outs), lses, False


def listed(name: str, parts: Any) -> list[Any]:
    """A sequence of parts, or one tensor with the parts in front, as a list."""
    if isinstance(parts, torch.Tensor):
        check_strided(name, parts, _DENSE)
        if parts.dim() == 0:
            raise ShapeError(
                f"{name} must have the parts in its first dimension, found a tensor without "
                "dimensions: pass a sequence of tensors, or torch.stack() of it"
            )
        try:
            return list(parts.unbind())
        except TypeError as error:
            refuse_unknown_subclasses(error, (parts,))
            raise
    if isinstance(parts, Sequence) and not isinstance(parts, (str, bytes)):
        return list(parts)
    part = name.removesuffix("s")
    raise InvalidInputError(
        f"{name} must be a sequence of tensors or one tensor with the parts in front, found "
        f"{type(parts).__name__}: pass [{part}_a, {part}_b]"
    )


def _alike(tensors: list[torch.Tensor]) -> bool:
    kinds = {(x.shape, x.dtype, x.device) for x in tensors}
    return len(kinds) == 1


def check_kinds(outs: Sequence[Any], lses: Sequence[Any], layout: Any, backend: Any) -> None:
    """Refuse what the dispatcher could not hand on: no tensors, other kinds, unknown options."""
    if not outs:
        raise ShapeError(
            "outs must have at least one part, found none: pass the output and log-sum-exp of at "
            "least one attention"
        )
    check_layout(layout, LAYOUTS, "b batch, s sequence, h heads, d head dim")
    check_backend(backend)
    for name, tensors in (("outs", outs), ("lses", lses)):
        for index, x in enumerate(tensors):
            check_operand(f"{name}[{index}]", x, _DENSE)


def check(outs: Sequence[Any], lses: Sequence[Any], stacked: bool, layout: str) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        InvalidInputError: with what was expected, what was found and what to do.
    """
    first = outs[0]
    front = 1 if stacked else 0
    if first.dim() - front not in (3, 4):
        ahead = "parts, " if stacked else ""
        raise ShapeError(
            f"outs must be [{ahead}batch, seqlen, heads, head_dim] or packed [{ahead}total, heads, "
            f"head_dim], found {tuple(first.shape)}: reshape it, and pass parts as a sequence or "
            "stacked in front"
        )
    packed = first.dim() - front == 3
    if packed and layout != "bshd":
        raise LayoutError(
            f"packed outs are [total, heads, head_dim], which is layout 'bshd', found {layout!r}: "
            "leave layout out"
        )
    if stacked and is_known(first.shape[0] == 0):
        raise ShapeError(
            f"outs must have at least one part, found {tuple(first.shape)}: pass the output and "
            "log-sum-exp of at least one attention"
        )
    if len(outs) != len(lses):
        raise ShapeError(
            f"outs and lses must have the same length, found {len(outs)} and {len(lses)}: pass one "
            "log-sum-exp for each output"
        )
    _check_alike("outs", outs)
    _check_alike("lses", lses)
    _check_dtypes(first, lses[0])
    expected = tuple(first.shape)[:-1]
    if layout == "bshd":
        expected = (*expected[:-2], expected[-1], expected[-2])
    if differ(lses[0].shape, expected):
        ahead = "parts, " if stacked else ""
        form = f"[{ahead}{'heads, total' if packed else 'batch, heads, seqlen'}]"
        raise ShapeError(
            f"lses must be {form} with outs {tuple(first.shape)}, that is {expected}, found "
            f"{tuple(lses[0].shape)}: transpose it, or check that layout={layout!r} is the order "
            "of your dimensions"
        )
    if first.device != lses[0].device:
        raise DeviceError(
            f"outs and lses must be on one device, found {first.device} and {lses[0].device}: "
            "move them with .to(outs[0].device)"
        )


def _check_alike(name: str, tensors: Sequence[Any]) -> None:
    first = tensors[0]
    for index, x in enumerate(tensors):
        if x is first:
            continue
        if differ(x.shape, first.shape):
            raise ShapeError(
                f"{name} must have one shape, found {tuple(first.shape)} and, in part {index}, "
                f"{tuple(x.shape)}: pass parts of the same queries"
            )
        if x.dtype != first.dtype:
            raise DtypeError(
                f"{name} must have one dtype, found {first.dtype} and, in part {index}, {x.dtype}: "
                f"cast them with .to({name}[0].dtype)"
            )
        if x.device != first.device:
            raise DeviceError(
                f"{name} must be on one device, found {first.device} and, in part {index}, "
                f"{x.device}: move them with .to({name}[0].device)"
            )


def _check_dtypes(out: Any, lse: Any) -> None:
    if out.dtype not in DTYPES:
        raise DtypeError(
            f"outs must be bfloat16, float16 or float32 (float64 too on the CPU), found "
            f"{out.dtype}: cast them with .to(torch.bfloat16)"
        )
    wide = out.dtype == torch.float64
    if lse.dtype != torch.float32 and not (wide and lse.dtype == torch.float64):
        raise DtypeError(
            f"lses must be float32{' or float64' if wide else ''} with {out.dtype} outs, found "
            f"{lse.dtype}: take them from attention(return_lse=True), or cast them with .float()"
        )


def out_shape(out: Any, stacked: bool, layout: str) -> tuple[int, ...]:
    """The shape of the merged output."""
    shape = tuple(out.shape)[1 if stacked else 0 :]
    if layout == "bhsd->bshd":
        return shape[0], shape[2], shape[1], shape[3]
    return shape


def output_layout(layout: str) -> str:
    """The layout of the merged output and of its gradient."""
    return "bshd" if layout == "bhsd->bshd" else layout


def rows_first(out: torch.Tensor, stacked: bool, layout: str) -> torch.Tensor:
    """A view [batch, seqlen, heads, head_dim] of an output, with the parts in front if stacked."""
    if out.dim() == (4 if stacked else 3):
        return out.unsqueeze(-4)
    return out if layout == "bshd" else out.transpose(-3, -2)


def batched(lse: torch.Tensor, stacked: bool) -> torch.Tensor:
    """A view [batch, heads, seqlen] of a log-sum-exp, with the parts in front if stacked."""
    return lse.unsqueeze(-3) if lse.dim() == (3 if stacked else 2) else lse


def rows_contiguous(out: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where its last dimension is strided."""
    return out if out.stride(-1) == 1 or out.shape[-1] <= 1 else out.contiguous()


def views_of(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], stacked: bool, layout: str
) -> Parts:
    """The parts in the order of backends, without copies."""
    return Parts(
        tuple([rows_first(out, stacked, layout) for out in outs]),
        tuple([batched(lse, stacked) for lse in lses]),
        stacked,
    )


def needs_copies(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> bool:
    """Whether the strides are none that backends take: they want rows contiguous, all alike."""
    strides = {out.stride() for out in outs}, {lse.stride() for lse in lses}
    return any(len(found) > 1 for found in strides) or rows_contiguous(outs[0]) is not outs[0]


def parts_of(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], stacked: bool, layout: str
) -> Parts:
    """The parts in the order of backends; copies where the strides are none that they take."""
    parts = views_of([rows_contiguous(out) for out in outs], lses, stacked, layout)
    return Parts(_one_layout(parts.outs), _one_layout(parts.lses), stacked)


def _one_layout(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    strides = tensors[0].stride()
    if all(x.stride() == strides for x in tensors):
        return tensors
    return tuple(x.contiguous() for x in tensors)
