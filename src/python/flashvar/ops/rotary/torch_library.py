"""Registers the rotation with torch: two ops, their derivative, and rotation in place."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.autocast import without_promotion
from flashvar.ops.derivatives import Differentiated, attach, below_autograd, has_tangent
from flashvar.ops.dispatch_modes import as_list, can_be_read, is_compiling
from flashvar.ops.rotary.rotation import (
    Rotation,
    check_length,
    check_tables,
    check_writable,
    formula,
    needs_formula,
    positions_of_rows,
)
from flashvar.ops.sharding import are_dtensors

_LIBRARY: Final = torch.library.Library("flashvar", "FRAGMENT")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)
_ROTATION: Final = (
    "Tensor cos, Tensor sin, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, "
    "bool interleaved, bool conjugate"
)
# The first `heads` heads are rotated, the others copied.
_LIBRARY.define(f"rotary(Tensor x, SymInt heads, {_ROTATION}) -> Tensor", tags=_TAGS)
_LIBRARY.define(f"rotary_(Tensor(a!) x, {_ROTATION}) -> ()", tags=_TAGS)

_TRITON: Final = find_spec("triton") is not None
_IN_TRITON: Final = (torch.bfloat16, torch.float16, torch.float32)
_DEFAULT: Final = torch._C._autograd.CreationMeta.DEFAULT
_SEVERAL: Final = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE
_creation: Final = torch._C._autograd._get_creation_meta

# A range of heads (first, count) and its rotation.
Part = tuple[int, int, Rotation]


def _in_triton(x: torch.Tensor) -> bool:
    return _TRITON and x.is_cuda and x.dtype in _IN_TRITON


def _rotary(x: torch.Tensor, heads: int, *arguments: Any) -> torch.Tensor:
    rotation = Rotation._make(arguments)
    _check_length(x, rotation)
    if _in_triton(x):
        from flashvar.backends.triton.rotary.launch import launch

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(out, x, rotation, heads)
        return out
    _check_positions(x, rotation)
    return formula(x, rotation, heads).contiguous()


def _rotary_fake(x: torch.Tensor, heads: int, *arguments: Any) -> torch.Tensor:
    check_tables(x, *arguments[:2])  # also for a meta tensor beside others
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rotary_in_place(x: torch.Tensor, *arguments: Any) -> None:
    rotation = Rotation._make(arguments)
    _check_length(x, rotation)
    with torch.no_grad():
        if _in_triton(x):
            from flashvar.backends.triton.rotary.launch import launch

            launch(x, x, rotation, x.shape[-2])
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
            return
        _check_positions(x, rotation)
        x.copy_(formula(x, rotation, x.shape[-2]))


def _rotary_in_place_batched(x: torch.Tensor, *arguments: Any) -> None:
    x.copy_(formula(x, Rotation._make(arguments), x.shape[-2]))


def _rotary_in_place_fake(x: torch.Tensor, *arguments: Any) -> None:
    """Makes no tensor: the op writes to x."""


def _check_length(x: torch.Tensor, rotation: Rotation) -> None:
    """Refuse tables that are shorter than the sequences: a graph may not have known."""
    if rotation.cu_seqlens is None:
        check_length(rotation.cos, rotation.offset, x.shape[1])


def _check_positions(x: torch.Tensor, rotation: Rotation) -> None:
    """Refuse positions beyond the tables, and offsets that decrease or leave the rows.

    On the CPU only: reading them would wait for a device.
    """
    given = rotation.offsets, rotation.cu_seqlens
    if given == (None, None) or not can_be_read(*given):
        return
    if rotation.cu_seqlens is not None:
        ends = as_list(rotation.cu_seqlens)
        if sorted(ends) != ends or ends[0] < 0 or ends[-1] > x.shape[0]:
            raise ShapeError(
                f"cu_seqlens must not decrease, and stay within the {x.shape[0]} packed rows, "
                f"found {ends}: pass 0 and the cumulative sum of the lengths"
            )
    positions, inside = positions_of_rows(x, rotation)
    outside = ((positions < 0) | (positions >= rotation.cos.shape[0])) & inside
    if bool(outside.any()):
        raise ShapeError(
            f"cos and sin must have every position of the sequences, found {rotation.cos.shape[0]} "
            f"positions and a row at {int(positions[outside][0])}: pass longer tables, or correct "
            "seqlen_offsets"
        )


class _Rotated(Differentiated):
    """The gradient of x, which is rotated back: `inputs` are the result, then those of the op."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, heads, *tensors, offset, interleaved, conjugate = inputs
        ctx.save_for_backward(*tensors)
        ctx.heads, ctx.rest = heads, (offset, interleaved, not conjugate)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        none = (None,) * (len(Rotation._fields) + 1)
        if grad is None:
            return None, None, *none
        back = Rotation._make((*ctx.saved_tensors, *ctx.rest))
        return None, torch.ops.flashvar.rotary(grad, ctx.heads, *back), *none


