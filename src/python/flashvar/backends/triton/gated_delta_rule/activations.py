"""Computes the recurrence's gates, beta and normalized rows from loaded inputs, in float32."""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# Gates are clamped to it, so that their sums stay finite. Its exp is 0 in float32.
LOWEST_GATE: Final = tl.constexpr(-104.0)


@triton.jit
def normalised(b_x, EPS: tl.constexpr):
    """Rows divided by their norm, over the last dimension."""
    b_sum = tl.sum(b_x * b_x, len(b_x.shape) - 1, keep_dims=True)
    return b_x * tl.rsqrt(b_sum + EPS)


@triton.jit
def beta_of(b_beta, SIGMOID: tl.constexpr, SCALE: tl.constexpr):
    """beta itself, or SCALE times its sigmoid."""
    return SCALE * tl.sigmoid(b_beta) if SIGMOID else b_beta


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)), without overflow for large x and to full precision for small x."""
    b_exp = tl.exp(-tl.abs(b_x))
    b_sum = 1.0 + b_exp
    # The quotient corrects the rounding error of the sum (Kahan's log1p).
    b_same = b_sum == 1.0
    b_quotient = b_exp / tl.where(b_same, 1.0, b_sum - 1.0)
    b_log = tl.where(b_same, b_exp, tl.log(b_sum) * b_quotient)
    return tl.maximum(b_x, 0.0) + b_log


@triton.jit
def gate_of(b_g, p_a_log, p_dt_bias):
    """The gate: g itself, or computed from g with a head's A_log and dt_bias."""
    if p_a_log is not None:
        if p_dt_bias is not None:
            b_g += tl.load(p_dt_bias).to(tl.float32)
        b_g = -tl.exp(tl.load(p_a_log).to(tl.float32)) * softplus(b_g)
    return b_g


@triton.jit
def gate_backward(b_g, b_grad, p_a_log, p_dt_bias):
    """The gradients of the raw gate and, token by token, of a_log, from that of the gate."""
    b_gate = gate_of(b_g, p_a_log, p_dt_bias)
    b_grad_a_log = b_grad * b_gate
    if p_a_log is not None:
        if p_dt_bias is not None:
            b_g += tl.load(p_dt_bias).to(tl.float32)
        b_grad *= -tl.exp(tl.load(p_a_log).to(tl.float32)) * tl.sigmoid(b_g)
    # Clamped gates forget everything: results do not depend on what they were computed from.
    forgets = b_gate <= LOWEST_GATE
    return tl.where(forgets, 0.0, b_grad), tl.where(forgets, 0.0, b_grad_a_log)
