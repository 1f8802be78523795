"""Inputs of gated_delta_rule on a device, and its results beside the recurrence in float64."""

from __future__ import annotations

from typing import Any

import torch
from device_call import DEVICE

from flashvar.ops.gated_delta_rule.api import gated_delta_rule

# Relative errors, root mean square; float32's are of sums that cancel in part.
LIMITS = {
    **dict.fromkeys(("out", "final"), 5e-3),
    **dict.fromkeys(("q", "k", "v", "initial_state"), 8e-3),
    **dict.fromkeys(("g", "beta", "A_log", "dt_bias"), 2e-2),
}
SMALLER = {torch.bfloat16: 1.0, torch.float16: 0.5, torch.float32: 0.05}
PACKED = [(0, 100, 1, 0, 640, 65, 0), (3, 0, 2), (1,) * 50, (64, 64), (0, 0)]
GATES = (0.0, -1e-4, -2.5, -20.0, -torch.inf)


def made(
    seqlen: int = 300,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    packed: tuple[int, ...] | None = None,
    batch: int = 2,
    fused: bool = True,
) -> dict[str, Any]:
    """Inputs: raw ones where everything is fused, else keys of length 1 and gates to -1."""
    batch, rows = (batch, seqlen) if packed is None else (1, sum(packed))
    count = batch if packed is None else len(packed)
    few, many = heads
    given: dict[str, Any] = {
        "q": torch.randn(batch, rows, few, dims[0], device=DEVICE).to(dtype),
        "k": torch.randn(batch, rows, few, dims[0], device=DEVICE),
        "v": torch.randn(batch, rows, many, dims[1], device=DEVICE).to(dtype),
        "g": torch.randn(batch, rows, many, device=DEVICE),
        "beta": torch.randn(batch, rows, many, device=DEVICE),
        "initial_state": torch.randn(count, many, *dims, device=DEVICE),
    }
    if fused:
        given.update(qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True)
        given["A_log"] = torch.randn(many, device=DEVICE)
        given["dt_bias"] = torch.randn(many, device=DEVICE)
    else:
        given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
        given["beta"] = 2 * given["beta"].sigmoid()
        given["g"] = -torch.rand_like(given["g"])
    given["k"] = given["k"].to(dtype)
    if packed is not None:
        given["cu_seqlens"] = torch.tensor([0, *packed], device=DEVICE).cumsum(0).int()
    return given


def of_backend(given: dict[str, Any], backend: str, wide: bool) -> dict[str, torch.Tensor]:
    """Results, and the gradients of all inputs for one gradient of the results."""
    leaves = {
        name: (x.double() if wide else x.detach().clone()).requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    out, final = gated_delta_rule(**{**given, **leaves}, return_final_state=True, backend=backend)
    assert final is not None
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = [torch.randn(x.shape, device=DEVICE, generator=generator) for x in (out, final)]
    weights[0] = weights[0].to(given["q"].dtype)
    grads = torch.autograd.grad(
        (out, final),
        list(leaves.values()),
        [w.to(x.dtype) for w, x in zip(weights, (out, final), strict=True)],
    )
    return {"out": out.detach(), "final": final.detach(), **dict(zip(leaves, grads, strict=True))}


def compared(given: dict[str, Any], backend: str = "triton", **factors: float) -> None:
    """Every result and every gradient within its limit, times a factor where one is given.

    Gradients of a root mean square below 1e-4, beside others of about 1, are rounding. Those of
    A_log and dt_bias are sums over tokens whose terms may cancel: errors are relative to the terms.
    """
    found = of_backend(given, backend, wide=False)
    expected = of_backend(given, "reference", wide=True)
    errors = {}
    for name, limit in LIMITS.items():
        if name not in expected or not expected[name].numel():
            continue
        one, other = found[name].double(), expected[name]
        assert torch.isfinite(one).all(), f"{name} is not finite"
        size = other.norm().clamp(min=1e-4 * other.numel() ** 0.5)
        if name in ("A_log", "dt_bias"):
            size = size.clamp(min=float(expected["g"].norm()))
        error = float((one - other).norm() / size)
        # Few numbers, or sums of few terms, spread wider. Rows of no sequence are 0 and none.
        numbers = int(other.count_nonzero())
        few = numbers < 512 or given["q"].shape[3] < 32
        wider = 3 if numbers < 64 else 1.5 if few else 1
        if error > limit * SMALLER[given["q"].dtype] * wider * factors.get(name, 1.0):
            errors[name] = error
    assert not errors


def with_small_betas(given: dict[str, Any], small: float) -> dict[str, Any]:
    """Half of the betas are small; the gradient of a beta does not depend on it."""
    large = torch.randint(2, given["beta"].shape, device=DEVICE).bool()
    given["beta"] = torch.where(large, given["beta"], small)
    return given
