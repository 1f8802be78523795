"""Is this a call of attention that can be served, and what exactly is asked?

`inspect` reads facts off the three tensors, refuses what no kernel takes, and returns a `Problem`:
everything about a call but its data. Backends see sizes and strides only through it, in one order
(batch, sequence, heads), whatever layout the user keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from flashvar.errors import DeviceError, DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.verdicts import BACKENDS

LAYOUTS: Final = ("bshd", "bhsd")

# The spelling that requests, manifests and messages use.
DTYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_KERNEL_DTYPES: Final = ("bf16", "fp16")

# Largest finite float32: what a scale has to fit in.
_SCALE_LIMIT: Final = float(torch.finfo(torch.float32).max)
_SCALES: Final = (int, float, torch.SymFloat, torch.SymInt)


class Strides(NamedTuple):
    """Distances in elements; the head dim's own is 1."""

    batch: int
    sequence: int
    heads: int


@dataclass(frozen=True)
class Problem:
    """One call of attention without its data.

    `out` is [batch, seqlen_q, heads_q, head_dim] in the user's layout (`out_shape`), contiguous.
    """

    dtype: str
    device: int | None  # CUDA ordinal; None is the CPU
    layout: str
    causal: bool
    scale: float
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    out_shape: tuple[int, int, int, int]

    @property
    def empty(self) -> bool:
        """Whether no query sees any key: outputs are 0 and -inf, gradients 0."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """[batch, heads_q, seqlen_q], in either layout."""
        return (self.batch, self.heads_q, self.seqlen_q)

    @property
    def lse_dtype(self) -> torch.dtype:
        """Float32, and float64 where the inputs are."""
        return torch.float64 if self.dtype == "fp64" else torch.float32

    def bshd(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor of the user's layout as [batch, sequence, heads, head_dim]."""
        return tensor.transpose(1, 2) if self.layout == "bhsd" else tensor


def inspect(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    layout: str,
    backend: str = "auto",
) -> Problem:
    """Check the arguments of `flashvar.attention` and describe the call.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, InvalidInputError: with what was expected,
            what was found and what to do.
    """
    check_options(causal, scale, layout, backend)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__}: "
                "convert it with torch.as_tensor()"
            )
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise LayoutError(
                f"{name} must be a strided tensor, got {kind}: convert it to a padded dense one"
            )
    device = _common_device(q, k, v)
    in_kernels = device.type == "cuda" and backend != "reference"
    dtype = _common_dtype(q, k, v, in_kernels)
    batch, seqlen_q, heads_q, head_dim = _sizes("q", q, layout)
    batch_k, seqlen_k, heads_kv, head_dim_k = _sizes("k", k, layout)
    if tuple(v.shape) != tuple(k.shape):
        raise ShapeError(
            f"k and v must have the same shape, got k {_shape(k)} and v {_shape(v)}: "
            "pass one value vector of the same head dim for each key"
        )
    if batch_k != batch:
        raise ShapeError(
            f"q, k and v must have the same batch size, got {batch} in q and {batch_k} in k: "
            "expand() the smaller one (an expanded dimension is not copied)"
        )
    if head_dim_k != head_dim:
        raise ShapeError(
            f"q and k must have the same head dim, got {head_dim} in q and {head_dim_k} in k: "
            f"check that layout={layout!r} is the order of your dimensions"
        )
    _check_heads(heads_q, heads_kv, layout)
    _check_head_dim(head_dim, in_kernels)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1 and head_dim > 1 and tensor.numel():
            raise LayoutError(
                f"{name} must be contiguous in its last dimension (stride 1), got strides "
                f"{tuple(tensor.stride())}: call {name}.contiguous() or transpose other dimensions"
            )
    shape = (batch, seqlen_q, heads_q, head_dim)
    packed = (seqlen_q * heads_q * head_dim, heads_q * head_dim, head_dim)
    if layout == "bhsd":
        shape = (batch, heads_q, seqlen_q, head_dim)
        packed = (packed[0], head_dim, seqlen_q * head_dim)
    return Problem(
        dtype=dtype,
        device=None if device.type != "cuda" else (device.index or 0),
        layout=layout,
        causal=bool(causal),
        scale=_scale(scale, head_dim),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        q=_strides(q, layout),
        k=_strides(k, layout),
        v=_strides(v, layout),
        out=Strides(*packed),
        out_shape=shape,
    )


