"""How torch knows the rotation: two ops, their derivative, and turning in place with a history."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.rotary.rotation import (
    Rotation,
    check_writable,
    formula,
    needs_formula,
    positions_of_rows,
)

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)
_ROTATION: Final = (
    "Tensor cos, Tensor sin, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, "
    "bool interleaved, bool conjugate"
)
# The first `heads` heads are turned, the others copied.
_LIBRARY.define(f"rotary(Tensor x, SymInt heads, {_ROTATION}) -> Tensor", tags=_TAGS)
_LIBRARY.define(f"rotary_(Tensor(a!) x, {_ROTATION}) -> ()", tags=_TAGS)

_TRITON: Final = find_spec("triton") is not None
_IN_TRITON: Final = (torch.bfloat16, torch.float16, torch.float32)
_DEFAULT: Final = torch._C._autograd.CreationMeta.DEFAULT
_SEVERAL: Final = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE
_creation: Final = torch._C._autograd._get_creation_meta

# A part of the heads, and the rotation of it.
Part = tuple[int, int, Rotation]


def _in_triton(x: torch.Tensor) -> bool:
    return _TRITON and x.is_cuda and x.dtype in _IN_TRITON


def _rotary(x: torch.Tensor, heads: int, *arguments: Any) -> torch.Tensor:
    rotation = Rotation._make(arguments)
    if _in_triton(x):
        from flashvar.backends.triton.rotary.launch import launch

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(out, x, rotation, heads)
        return out
    _check_positions(x, rotation)
    return formula(x, rotation, heads).contiguous()


def _rotary_fake(x: torch.Tensor, heads: int, *arguments: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rotary_in_place(x: torch.Tensor, *arguments: Any) -> None:
    rotation = Rotation._make(arguments)
    with torch.no_grad():
        if _in_triton(x):
            from flashvar.backends.triton.rotary.launch import launch

            launch(x, x, rotation, x.shape[-2])
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
            return
        _check_positions(x, rotation)
        x.copy_(formula(x, rotation, x.shape[-2]))


def _rotary_in_place_fake(x: torch.Tensor, *arguments: Any) -> None:
    """Nothing is made."""


def _check_positions(x: torch.Tensor, rotation: Rotation) -> None:
    """Refuse rows beyond the tables, where finding them does not wait for a device."""
    if x.device.type != "cpu" or (rotation.offsets is None and rotation.cu_seqlens is None):
        return
    positions, inside = positions_of_rows(x, rotation)
    outside = ((positions < 0) | (positions >= rotation.cos.shape[0])) & inside
    if bool(outside.any()):
        raise ShapeError(
            f"cos and sin must have every position of the sequences, got {rotation.cos.shape[0]} "
            f"positions and a row at {int(positions[outside][0])}: make longer tables, or mend "
            "seqlen_offsets"
        )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    _, heads, *tensors, offset, interleaved, conjugate = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = heads, offset, interleaved, conjugate


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    heads, offset, interleaved, conjugate = ctx.rest
    back = Rotation._make((*ctx.saved_tensors, offset, interleaved, not conjugate))
    return torch.ops.flashvar.rotary(grad, heads, *back), *(None,) * (1 + len(back))


_LIBRARY.impl("rotary", _rotary, "CompositeExplicitAutograd")
_LIBRARY.impl("rotary_", _rotary_in_place, "CompositeExplicitAutograd")
torch.library.register_fake("flashvar::rotary", _rotary_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::rotary_", _rotary_in_place_fake, lib=_LIBRARY)
torch.library.register_autograd("flashvar::rotary", _backward, setup_context=_keep, lib=_LIBRARY)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """A new tensor with every head of x turned."""
    if needs_formula(x, rotation.cos, rotation.sin):
        return formula(x, rotation, x.shape[-2])
    return torch.ops.flashvar.rotary(x, x.shape[-2], *rotation)


def rotate_in_place(x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """x, some heads of which are turned; with a history where gradients are wanted.

    `parts` begin with head 0. The result is x itself, or a view of it with the gradient where x is
    a leaf that requires one (torch takes no writing there, FlashAttention does). One of several
    views that were made at once gets memory of its own, which leaves their base as it is.
    """
    check_writable(x)
    if any(needs_formula(x, rotation.cos, rotation.sin) for _, _, rotation in parts):
        for begin, count, rotation in parts:
            for heads in _views(x, begin, count):
                heads.copy_(formula(heads.clone(), rotation, heads.shape[-2]))
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        if is_compiling() and not x.is_leaf:
            # A compiled autograd function does not show what it writes; a copy, which mostly is
            # compiled away, does.
            return x.copy_(_rotated(x, parts))
        if _is_one_of_several_views(x):
            return _exchanged(x, _rotated(x, parts))
        tensors: list[torch.Tensor | None] = []
        plain = []
        for begin, count, (*of_part, offset, interleaved, conjugate) in parts:
            tensors += of_part
            plain.append((begin, count, (offset, interleaved, conjugate)))
        return _InPlace.apply(x, plain, *tensors)
    _turn_parts(x, parts)
    return x


def _exchanged(x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """The object x, which is `turned` from now on; memory and history of what it was stay.

    Torch takes no writing in place of one of several views: it would refuse the other ones for
    ever. Unsaid, the writing would change what others kept for their backward.
    """
    try:
        torch.utils.swap_tensors(x, turned)
    except RuntimeError as error:
        raise InvalidInputError(
            "x is one of several views that were made at once, and must not be kept for a "
            f"backward, to be turned in place; got one that is ({error}): pass inplace=False"
        ) from error
    return x


class _InPlace(torch.autograd.Function):  # type: ignore[misc]
    """Heads turned in place; the gradient is turned back in a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plain: Any, *tensors: Any) -> torch.Tensor:
        parts = _joined(plain, tensors)
        _turn_parts(x, parts)
        if _may_be_marked(x):
            ctx.mark_dirty(x)
        ctx.save_for_backward(*tensors)
        ctx.plain = plain
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        parts = _joined(ctx.plain, tensors, back=True)
        return _rotated(grad, parts), None, *(None,) * len(tensors)


