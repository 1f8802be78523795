"""Pads the head dim of q, k and states with zeros to the smallest that tl.dot supports.

Results stay the same.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from flashvar.ops.gated_delta_rule.problem import Gradients, Inputs

MIN_HEAD_DIM: Final = 16


def inputs(given: Inputs) -> Inputs:
    """The call with q and k padded to MIN_HEAD_DIM columns."""
    columns = MIN_HEAD_DIM - given.head_dim
    return given._replace(q=pad(given.q, (0, columns)), k=pad(given.k, (0, columns)))


def state(given: torch.Tensor | None) -> torch.Tensor | None:
    """A state [..., K, V] padded to MIN_HEAD_DIM rows."""
    return None if given is None else pad(given, (0, 0, 0, MIN_HEAD_DIM - given.shape[-2]))


def gradients(found: Gradients, head_dim: int) -> Gradients:
    """The gradients without those of the padding."""
    before = found.initial_state
    return found._replace(
        q=found.q[..., :head_dim].contiguous(),
        k=found.k[..., :head_dim].contiguous(),
        initial_state=None if before is None else before[..., :head_dim, :].contiguous(),
    )
