"""`rearrange` and `repeat` of tensors by patterns such as "b s ... -> (b s) ...", as in einops.

FlashAttention's modules export these names, and other packages import them from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple, TypeAlias

import torch

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.arguments import check_strided, count, refuses_unknown_subclasses

_TOKEN: Final = re.compile(r"\.\.\.|[A-Za-z][A-Za-z0-9_]*|[0-9]+|\S")
_DOTS: Final = "..."
# One side of a pattern: a list of dimensions, each a list of axes.
Side: TypeAlias = list[list[str]]


class _Pattern(NamedTuple):
    before: Side
    after: Side
    lengths: dict[str, int]


@refuses_unknown_subclasses
def rearrange(
    tensor: torch.Tensor | Sequence[torch.Tensor], pattern: str, **axes_lengths: int
) -> torch.Tensor:
    """The tensor with its axes in another order, split and joined.

    Args:
        tensor: A tensor, or tensors of one shape, which are stacked along a new first axis.
        pattern: Axes before and after "->"; "(a b)" is one dimension of two axes, "..." any number
            of dimensions.
        **axes_lengths: Lengths that cannot be computed from the shape.

    Raises:
        InvalidInputError: The pattern is not valid, or does not fit the tensor.
    """
    x = _one(tensor)
    read = _read(x, pattern, axes_lengths)
    unmatched = set(_axes(read.before)) ^ set(_axes(read.after))
    if unmatched:
        raise _bad(pattern, f"{_list(unmatched)} on only one side", "name every axis on both")
    return _apply(x, read)


@refuses_unknown_subclasses
def repeat(
    tensor: torch.Tensor | Sequence[torch.Tensor], pattern: str, **axes_lengths: int
) -> torch.Tensor:
    """Like `rearrange`; axes that are only on the right have the given lengths.

    Raises:
        InvalidInputError: The pattern is not valid, or does not fit the tensor.
    """
    x = _one(tensor)
    read = _read(x, pattern, axes_lengths)
    lost = set(_axes(read.before)).difference(_axes(read.after))
    if lost:
        raise _bad(pattern, f"{_list(lost)} only on the left", "name every axis on the right too")
    unknown = set(_axes(read.after)).difference(read.lengths)
    if unknown:
        raise _bad(pattern, f"{_list(unknown)} without a length", "pass it as a keyword")
    return _apply(x, read)


def _one(tensor: object) -> torch.Tensor:
    if isinstance(tensor, (list, tuple)) and tensor:
        return torch.stack([_one(part) for part in tensor])
    if isinstance(tensor, torch.Tensor):
        check_strided("tensor", tensor)
        return tensor
    raise InvalidInputError(
        f"tensor must be a torch.Tensor or a list of them, found {type(tensor).__name__}: "
        "convert it with torch.as_tensor()"
    )


def _axes(side: Side) -> list[str]:
    # Not a property of the pattern: Dynamo of torch 2.8 follows none of a named tuple.
    return [axis for group in side for axis in group]


def _apply(x: torch.Tensor, read: _Pattern) -> torch.Tensor:
    names, others, lengths = _axes(read.before), _axes(read.after), read.lengths
    x = x.reshape([lengths[axis] for axis in names])
    x = x.permute([names.index(axis) for axis in others if axis in names])
    for i, axis in enumerate(others):
        if axis not in names:
            x = x.unsqueeze(i)
    x = x.expand([lengths[axis] for axis in others])
    return x.reshape([prod([lengths[axis] for axis in group]) for group in read.after])


def _read(x: torch.Tensor, pattern: str, given: dict[str, int]) -> _Pattern:
    """Parse the pattern: both sides with "..." expanded, and the lengths of all known axes."""
    if not isinstance(pattern, str):
        raise InvalidInputError(
            f"pattern must be a string, found {type(pattern).__name__}: write axes as in "
            "'b s ... -> (b s) ...'"
        )
    sides = pattern.split("->")
    if len(sides) != 2:
        raise _bad(pattern, f"{len(sides) - 1} arrows", 'write one "->" between both sides')
    lengths = {axis: count(axis, length) for axis, length in given.items()}
    before, after = (_parsed(side, pattern, lengths) for side in sides)
    rest = x.dim() - sum(group != _DOTS for group in before)
    if rest < 0 or (rest > 0 and _DOTS not in before):
        raise ShapeError(
            f"{pattern!r} must name every dimension of the tensor, found {x.dim() - rest} for "
            f"{tuple(x.shape)}: name them all, or write ..."
        )
    dots = [f"{_DOTS}{i}" for i in range(rest)]
    read = _Pattern(_expanded(before, dots), _expanded(after, dots), lengths)
    if any(_DOTS in group for group in before if group != _DOTS):
        raise _bad(pattern, "(...) on the left", "join dimensions only on the right")
    if (_DOTS in before) != any(_DOTS in group for group in after):
        raise _bad(pattern, "... on only one side", "write it on both")
    names, others = _axes(read.before), _axes(read.after)
    for side in (names, others):
        if len(set(side)) != len(side):
            raise _bad(pattern, "an axis twice on one side", "give every axis its own name")
    unused = set(given).difference(names, others)
    if unused:
        raise _bad(pattern, f"a length of {_list(unused)}, which it lacks", "leave it out")
    for size, group in zip(x.shape, read.before, strict=True):
        _measure(size, group, lengths, pattern)
    return read


def _parsed(side: str, pattern: str, lengths: dict[str, int]) -> list[list[str] | str]:
    """Groups of axes; "..." outside parentheses is kept. A number is an axis of that length."""
    groups: list[list[str] | str] = []
    inside: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(" and inside is None:
            inside = []
            groups.append(inside)
        elif token == ")" and inside is not None:
            inside = None
        elif token == _DOTS and inside is None:
            groups.append(token)
        elif token == _DOTS or token[0].isalpha():
            (groups.append([token]) if inside is None else inside.append(token))
        elif token.isdigit():
            axis = [] if token == "1" else [f"{token} #{len(lengths)}"]
            lengths.update(dict.fromkeys(axis, int(token)))
            (groups.append(axis) if inside is None else inside.extend(axis))
        else:
            raise _bad(pattern, f"{token!r}", "write names, numbers, ... and ( )")
    if inside is not None:
        raise _bad(pattern, "a bracket that is not closed", "close it")
    return groups


def _expanded(side: list[list[str] | str], dots: list[str]) -> Side:
    groups: Side = []
    for group in side:
        if isinstance(group, str):
            groups += [[dot] for dot in dots]
        else:
            groups.append([a for axis in group for a in (dots if axis == _DOTS else [axis])])
    return groups


def _measure(size: int, group: list[str], lengths: dict[str, int], pattern: str) -> None:
    """Compute the one unknown length in a dimension, or check that the known lengths fit."""
    unknown = [axis for axis in group if axis not in lengths]
    known = prod([lengths[axis] for axis in group if axis in lengths])
    if len(unknown) > 1:
        raise _bad(pattern, f"no lengths of {_list(unknown)}", "pass all but one as keywords")
    fits = known == size if not unknown else known > 0 and size % known == 0
    if not fits:
        raise ShapeError(
            f"({' '.join(group)}) of {pattern!r} must be a dimension of {size}, found lengths of "
            f"{known} together: pass others"
        )
    if unknown:
        lengths[unknown[0]] = size // known


def _list(axes: set[str] | list[str]) -> str:
    return ", ".join(sorted(axes))


def _bad(pattern: str, found: str, do: str) -> InvalidInputError:
    return InvalidInputError(f"a pattern must name every axis, found {found} in {pattern!r}: {do}")
