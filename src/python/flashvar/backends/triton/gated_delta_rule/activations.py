"""Computes what the recurrence reads from loaded inputs: gates and beta, in float32."""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# exp of it is 0: sums of gates stay finite.
LOWEST_GATE: Final = tl.constexpr(-104.0)


@triton.jit
def normalised(b_x, EPS: tl.constexpr):
    """Rows of length 1; the last dimension is summed over."""
    b_sum = tl.sum(b_x * b_x, len(b_x.shape) - 1, keep_dims=True)
    return b_x * tl.rsqrt(b_sum + EPS)


@triton.jit
def beta_of(b_beta, SIGMOID: tl.constexpr, SCALE: tl.constexpr):
    """beta itself, or SCALE times its sigmoid."""
    return SCALE * tl.sigmoid(b_beta) if SIGMOID else b_beta


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)), of large x without overflow and of small x with all digits."""
    b_exp = tl.exp(-tl.abs(b_x))
    b_sum = 1.0 + b_exp
    # The quotient undoes what rounding does to the sum (Kahan's log1p).
    b_same = b_sum == 1.0
    b_quotient = b_exp / tl.where(b_same, 1.0, b_sum - 1.0)
    b_log = tl.where(b_same, b_exp, tl.log(b_sum) * b_quotient)
    return tl.maximum(b_x, 0.0) + b_log


@triton.jit
def gate_of(b_g, p_a_log, p_dt_bias):
    """The gate, made of a head's parameters where there are any."""
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
    # Nothing depends on how a gate that forgets all came about.
    forgets = b_gate <= LOWEST_GATE
    return tl.where(forgets, 0.0, b_grad), tl.where(forgets, 0.0, b_grad_a_log)
