"""Pads q and k with zeros where they are narrower than tl.dot takes; results stay the same."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from flashvar.ops.gated_delta_rule.problem import Gradients, Inputs

# tl.dot takes so many columns at least.
LEAST: Final = 16


def inputs(given: Inputs) -> Inputs:
    """The same call with q and k of LEAST columns."""
    columns = LEAST - given.head_dim
    return given._replace(q=pad(given.q, (0, columns)), k=pad(given.k, (0, columns)))


def state(given: torch.Tensor | None) -> torch.Tensor | None:
    """[..., K, V] with LEAST rows."""
    return None if given is None else pad(given, (0, 0, 0, LEAST - given.shape[-2]))


def gradients(found: Gradients, head_dim: int) -> Gradients:
    """Those of the columns and rows that the call has."""
    before = found.initial_state
    return found._replace(
        q=found.q[..., :head_dim].contiguous(),
        k=found.k[..., :head_dim].contiguous(),
        initial_state=None if before is None else before[..., :head_dim, :].contiguous(),
    )
