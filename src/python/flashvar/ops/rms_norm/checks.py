"""Checks of a norm's arguments that its formula would broadcast or round instead."""

from __future__ import annotations

from typing import Final

import torch

from flashvar.errors import DtypeError, ShapeError
from flashvar.ops.arguments import check_tensor
from flashvar.ops.rms_norm.formula import Norm, Tensors
from flashvar.ops.unknown_sizes import differ, is_known

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check(tensors: Tensors, norm: Norm) -> None:
    """Refuse tensors that are not of one norm.

    Raises:
        InvalidInputError: with what was expected, what was found and what to do.
    """
    for name, one in zip(Tensors._fields, tensors, strict=True):
        if one is None:
            continue
        check_tensor(name, one)
        _check_dtype(name, one.dtype, "cast it with .to(torch.bfloat16)")
    _check_dtype("output_dtype", norm.dtype, "leave it out for the dtype of x")
    x, gate, weight, bias, residual = tensors
    for name, one in (("weight", weight), ("bias", bias)):
        if one is not None and differ(one.shape, x.shape[-1:]):
            raise ShapeError(
                f"{name} must be of the size of the last dimension, {tuple(x.shape[-1:])}, found "
                f"{tuple(one.shape)} with x of shape {tuple(x.shape)}: pass x of that many channels"
            )
    for name, one in (("gate", gate), ("residual", residual)):
        if one is not None and not _expands(one, x):
            raise ShapeError(
                f"{name} must have the shape of x, {tuple(x.shape)}, or expand to it, found "
                f"{tuple(one.shape)}: reshape it"
            )


def _expands(one: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a tensor has the shape of x or can be expanded to it."""
    sizes = zip(reversed(one.shape), reversed(x.shape), strict=False)
    if one.dim() > x.dim():
        return False
    return not any(is_known(size != wanted) and is_known(size != 1) for size, wanted in sizes)


def _check_dtype(name: str, dtype: torch.dtype, way: str) -> None:
    if dtype not in _DTYPES:
        raise DtypeError(
            f"{name} must be bfloat16, float16, float32 or float64, found {dtype}: {way}"
        )
