"""`apply_rotary` and `rotary_kernel` of `flash_attn.ops.triton.rotary`."""

from __future__ import annotations

from typing import Any

import torch

from flashvar.ops.arguments import as_bool, refuses_unknown_subclasses
from flashvar.ops.rotary.rotation import checked
from flashvar.ops.rotary.torch_library import rotate, rotate_in_place

__all__ = ["apply_rotary", "rotary_kernel"]  # noqa: F822


@refuses_unknown_subclasses
def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Like `layers.rotary.apply_rotary_emb`; `conjugate` rotates in the opposite direction.

    Returns:
        Shape and dtype of x; x itself with `inplace`.

    Raises:
        InvalidInputError: An argument does not fit x.
    """
    rotation = checked(
        x,
        cos,
        sin,
        interleaved=interleaved,
        conjugate=conjugate,
        seqlen_offsets=seqlen_offsets,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )
    if as_bool("inplace", inplace):
        return rotate_in_place(x, [(0, x.shape[-2], rotation)])
    return rotate(x, rotation)


def __getattr__(name: str) -> Any:
    """Import the kernel, which needs Triton, on first use."""
    if name == "rotary_kernel":
        from flashvar.backends.triton.rotary.kernel import rotary_kernel

        return rotary_kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
