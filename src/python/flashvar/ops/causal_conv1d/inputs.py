"""Checks that arguments of causal_conv1d fit together; views of them in the order of backends."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import torch

from flashvar.errors import DtypeError, InvalidInputError, ShapeError
from flashvar.ops.arguments import (
    check_backend,
    check_device,
    check_layout,
    check_operand,
    is_integer,
)
from flashvar.ops.causal_conv1d.problem import Convolution
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.sequences import check_cu_seqlens, check_one_for_each
from flashvar.ops.unknown_sizes import differ, is_known

Layout = Literal["btd", "bdt"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
Activation = Literal["silu", "swish"] | None
ACTIVATIONS: Final = (None, "silu", "swish")
WIDTHS: Final = (2, 3, 4)  # those of kernels; the reference takes any from 2


def check_kinds(tensors: dict[str, Any], activation: Any, layout: Any, backend: Any) -> None:
    """Refuse what the dispatcher could not hand on: no tensors, unknown options.

    `x` and `weight` must be tensors, and `state` where it is among the names; others may be None.
    """
    check_layout(layout, LAYOUTS, "b batch, t tokens, d channels")
    if not (activation is None or type(activation) is str) or activation not in ACTIVATIONS:
        raise InvalidInputError(
            f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, found {activation!r}: "
            "apply another one to the output"
        )
    check_backend(backend)
    for name, x in tensors.items():
        if x is None and name not in ("x", "weight", "state"):
            continue
        check_operand(name, x, "a dense one, or pass its values as packed rows with cu_seqlens")


def check(
    x: Any, weight: Any, bias: Any, residual: Any, state: Any, cu_seqlens: Any, layout: str
) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        InvalidInputError: with what was expected, what was found and what to do.
    """
    shape = _shape_text(layout)
    if x.dim() != 3 and (x.dim() != 2 or cu_seqlens is None):
        raise ShapeError(
            f"x must be {shape}, or packed with cu_seqlens {_shape_text(layout, packed=True)}, "
            f"found {tuple(x.shape)}: unsqueeze or reshape it"
        )
    check_channels(x, weight, bias, residual, layout)
    if cu_seqlens is not None:
        rows = x.shape[-2 if layout == "btd" else -1]
        check_cu_seqlens(cu_seqlens, "x", x, 1 if x.dim() == 2 else x.shape[0], rows)
    if state is not None:
        batch = 1 if x.dim() == 2 else x.shape[0]
        count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        check_state("initial_state", state, x, weight, layout, count)
    _check_alike(
        x,
        {"weight": weight, "bias": bias, "residual": residual, "initial_state": state},
        {"cu_seqlens": cu_seqlens},
    )


def check_update(
    x: Any, state: Any, weight: Any, bias: Any, residual: Any, indices: Any, positions: Any,
    layout: str,
) -> None:  # fmt: skip
    """Refuse tensors of an update that do not fit together, as `check`."""
    if x.dim() not in (2, 3):
        raise ShapeError(
            f"x must be [batch, dim] or {_shape_text(layout)}, found {tuple(x.shape)}: unsqueeze "
            "or reshape it"
        )
    of_one = x if x.dim() == 3 else x.unsqueeze(1 if layout == "btd" else 2)
    if residual is not None and differ(residual.shape, x.shape):
        raise _residual_error(x, residual)
    check_channels(of_one, weight, bias, None, layout, x)
    check_state("state", state, of_one, weight, layout, x.shape[0] if indices is None else None)
    for name, one in (("state_indices", indices), ("state_positions", positions)):
        if one is not None:
            check_one_for_each(name, one, x.shape[0])
    _check_alike(
        x,
        {"weight": weight, "bias": bias, "residual": residual, "state": state},
        {"state_indices": indices, "state_positions": positions},
    )


def check_named(x: Any, weight: Any, bias: Any, residual: Any, state: Any, layout: str) -> None:
    """Refuse tensors beside a seq_idx that do not fit x, which has three dimensions."""
    check_channels(x, weight, bias, residual, layout)
    if state is not None:
        check_state("initial_state", state, x, weight, layout, x.shape[0])
        _check_alike(x, {"initial_state": state}, {})


