"""Gradients of gates so strong that nothing of earlier tokens is left."""

from __future__ import annotations

import pytest
import torch

from flashvar.ops.gated_delta_rule.api import gated_delta_rule


@pytest.mark.parametrize("seqlen", [64, 75, 128])
@pytest.mark.parametrize("strength", [40.0, 12.0], ids="gates of -{:.0f}".format)
def test_they_are_as_small_as_the_gates_say(strength: float, seqlen: int) -> None:
    """Not the rounding of the much larger terms whose difference they are."""
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, seqlen, 3, 32), dim=-1).unbind()
    v, beta = torch.randn(2, seqlen, 3, 32), torch.rand(2, seqlen, 3)
    g = -strength * (0.5 + torch.rand(2, seqlen, 3))
    state, weights = torch.randn(2, 3, 32, 32), torch.randn(2, seqlen, 3, 32)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        wide = [x.to(dtype) for x in (q, k, v, g, beta)]
        wide[3].requires_grad_()
        first = state.to(dtype)
        out, final = gated_delta_rule(
            *wide, scale=1.0, initial_state=first, return_final_state=True
        )
        loss = (out * weights.to(dtype)).sum() + (final * first).sum()
        return torch.autograd.grad(loss, wide[3])[0].double()

    wanted = gradient(torch.float64)
    error = (gradient(torch.float32) - wanted).abs().max()
    assert error <= 1e-5 * wanted.abs().max() + 1e-10
