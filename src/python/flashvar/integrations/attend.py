"""`Attend`: attention as diffusion code writes it, a module of dropout, flash or not, and a scale.

Who computes is decided at every call, by the device, the dtype and the head dim of that call: one
model may move between devices and dtypes, and one of its layers may be wider than another.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.integrations.fallback import decline
from flashvar.integrations.serving import named
from flashvar.integrations.torch.attribute import REPLACED, is_replaced_by_others
from flashvar.integrations.torch.sdpa import attend, attend_at_once
from flashvar.integrations.torch.sdpa import why_not as why_not_served
from flashvar.ops.attention.api import BackendName
from flashvar.ops.attention.options import as_bool, is_number
from flashvar.ops.attention.validate import check_tensor
from flashvar.ops.dispatch_modes import is_compiling

__all__ = ["LOWEST_CAPABILITY", "Attend", "Facts", "decide"]

# Flash attention begins with Ampere; of NVIDIA devices the first that multiplies bfloat16.
LOWEST_CAPABILITY: Final = (8, 0)

_ON_CPU: Final = "a CPU tensor, where torch's own is faster"


class Facts(NamedTuple):
    """What decides who computes a call."""

    device: str  # "cuda", "cpu", ...
    capability: tuple[int, int] | None  # of an NVIDIA device
    named: bool  # whether somebody insists on a backend of flashvar
    unserved: str | None = None  # why flashvar does not serve such dtypes and head dims there


def decide(facts: Facts) -> str | None:
    """Why a call is not flashvar's, None where it is."""
    if facts.device == "cpu" and not facts.named:
        return _ON_CPU
    capability = facts.capability
    if capability is not None and capability < LOWEST_CAPABILITY and not facts.named:
        found, needed = (".".join(map(str, pair)) for pair in (capability, LOWEST_CAPABILITY))
        return f"a device of capability {found}, below {needed}"
    return facts.unserved


class Attend(nn.Module):  # type: ignore[misc]
    """softmax(scale * q k^T) v of tensors [batch, heads, sequence, head_dim].

    Args:
        dropout: Probability that a weight becomes 0 while the module trains.
        flash: Let flashvar compute what it serves, and torch's scaled_dot_product_attention the
            rest. False: plain operations, which have second derivatives.
        scale: Factor of the scores; head_dim ** -0.5 by default.
        backend: As in `flashvar.attention`; a named one is taken on the CPU and on old devices too.
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
                f"dropout must be a probability from 0 to 1, got {dropout!r}: pass 0.0 for none"
            )
        if scale is not None and not is_number(scale):
            raise InvalidInputError(
                f"scale must be a number, got {scale!r}: leave it out for head_dim**-0.5"
            )
        self.dropout = dropout
        self.flash = as_bool("flash", flash)
        self.scale = scale
        self.backend: BackendName = backend
        self._named = named(backend) != "auto"

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"dropout={self.dropout}, flash={self.flash}, scale={self.scale}"

    def why_not(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Why flashvar does not compute this call, None where it does."""
        _check(q, k, v)
        if not self.flash:
            return "flash=False"
        if is_replaced_by_others():
            return REPLACED
        refused = _refused(q.device, self._named)
        if refused is not None:
            return refused
        dropout = self.dropout if self.training else 0.0
        return why_not_served(q, k, v, None, dropout, False, True, "bhsd", self.backend)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q on k and v.

        As scaled_dot_product_attention, it casts what autocast lowers, and copies where rows are
        not contiguous.

        Args:
            q: [batch, heads, seqlen_q, head_dim], of any floating dtype.
            k: [batch, heads, seqlen_k, head_dim], dtype and device of q.
            v: [batch, heads, seqlen_k, head_dim_v], likewise.

        Returns:
            [batch, heads, seqlen_q, head_dim_v].

        Raises:
            InvalidInputError: one of them is no tensor.
            BackendUnavailableError: FLASHVAR_STRICT=1, and flashvar does not serve the call.
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
            out = attend_at_once(q, k, v, False, self.scale, self.backend)
            if out is not None:
                return out
        reason = self.why_not(q, k, v)
        if reason is None:
            return attend(q, k, v, None, dropout, False, self.scale, "bhsd", self.backend)
        if reason is not _ON_CPU and not is_compiling():
            decline("Attend", reason, "torch's scaled_dot_product_attention")
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scale)


_kept: dict[tuple[torch.device, bool], str | None] = {}


def _refused(device: torch.device, named: bool) -> str | None:
    """What is decided of a device alone."""
    key = (device, named)
    if key not in _kept:
        capability = None
        if device.type == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
        _kept[key] = decide(Facts(device.type, capability, named))
    return _kept[key]


# torch.compile asks while it traces, and keeps the answer.
_refused._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check(q: object, k: object, v: object) -> None:
    """Torch's own functions judge tensors, and take nothing else."""
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
                f"{name} must have 4 dimensions (batch, heads, sequence, head_dim), got "
                f"{tensor.dim()}: add the missing ones with unsqueeze()"
            )
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.softmax(dim=-1)
    return functional.dropout(weights, dropout) @ v if dropout else weights @ v