def _rotary_at_autograd_key(keyset: Any, x: torch.Tensor, heads: int, *arguments: Any) -> Any:
    rotation = Rotation._make(arguments)
    if _needs_formula_here(x, rotation):
        _check_positions(x, rotation)
        return formula(x, rotation, heads).contiguous()
    op = torch.ops.flashvar.rotary.default
    result = below_autograd(op, _rotary, keyset, (x, heads, *arguments))
    if not (torch.is_grad_enabled() and x.requires_grad):
        return result
    return attach(_Rotated, (result,), x, heads, *arguments)[0]


def _rotary_in_place_at_autograd_key(keyset: Any, x: torch.Tensor, *arguments: Any) -> None:
    recorded = torch.is_grad_enabled() and x.requires_grad
    if recorded or _needs_formula_here(x, Rotation._make(arguments)):
        # Of a copy, which gradients of the tables read.
        x.copy_(torch.ops.flashvar.rotary(x.clone(), x.shape[-2], *arguments))
    else:
        op = torch.ops.flashvar.rotary_.default
        below_autograd(op, _rotary_in_place, keyset, (x, *arguments))


def _needs_formula_here(x: torch.Tensor, rotation: Rotation) -> bool:
    """Whether a program that was traced without them wants tangents, or gradients of the tables."""
    cos, sin = rotation.cos, rotation.sin
    of_tables = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return of_tables or has_tangent(x, cos, sin)