def check_options(causal: object, scale: object, layout: object, backend: object) -> None:
    """Refuse options of other types or values than attention takes; quick when all is well.

    A scale may also be symbolic, while a graph is traced.
    """
    if type(causal) is not bool:
        raise InvalidInputError(f"causal must be True or False, got {causal!r}: pass a bool")
    if type(layout) is not str or layout not in LAYOUTS:
        raise LayoutError(
            f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}: "
            "name the order of the dimensions (b batch, s sequence, h heads, d head dim)"
        )
    if type(backend) is not str or backend not in BACKENDS:
        raise InvalidInputError(
            f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}: "
            'leave it out for "auto"'
        )
    if scale is not None and type(scale) is not float and not isinstance(scale, _SCALES):
        raise InvalidInputError(
            f"scale must be a number, got {scale!r}: leave it out for head_dim**-0.5"
        )


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _common_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.device:
    if q.device != k.device or q.device != v.device:
        raise DeviceError(
            f"q, k and v must be on one device, got q on {q.device}, k on {k.device} and v on "
            f"{v.device}: move them with .to(q.device)"
        )
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise DeviceError(
            f"q, k and v must be on a CUDA device or the CPU, got {q.device}: "
            "move them with .to('cuda') or .to('cpu')"
        )
    return q.device


def _common_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, in_kernels: bool) -> str:
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise DtypeError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}: "
            "cast them with .to(q.dtype)"
        )
    dtype = DTYPES.get(q.dtype)
    if dtype is None:
        raise DtypeError(
            f"q, k and v must be bfloat16 or float16 (float32 and float64 too on the CPU), got "
            f"{q.dtype}: cast them with .to(torch.bfloat16)"
        )
    if in_kernels and dtype not in _KERNEL_DTYPES:
        raise DtypeError(
            f"q, k and v must be bfloat16 or float16 on a CUDA device, got {q.dtype}: cast them "
            "with .to(torch.bfloat16), or name backend='reference', which is slow"
        )
    return dtype


def _sizes(name: str, tensor: torch.Tensor, layout: str) -> tuple[int, int, int, int]:
    if tensor.dim() != 4:
        raise ShapeError(
            f"{name} must have 4 dimensions ({', '.join(layout)}), got {tensor.dim()}: "
            f"{_shape(tensor)}: add the missing one with unsqueeze()"
        )
    batch, second, third, head_dim = tensor.shape
    if layout == "bhsd":
        return batch, third, second, head_dim
    return batch, second, third, head_dim


def _strides(tensor: torch.Tensor, layout: str) -> Strides:
    # The stride of a dimension with one entry says nothing, and must not make rows look unaligned.
    strides = zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    batch, second, third = (stride if size > 1 else 0 for stride, size in strides)
    return Strides(batch, third, second) if layout == "bhsd" else Strides(batch, second, third)


def _check_heads(heads_q: int, heads_kv: int, layout: str) -> None:
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv != 0:
        raise ShapeError(
            "the heads of q must be a positive multiple of the heads of k and v, got "
            f"{heads_q} and {heads_kv}: repeat heads of q, or check that layout={layout!r} is the "
            "order of your dimensions"
        )


def _check_head_dim(head_dim: int, in_kernels: bool) -> None:
    if head_dim < 1:
        raise ShapeError(
            f"the head dim must be at least 1, got {head_dim}: pass vectors that hold something"
        )
    if in_kernels and (head_dim > 256 or head_dim % 8 != 0):
        raise ShapeError(
            f"the head dim must be a multiple of 8 from 8 to 256 on a CUDA device, got {head_dim}: "
            "pad q, k and v with zeros and pass scale=head_dim**-0.5 of the unpadded head dim"
        )


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not abs(value) <= _SCALE_LIMIT:
        raise InvalidInputError(
            f"scale must be a finite number that float32 can hold, got {scale!r}: "
            "leave it out for head_dim**-0.5"
        )
    return value
