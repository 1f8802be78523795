"""`Attend`: an attention module for diffusion models, with options dropout, flash and scale.

Each call decides by its device, dtype and head dim whether flashvar computes it. So a model may
move between devices and dtypes, and its layers may differ in width.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.integrations.fallback import report_fallback
from flashvar.integrations.support import explicit_backend
from flashvar.integrations.torch.attribute import REPLACED, is_replaced_by_others
from flashvar.integrations.torch.sdpa import attend, attend_fast, why_not
from flashvar.ops.arguments import as_bool, check_scale, check_tensor, is_number
from flashvar.ops.attention.options import DEFAULT_SCALE
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.selection.request import BackendName

__all__ = ["Attend"]

# Flash attention needs Ampere, the first NVIDIA architecture with bfloat16 products.
LOWEST_CAPABILITY: Final = (8, 0)

_ON_CPU: Final = "a CPU tensor, where torch's own is faster"


class Facts(NamedTuple):
    """The facts that decide whether flashvar runs a call."""

    device: str  # "cuda", "cpu", ...
    capability: tuple[int, int] | None  # of an NVIDIA device
    explicit: bool  # whether the caller or FLASHVAR_BACKEND names a backend
    unsupported: str | None = None  # why no backend runs the dtype and head dims on the device


def decide(facts: Facts) -> str | None:
    """Why flashvar does not run a call; None if it does."""
    if facts.device == "cpu" and not facts.explicit:
        return _ON_CPU
    capability = facts.capability
    if capability is not None and capability < LOWEST_CAPABILITY and not facts.explicit:
        found, needed = (".".join(map(str, pair)) for pair in (capability, LOWEST_CAPABILITY))
        return f"a device of capability {found}, below {needed}"
    return facts.unsupported


class Attend(nn.Module):  # type: ignore[misc]
    """softmax(scale * q k^T) v of tensors [batch, heads, sequence, head_dim].

    Args:
        dropout: The probability with which an attention probability becomes 0 during training.
        flash: Compute with flashvar, or with torch's scaled_dot_product_attention if flashvar does
            not support the call. False: plain operations, which have second derivatives.
        scale: Factor of the scores; head_dim ** -0.5 by default.
        backend: As in `flashvar.attention`; a named backend also runs on the CPU and on old GPUs.
    """

    def __init__(
        self,
        dropout: float = 0.0,
        flash: bool = False,
        scale: float | None = None,
        *,
        backend: BackendName = "auto",
    ) -> None:
        super().__init__()
        if not is_number(dropout) or not 0 <= dropout <= 1:
            raise InvalidInputError(
                f"dropout must be a probability from 0 to 1, found {dropout!r}: pass 0.0 for none"
            )
        check_scale(scale, DEFAULT_SCALE)
        self.dropout = dropout
        self.flash = as_bool("flash", flash)
        self.scale = scale
        self.backend: BackendName = backend
        self._named = explicit_backend(backend) != "auto"

    def extra_repr(self) -> str:
        """The arguments, for print(module)."""
        return f"dropout={self.dropout}, flash={self.flash}, scale={self.scale}"

    def why_not(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Why flashvar does not run the call; None if it does."""
        _check(q, k, v)
        if not self.flash:
            return "flash=False"
        if is_replaced_by_others():
            return REPLACED
        refused = _refused(q.device, self._named)
        if refused is not None:
            return refused
        dropout = self.dropout if self.training else 0.0
        return why_not(q, k, v, None, dropout, False, self.scale, True, "bhsd", self.backend)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q on k and v.

        As scaled_dot_product_attention, it casts under autocast, and copies tensors whose last
        dimension is not contiguous.

        Args:
            q: [batch, heads, seqlen_q, head_dim], of any floating dtype.
            k: [batch, heads, seqlen_k, head_dim], dtype and device of q.
            v: [batch, heads, seqlen_k, head_dim_v], likewise.

        Returns:
            [batch, heads, seqlen_q, head_dim_v].

        Raises:
            InvalidInputError: q, k or v is not a tensor.
            BackendUnavailableError: FLASHVAR_STRICT=1, and flashvar does not support the call.
        """
        _check(q, k, v)
        dropout = self.dropout if self.training else 0.0
        if not self.flash:
            return _written_out(q, k, v, self.scale, dropout)
        if (
            dropout == 0.0
            and not is_replaced_by_others()
            and _refused(q.device, self._named) is None
        ):
            out = attend_fast(q, k, v, False, self.scale, self.backend)
            if out is not None:
                return out
        reason = self.why_not(q, k, v)
        if reason is None:
            return attend(q, k, v, None, dropout, False, self.scale, "bhsd", self.backend)
        if reason is not _ON_CPU and not is_compiling():
            report_fallback("Attend", reason, "torch's scaled_dot_product_attention")
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scale)


_kept: dict[tuple[torch.device, bool], str | None] = {}


def _refused(device: torch.device, named: bool) -> str | None:
    """The reason that depends only on the device, cached."""
    key = (device, named)
    if key not in _kept:
        capability = None
        if device.type == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
        _kept[key] = decide(Facts(device.type, capability, named))
    return _kept[key]


# torch.compile calls the function at trace time and treats the result as a constant.
_refused._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check(q: object, k: object, v: object) -> None:
    """Refuse arguments that are not tensors; torch's functions check everything else."""
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, tensor)


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, dropout: float
) -> torch.Tensor:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() < 2:
            raise ShapeError(
                f"{name} must have 4 dimensions (batch, heads, sequence, head_dim), found "
                f"{tensor.dim()}: add the missing ones with unsqueeze()"
            )
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.softmax(dim=-1)
    return functional.dropout(weights, dropout) @ v if dropout else weights @ v
