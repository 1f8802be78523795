"""The dtype that a caller of xformers' functions wants for the output."""

from __future__ import annotations

from typing import Any

import torch

from flashvar.errors import DtypeError

__all__ = ["check_dtype"]


def check_dtype(output_dtype: Any, default: str) -> None:
    """Check that output_dtype, if given, is a dtype; the default is that of `default`."""
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise DtypeError(
            f"output_dtype must be a torch.dtype, found {output_dtype!r}: leave it out for that of "
            f"{default}"
        )