def _rotated(x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """A new tensor; what is in no part is copied."""
    (_, count, rotation), *others = parts
    flat = x.flatten(-3, -2) if x.dim() == 5 else x
    out = torch.ops.flashvar.rotary(flat, count, *rotation)
    for begin, count, rotation in others:
        rotate_in_place(out.narrow(-2, begin, count), [(0, count, rotation)])
    return out.view(x.shape)


def _joined(plain: Any, tensors: tuple[Any, ...], back: bool = False) -> list[Part]:
    """Parts of what autograd keeps apart; `back` turns the other way."""
    parts = []
    for i, (begin, count, (offset, interleaved, conjugate)) in enumerate(plain):
        cos, sin, offsets, cu_seqlens = tensors[4 * i : 4 * i + 4]
        turn = conjugate is not back
        parts.append(
            (begin, count, Rotation(cos, sin, offsets, cu_seqlens, offset, interleaved, turn))
        )
    return parts


def _turn_parts(x: torch.Tensor, parts: Sequence[Part]) -> None:
    for begin, count, rotation in parts:
        for heads in _views(x, begin, count):
            torch.ops.flashvar.rotary_(heads, *rotation)


def _views(x: torch.Tensor, begin: int, count: int) -> list[torch.Tensor]:
    """Views of heads; those of [batch, seqlen, kinds, heads, head_dim] are counted through."""
    if x.dim() < 5:
        return [x if count == x.shape[-2] else x.narrow(-2, begin, count)]
    heads = x.shape[-2]
    kinds = x.narrow(-3, begin // heads, count // heads)
    if kinds.stride(-3) == heads * kinds.stride(-2):
        return [kinds.flatten(-3, -2)]
    return [kinds.select(-3, i) for i in range(kinds.shape[-3])]


def _is_one_of_several_views(x: torch.Tensor) -> bool:
    """Whether x comes of unbind, split or chunk, in place of which torch takes no writing."""
    return not is_compiling() and x._is_view() and _creation(x) == _SEVERAL


def _may_be_marked(x: torch.Tensor) -> bool:
    """Whether autograd takes x as written to, so that its other readers see the new history."""
    if is_compiling():
        return False
    if not x._is_view():
        return not x.is_leaf
    base = x._base
    return not (base.is_leaf and base.requires_grad) and _creation(x) == _DEFAULT
