"""Rotary position embeddings (Su et al. 2021), as in `flash_attn.layers.rotary`.

Signatures and results are FlashAttention's. Four things are safer: gradients are never written into
the tensor that autograd passes, `cos` and `sin` may have gradients, rotations in place are recorded
by autograd, and arguments that do not fit are an error.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from flashvar.compat.flash_attn.ops.triton.rotary import apply_rotary
from flashvar.errors import DtypeError, InvalidInputError, ShapeError
from flashvar.ops.arguments import (
    as_bool,
    as_device,
    check_device,
    check_strided,
    count,
    refuses_unknown_subclasses,
    whole_number,
)
from flashvar.ops.autocast import without_promotion
from flashvar.ops.dispatch_modes import can_be_read
from flashvar.ops.rotary.rotation import checked, rotate_rows
from flashvar.ops.rotary.torch_library import rotate_in_place
from flashvar.ops.unknown_sizes import is_known

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Replace every pair (a, b) of the last dimension by (-b, a).

    Args:
        x: [..., 2 * pairs].
        interleaved: Entries 2 i and 2 i + 1 are a pair, rather than i and i + pairs.
    """
    check_strided("x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ShapeError(
            f"x must have an even last dimension, found {tuple(x.shape)}: pass the part to rotate"
        )
    if x.dtype == torch.bool:
        raise DtypeError("x must be of numbers, found torch.bool: cast it, as with .float()")
    with without_promotion():
        if as_bool("interleaved", interleaved):
            return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)


@refuses_unknown_subclasses
def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate rows with torch functions, in the common dtype of x and the tables.

    Args:
        x: [batch, seqlen, heads, head_dim].
        cos: [seqlen, pairs] or [batch, seqlen, pairs] with 2 * pairs <= head_dim.
        sin: Like cos.
        interleaved: Entries 2 i and 2 i + 1 are a pair, rather than i and i + pairs.

    Raises:
        ShapeError: cos and sin do not fit x.
    """
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_strided(name, tensor)
        check_device(name, tensor, x.device, "x")
    rows = x.shape[:-2]
    fits = cos.shape == sin.shape and cos.dim() in (2, 3) and len(rows) == 2
    if fits:
        tables = zip(cos.shape[-2::-1], rows[: -cos.dim() : -1], strict=True)
        fits = 2 * cos.shape[-1] <= x.shape[-1] and all(a in (b, 1) for a, b in tables)
    if not fits:
        raise ShapeError(
            f"cos and sin must be [seqlen, pairs] or [batch, seqlen, pairs] with x [batch, "
            f"seqlen, heads, head_dim], found {tuple(cos.shape)} and {tuple(sin.shape)} with "
            f"{tuple(x.shape)}: pass one row for each of x, and one entry for each pair"
        )
    width = 2 * cos.shape[-1]
    with without_promotion():
        return torch.cat((rotate_rows(x[..., :width], cos, sin, interleaved), x[..., width:]), -1)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate the first 2 * pairs entries of each row by the angles of its position, in float32.

    Args:
        x: [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim] with cu_seqlens.
        cos: [positions, pairs] with 2 * pairs <= head_dim.
        sin: Like cos.
        interleaved: Entries 2 i and 2 i + 1 are a pair, rather than i and i + pairs.
        inplace: Write to x, and return it.
        seqlen_offsets: Position of the first row: an integer, or [batch].
        cu_seqlens: int32 [batch + 1], offsets of the packed sequences.
        max_seqlen: Longest packed sequence; not needed.

    Returns:
        Shape and dtype of x. Rows of no sequence are not rotated. On a GPU, rows are also not
        rotated if their position, read from a tensor, is beyond the tables; on the CPU this is an
        error.

    Raises:
        InvalidInputError: An argument does not fit x.
    """
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