def check_channels(
    x: Any, weight: Any, bias: Any, residual: Any, layout: str, of_update: Any = None
) -> None:
    """Refuse weights, biases and residuals of other shapes than x asks for.

    `of_update` is the x that was given, if the call is an update.
    """
    dim = channels(x, layout)
    if weight.dim() != 2 or is_known(weight.shape[0] != dim):
        given = tuple((x if of_update is None else of_update).shape)
        fix = f"check that layout={layout!r} is the order of your dimensions"
        if weight.dim() == 3 and weight.shape[1] == 1:
            fix = "squeeze the middle dimension of a Conv1d's weight"
        elif of_update is not None:
            fix = f"pass x, state and weight in this order, or {fix}"
        raise ShapeError(
            f"weight must be [dim, width] with dim {dim} for x {given}, found "
            f"{tuple(weight.shape)}: {fix}"
        )
    if weight.shape[1] < WIDTHS[0]:
        raise ShapeError(
            f"weight must have a width of at least {WIDTHS[0]}, found {weight.shape[1]}: multiply "
            "x by a filter of one tap"
        )
    if bias is not None and differ(bias.shape, (dim,)):
        raise ShapeError(
            f"bias must be [dim], that is ({dim},), found {tuple(bias.shape)}: reshape it"
        )
    if residual is not None and differ(residual.shape, x.shape):
        raise _residual_error(x, residual)


def _residual_error(x: Any, residual: Any) -> ShapeError:
    return ShapeError(
        f"residual must have the shape of x, {tuple(x.shape)}, found {tuple(residual.shape)}: "
        "expand() or transpose it"
    )


def check_state(name: str, state: Any, x: Any, weight: Any, layout: str, count: int | None) -> None:
    """Refuse a state of another shape than [count, dim, columns]; any count if it is None."""
    dim, past = channels(x, layout), weight.shape[1] - 1
    wrong = state.dim() != 3 or is_known(state.shape[1] != dim) or is_known(state.shape[2] < past)
    if wrong or (count is not None and is_known(state.shape[0] != count)):
        first = "pool" if count is None else count
        raise ShapeError(
            f"{name} must be [{first}, {dim}, {past} or more columns], one for each sequence, the "
            f"newest token last, found {tuple(state.shape)}: transpose it, or pass as many states "
            "as there are sequences"
        )


def check_state_len(state_len: Any, weight: Any, state: Any) -> None:
    """Refuse a number of columns that a final state cannot have."""
    past = weight.shape[1] - 1
    if not is_integer(state_len) or state_len < past:
        raise ShapeError(
            f"state_len must be at least width - 1, here {past}, found {state_len!r}: leave it out "
            f"for {past}"
        )
    if state is not None and state.dim() > 0 and state.shape[-1] != state_len:
        raise ShapeError(
            f"state_len must be the number of columns of initial_state, {state.shape[-1]}, found "
            f"{state_len}: leave it out"
        )


def _check_alike(x: Any, floats: dict[str, Any], indices: dict[str, Any]) -> None:
    if x.dtype not in DTYPES:
        raise DtypeError(
            f"x must be bfloat16, float16 or float32 (float64 too on the CPU), found {x.dtype}: "
            "cast it with .to(torch.bfloat16)"
        )
    wide = x.dtype == torch.float64
    for name, one in floats.items():
        if one is None:
            continue
        if one.dtype not in DTYPES or (one.dtype == torch.float64) is not wide:
            wanted = "float64" if wide else "bfloat16, float16 or float32"
            raise DtypeError(
                f"{name} must be {wanted} with {x.dtype} x, found {one.dtype}: cast it with "
                ".to(x.dtype)"
            )
    for name, one in (*floats.items(), *indices.items()):
        if one is not None:
            check_device(name, one, x.device, "x")


def _shape_text(layout: str, packed: bool = False) -> str:
    words = {"b": "batch", "t": "total" if packed else "seqlen", "d": "dim"}
    letters = layout.replace("b", "") if packed else layout
    return f"[{', '.join(words[letter] for letter in letters)}]"


def channels(x: Any, layout: str) -> int:
    """The number of channels of x."""
    size: int = x.shape[-1 if layout == "btd" else -2]
    return size


def rows_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A view [batch, seqlen, dim] of x, an output or a gradient; packed rows are one batch."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    return x if layout == "btd" else x.transpose(1, 2)


def users_order(y: torch.Tensor, x: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `rows_first`, for an output like x."""
    y = y if layout == "btd" else y.transpose(1, 2)
    return y.squeeze(0) if x.dim() == 2 else y


def in_order_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y, of the shape of x, with the strides of torch.empty_like(x)."""
    if x.is_contiguous():
        return y.contiguous()
    strides = torch.empty_like(x, device="meta").stride()
    order: list[int] = []
    for dim, stride in enumerate(strides):  # torch.compile cannot sort by symbols
        order.insert(sum(strides[other] >= stride for other in order), dim)
    inverse = [order.index(dim) for dim in range(x.dim())]
    return y.permute(order).contiguous().permute(inverse)


def convolution(
    x: torch.Tensor, weight: Any, bias: Any, state: Any, cu_seqlens: Any, silu: bool, layout: str
) -> Convolution:
    """The inputs in the order of backends."""
    ends = None if cu_seqlens is None else cu_seqlens.contiguous()
    return Convolution(rows_first(x, layout), weight, bias, state, ends, silu)
