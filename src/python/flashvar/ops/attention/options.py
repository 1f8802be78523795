"""Checks of the options of a call, and the values that kernels get from them."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.arguments import (
    FLOAT32_LIMIT,
    as_traceable,
    check_backend,
    check_flag,
    check_layout,
    check_scale,
    float32_scale,
    is_integer,
    is_number,
    whole_number,
)
from flashvar.ops.attention.problem import Options

# The order of the dimensions of q, k and v; after "->" that of the output, if it differs.
Layout = Literal["bshd", "bhsd", "bhsd->bshd"]
LAYOUTS: Final[tuple[str, ...]] = get_args(Layout)
# The scale of a call without one, in messages.
DEFAULT_SCALE: Final = "head_dim**-0.5"

# Devices round numbers below the smallest to 0.
_FLOAT32_SMALLEST: Final = float(torch.finfo(torch.float32).tiny)
# From here on float32 rounds dropout_p to 1: nothing is kept, and 1 / (1 - p) is infinite.
ALL_DROPPED: Final = 1 - 2**-25


def check_options(options: Options) -> None:
    """Refuse options with an unsupported type or value.

    Raises:
        InvalidInputError: with what was expected, what was found and what to do.
    """
    check_flag("causal", options.causal)
    check_flag("deterministic", options.deterministic)
    check_layout(options.layout, LAYOUTS, "b batch, s sequence, h heads, d head dim")
    check_backend(options.backend)
    check_scale(options.scale, DEFAULT_SCALE)
    sides: tuple[Any, ...] = (options.window_left, options.window_right)
    if not all(is_integer(side) and side >= -1 for side in sides):
        raise _window_error(sides)
    softcap, dropout_p = options.softcap, options.dropout_p
    if not is_number(softcap) or not (
        softcap == 0 or _FLOAT32_SMALLEST <= softcap <= FLOAT32_LIMIT
    ):
        raise InvalidInputError(
            "softcap must be a finite number, not negative, that float32 can hold, found "
            f"{softcap!r}: pass 0.0 for none"
        )
    if not is_number(dropout_p) or not 0 <= dropout_p < ALL_DROPPED:
        raise InvalidInputError(
            f"dropout_p must be a number from 0 to below 1 (in float32), found {dropout_p!r}: pass "
            "0.0 for none"
        )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(options, name)
        if bound is not None and (not is_integer(bound) or bound < 0):
            raise InvalidInputError(
                f"{name} must be a whole number, not negative, found {bound!r}: leave it out, or "
                "pass int(lengths.max())"
            )


def window_pair(window_size: Any) -> tuple[Any, Any]:
    """The two sides of a window.

    Raises:
        InvalidInputError: the window does not have two sides.
    """
    try:
        left, right = window_size
    except (TypeError, ValueError, RuntimeError):
        raise _window_error(window_size) from None
    return left, right


def window_side(side: Any, window_size: Any = None) -> Any:
    """One side of a window as FlashAttention 2 reads it: any negative number is unbounded.

    The integer may be a tensor, as in FlashAttention's own tests. An error shows `window_size`.

    Raises:
        InvalidInputError: the side is not an integer.
    """
    found = whole_number(side)
    if found is None:
        raise _window_error(side if window_size is None else window_size)
    return max(found, -1)


def _window_error(found: object) -> InvalidInputError:
    return InvalidInputError(
        "window_size must be two integers (left, right), each -1 (unbounded) or more, found "
        f"{found!r}: pass how many keys a query sees on each side of its own, (-1, -1) for all"
    )


def plain_number(number: Any, *, booleans: bool = False) -> Any:
    """A number as torch and FlashAttention 2 accept it: also a numpy number or a tensor.

    Numbers that they refuse, such as a tensor with a gradient or a list, are returned unchanged for
    `check_options` to refuse; so are booleans, unless `booleans` are to be read as 0 and 1.
    """
    number = as_traceable(number)
    if number is None or is_number(number):
        return number
    if isinstance(number, torch.Tensor) and (number.requires_grad or number.dim() > 0):
        return number
    dtype = str(getattr(number, "dtype", ""))
    if not booleans and (isinstance(number, bool) or dtype in ("bool", "torch.bool")):
        return number
    try:
        return float(number) if hasattr(number, "__float__") else number
    except (TypeError, ValueError, RuntimeError):
        return number


def scale_of(scale: float | None, head_dim: int) -> float:
    """The factor of the scores.

    Raises:
        InvalidInputError: float32 cannot hold the scale.
    """
    if scale is None:
        return float(head_dim**-0.5)
    return float32_scale(scale, DEFAULT_SCALE)


def window_of(options: Options, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """How many keys before and after the diagonal a query sees; -1 where it sees all of them.

    The lengths may be upper bounds: a window that covers the longest sequence hides nothing.
    """
    left = int(options.window_left)
    right = 0 if options.causal else int(options.window_right)
    # Lengths are compared only with a side that is bounded: in a graph they may be unknown.
    if left >= 0 and left >= seqlen_k - 1:
        left = -1
    if right >= 0 and not options.causal and right >= seqlen_q - 1:
        right = -1
    return left, right


def bound_of(longest: int | None, total: int) -> int:
    """An upper bound of the length of each packed sequence: `longest`, at most the total."""
    return total if longest is None else min(int(longest), total)