@refuses_unknown_subclasses
def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotate queries and keys in place.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], or with num_heads_q
            [batch, seqlen, heads_q + 2 * heads_kv, head_dim].
        cos: [positions, pairs] with 2 * pairs <= head_dim.
        sin: Like cos.
        cos_k: Table of the keys, if it differs.
        sin_k: Like cos_k.
        interleaved: Entries 2 i and 2 i + 1 are a pair, rather than i and i + pairs.
        seqlen_offsets: Position of the first row: an integer, or [batch].
        num_heads_q: Heads of the queries.

    Returns:
        qkv.

    Raises:
        InvalidInputError: An argument does not fit qkv.
    """
    heads_q, heads_k = _heads_of(qkv, num_heads_q)
    flat = qkv[:, :, 0] if qkv.dim() == 5 else qkv
    options = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets}
    rotation = checked(flat, cos, sin, **options)  # type: ignore[arg-type]
    if cos_k is None and sin_k is None:
        return rotate_in_place(qkv, [(0, heads_q + heads_k, rotation)])
    of_keys = checked(
        flat,
        cos if cos_k is None else cos_k,
        sin if sin_k is None else sin_k,
        **options,  # type: ignore[arg-type]
    )
    return rotate_in_place(qkv, [(0, heads_q, rotation), (heads_q, heads_k, of_keys)])


def _heads_of(qkv: torch.Tensor, num_heads_q: int | None) -> tuple[int, int]:
    """The number of heads of the queries and of the keys."""
    check_strided("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv.shape[3], qkv.shape[3]
    heads_q = whole_number(num_heads_q)
    if qkv.dim() == 4 and heads_q is not None:
        others = qkv.shape[2] - heads_q
        if heads_q > 0 and others >= 0 and others % 2 == 0:
            return heads_q, others // 2
    raise ShapeError(
        "qkv must be [batch, seqlen, 3, heads, head_dim], or [batch, seqlen, num_heads_q + 2 * "
        f"heads_kv, head_dim] with num_heads_q, found {tuple(qkv.shape)} with num_heads_q="
        f"{num_heads_q}: say how many of the heads are queries"
    )


@refuses_unknown_subclasses
def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotate keys in place.

    Args:
        kv: [batch, seqlen, 2, heads, head_dim].
        cos: [positions, pairs] with 2 * pairs <= head_dim.
        sin: Like cos.
        interleaved: Entries 2 i and 2 i + 1 are a pair, rather than i and i + pairs.
        seqlen_offsets: Position of the first row: an integer, or [batch].

    Returns:
        kv.

    Raises:
        InvalidInputError: An argument does not fit kv.
    """
    check_strided("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ShapeError(
            f"kv must be [batch, seqlen, 2, heads, head_dim], found {tuple(kv.shape)}: "
            "stack keys and values with torch.stack((k, v), 2)"
        )
    rotation = checked(
        kv[:, :, 0], cos, sin, interleaved=interleaved, seqlen_offsets=seqlen_offsets
    )
    return rotate_in_place(kv, [(0, kv.shape[3], rotation)])


class ApplyRotaryEmb:
    """`apply` is apply_rotary_emb, under the name of FlashAttention's autograd function."""

    apply = staticmethod(apply_rotary_emb)


class ApplyRotaryEmbQKV_:  # noqa: N801
    """`apply` is apply_rotary_emb_qkv_, under the name of FlashAttention's autograd function."""

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:  # noqa: N801
    """`apply` is apply_rotary_emb_kv_, under the name of FlashAttention's autograd function."""

    apply = staticmethod(apply_rotary_emb_kv_)