_LIBRARY.impl("rotary", _rotary, "CompositeExplicitAutograd")
_LIBRARY.impl("rotary_", _rotary_in_place, "CompositeExplicitAutograd")
torch.library.register_fake("flashvar::rotary", _rotary_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::rotary_", _rotary_in_place_fake, lib=_LIBRARY)
_LIBRARY.impl("rotary", _rotary_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl("rotary_", _rotary_in_place_at_autograd_key, "Autograd", with_keyset=True)
# For torch.autograd.grad(is_grads_batched=True), whose batching is older than torch.vmap's.
_LIBRARY.impl("rotary_", _rotary_in_place_batched, "Batched")


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """A new tensor with every head of x rotated."""
    if needs_formula(x, rotation.cos, rotation.sin):
        return _by_formula(x, [(0, x.shape[-2], rotation)])
    return torch.ops.flashvar.rotary(x, x.shape[-2], *rotation)


def rotate_in_place(x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """Rotate some heads of x in place, recorded by autograd where gradients are needed.

    The first of `parts` begins at head 0. Returns x itself. Where x is a leaf that requires a
    gradient, it returns a view of x that has the gradient: torch refuses in-place writes to leaves,
    FlashAttention allows them. If x is one of several views that one call made (unbind, split,
    chunk), x gets new memory, and the base of the views is unchanged.
    """
    check_writable(x)
    if any(needs_formula(x, rotation.cos, rotation.sin) for _, _, rotation in parts):
        # Whole: a view of a DTensor may be a copy, to which a write would be lost.
        return x.copy_(_by_formula(x.clone(), parts))
    if torch.is_grad_enabled() and x.requires_grad:
        if is_compiling() and not x.is_leaf:
            # The compiler does not see the in-place write of a compiled autograd function. It sees
            # that of copy_, which it mostly removes.
            return x.copy_(_rotated(x, parts))
        _refuse_second_rotation(x)
        if _is_one_of_several_views(x):
            return _swapped(x, _rotated(x, parts))
        tensors: list[torch.Tensor | None] = []
        plain = []
        for begin, count, (*of_part, offset, interleaved, conjugate) in parts:
            tensors += of_part
            plain.append((begin, count, (offset, interleaved, conjugate)))
        return _InPlace.apply(x, plain, *tensors)
    _rotate_parts(x, parts)
    return x


def _refuse_second_rotation(x: torch.Tensor) -> None:
    """Refuse to rotate an input of a function that torch.utils.checkpoint calls again.

    With use_reentrant=True it is called in the backward, with detached inputs, which the first call
    has rotated. Torch's own in-place functions refuse leaves, and so these inputs.
    """
    if is_compiling() or torch._C._current_graph_task_id() == -1:
        return
    root = x._base if x._is_view() else x
    if root.is_leaf and root.requires_grad:
        raise InvalidInputError(
            "x must not be an input of a checkpointed function if it is rotated in place, found a "
            "leaf in a backward: rotate x.clone() in that function, or pass inplace=False"
        )


def _swapped(x: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """Make the object x refer to `rotated`; the old memory and its history are unchanged.

    Torch refuses in-place writes to one of several views that one call made: the other views would
    become unusable. An unrecorded write would change tensors that other functions saved for their
    backward.
    """
    try:
        torch.utils.swap_tensors(x, rotated)
    except RuntimeError as error:
        raise InvalidInputError(
            "x must not be kept for a backward if it is rotated in place and is one of several "
            f"views that one call made, found one that is ({error}): pass inplace=False"
        ) from error
    return x


class _InPlace(torch.autograd.Function):  # type: ignore[misc]
    """Rotation in place; the gradient is rotated back, out of place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plain: Any, *tensors: Any) -> torch.Tensor:
        parts = _joined(plain, tensors)
        _rotate_parts(x, parts)
        if _can_be_marked(x):
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
    """A new tensor with rotated parts; heads in no part are copied."""
    (_, count, rotation), *others = parts
    flat = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4]) if x.dim() == 5 else x
    out = torch.ops.flashvar.rotary(flat, count, *rotation)
    for begin, count, rotation in others:
        rotate_in_place(out.narrow(-2, begin, count), [(0, count, rotation)])
    return out.view(x.shape)


def _by_formula(x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """As `_rotated`, in torch's own functions."""
    # Not flattened: the kinds of a DTensor may be on several ranks.
    kinds = [one.squeeze(-3) for one in x.split(1, -3)] if x.dim() == 5 else [x]
    with without_promotion():
        flat = torch.cat(kinds, -2)
    found, done = [], 0
    for begin, count, rotation in parts:
        tensors = {"cos": rotation.cos, "sin": rotation.sin, "seqlen_offsets": rotation.offsets}
        are_dtensors("rotary embeddings", {"x": x, **tensors, "cu_seqlens": rotation.cu_seqlens})
        heads = flat.narrow(-2, begin, count)
        _check_positions(heads, rotation)
        found += [flat.narrow(-2, done, begin - done), formula(heads, rotation, count)]
        done = begin + count
    found.append(flat.narrow(-2, done, flat.shape[-2] - done))
    with without_promotion():
        return torch.cat(found, -2).reshape(x.shape)


def _joined(plain: Any, tensors: tuple[Any, ...], back: bool = False) -> list[Part]:
    """Parts, joined from the tensors and the other arguments; `back` rotates in reverse."""
    parts = []
    for i, (begin, count, (offset, interleaved, conjugate)) in enumerate(plain):
        cos, sin, offsets, cu_seqlens = tensors[4 * i : 4 * i + 4]
        reverse = conjugate is not back
        parts.append(
            (begin, count, Rotation(cos, sin, offsets, cu_seqlens, offset, interleaved, reverse))
        )
    return parts


def _rotate_parts(x: torch.Tensor, parts: Sequence[Part]) -> None:
    for begin, count, rotation in parts:
        for heads in _views(x, begin, count):
            torch.ops.flashvar.rotary_(heads, *rotation)


def _views(x: torch.Tensor, begin: int, count: int) -> list[torch.Tensor]:
    """Views of a range of heads; in [batch, seqlen, kinds, heads, head_dim], of kinds * heads."""
    if x.dim() < 5:
        return [x if count == x.shape[-2] else x.narrow(-2, begin, count)]
    heads = x.shape[-2]
    if heads == 0:
        return []
    kinds = x.narrow(-3, begin // heads, count // heads)
    if kinds.stride(-3) == heads * kinds.stride(-2):
        return [kinds.flatten(-3, -2)]
    return [kinds.select(-3, i) for i in range(kinds.shape[-3])]


def _is_one_of_several_views(x: torch.Tensor) -> bool:
    """Whether x comes from unbind, split or chunk: torch refuses in-place writes to such views."""
    return not is_compiling() and x._is_view() and _creation(x) == _SEVERAL


def _can_be_marked(x: torch.Tensor) -> bool:
    """Whether autograd allows x to be marked dirty, so that its views see the new history."""
    if is_compiling():
        return False
    if not x._is_view():
        return not x.is_leaf
    base = x._base
    return not (base.is_leaf and base.requires_grad) and _creation(x) == _DEFAULT