def _even_count(dim: Any) -> int:
    # Models pass a part of the head dim: head_dim * 0.5, which is a float.
    found = int(dim) if isinstance(dim, float) and dim.is_integer() else whole_number(dim)
    if found is not None and found > 0 and found % 2 == 0:
        return cast("int", found)
    raise InvalidInputError(
        f"dim must be a positive even number of entries, found {dim!r}: "
        "pass the head dim, or the part of it to rotate"
    )


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise InvalidInputError(
        f"{name} must be a number, found {type(value).__name__}: pass a float, or leave it out"
    )


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Rotary embeddings in place, with tables that grow with the sequences.

    Args:
        dim: Entries of each row that are rotated.
        base: Base of the wavelengths: the angle of pair i grows by base ** (-2 i / dim) per row.
        interleaved: Entries 2 i and 2 i + 1 are a pair, rather than i and i + dim / 2.
        scale_base: None, or the number of rows over which xPos (Sun et al. 2022) decays by its
            factor.
        device: Device of the frequencies.
    """

    # Of the class, as modules that were pickled with FlashAttention do not have them.
    # What the tables were made of, and whether autograd may save them: not in inference mode.
    _frequencies: torch.Tensor | None = None
    _can_be_saved = False
    # The position with xPos scale 1, and whether a cache holds keys scaled with it.
    _center = 0
    _continued = False

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = _even_count(dim)
        self.base = _number("base", base)
        self.interleaved = interleaved
        self.scale_base = None if scale_base is None else _number("scale_base", scale_base)
        device = as_device(device)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        # Subclasses of FlashAttention's module use these attributes.
        self._seq_len_cached = 0
        self._cos_cached: torch.Tensor | None = None
        self._sin_cached: torch.Tensor | None = None
        self._cos_k_cached: torch.Tensor | None = None
        self._sin_k_cached: torch.Tensor | None = None

    def _even(self, device: torch.device | str | None) -> torch.Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> torch.Tensor:
        return 1.0 / self.base ** (self._even(device) / self.dim)

    def _compute_scale(self, device: torch.device | str | None = None) -> torch.Tensor:
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        """As of every module; buffers that leave the meta device get their values.

        They are in no state_dict, and to_empty gives them whatever is in memory.
        """
        without_values = self.inv_freq.is_meta
        super()._apply(fn, recurse)
        if without_values and not self.inv_freq.is_meta:
            with torch.no_grad():
                self.inv_freq.copy_(self._compute_inv_freq(self.inv_freq.device))
                if self.scale is not None:
                    self.scale.copy_(self._compute_scale(self.scale.device))
        return self

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make tables of at least `seqlen` positions, with this device and dtype.

        Angles are computed in float32: 16-bit dtypes cannot represent large positions.
        """
        if self._can_be_kept(seqlen, device, dtype):
            return
        self._seq_len_cached = seqlen
        self._frequencies = self.inv_freq
        self._can_be_saved = torch.is_grad_enabled()
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        frequencies = self.inv_freq
        if frequencies.dtype != torch.float32:
            frequencies = self._compute_inv_freq(device)
        # Not a matrix product: autocast would cast its inputs.
        angles = positions[:, None] * frequencies.to(positions.device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        if not self._continued or self._cos_k_cached is None:
            self._center = seqlen // 2
        powers = (positions - self._center) / self.scale_base
        scale = self.scale.to(positions.device, torch.float32) ** powers[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def _can_be_kept(
        self, seqlen: int, device: torch.device | None, dtype: torch.dtype | None
    ) -> bool:
        """Whether the tables are those of a call.

        Tables of another call may be fake or mapped tensors, or of frequencies that stood in for
        the module's own.
        """
        cos = self._cos_cached
        return (
            cos is not None
            and type(cos) is torch.Tensor
            and self._frequencies is self.inv_freq
            and is_known(seqlen <= self._seq_len_cached)
            and cos.device == device
            and cos.dtype == dtype
            and not cos.requires_grad
            and (self._can_be_saved or not torch.is_grad_enabled())
        )

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: int | torch.Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys in place.

        Args:
            qkv: [batch, seqlen, 3, heads, head_dim], or with num_heads_q
                [batch, seqlen, heads_q + 2 * heads_kv, head_dim]; with kv only the queries,
                [batch, seqlen, heads, head_dim].
            kv: [batch, seqlen, 2, heads, head_dim].
            seqlen_offset: Position of the first row, i.e. the number of keys in the cache. A tensor
                [batch], one position per sequence, needs max_seqlen. So does an integer in a
                tensor on a device: it is not read once there are tables.
            max_seqlen: Make tables of this many positions.
            num_heads_q: Heads of the queries, where qkv has 4 dimensions.

        Returns:
            qkv, or (qkv, kv).
        """
        check_strided("qkv", qkv)
        if qkv.dim() < 4:
            raise ShapeError(
                "qkv must have 4 or 5 dimensions, [batch, seqlen, (3,) heads, head_dim], found "
                f"{tuple(qkv.shape)}: unsqueeze what is missing"
            )
        if not isinstance(seqlen_offset, torch.Tensor) or (
            seqlen_offset.dim() == 0
            and max_seqlen is None
            # Tables are made of its value. A device is waited for only if there are none yet.
            and (self._cos_cached is None or can_be_read(seqlen_offset))
        ):
            seqlen_offset = count("seqlen_offset", seqlen_offset)
        self._continued = isinstance(seqlen_offset, torch.Tensor) or seqlen_offset != 0
        length = None if max_seqlen is None else count("max_seqlen", max_seqlen)
        if length is None and not isinstance(seqlen_offset, torch.Tensor):
            length = qkv.shape[1] + seqlen_offset
        if length is not None:
            self._update_cos_sin_cache(length, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise InvalidInputError(
                "max_seqlen must be given where seqlen_offset is a tensor, found None: pass the "
                "largest position of all sequences"
            )
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(
            qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset
        )
        of_keys = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *of_keys, self.interleaved, seqlen_offset)
