"""The types that describe a call of gated_delta_rule to backends.

Each head has a state S [K, V]. For each token of a sequence, in order,

    S = exp(g) * S
    S = S + outer(k, beta * (v - S^T k))
    out = scale * S^T q

Heads of v are `group` times as many as those of q and k: head h of v goes with head h // group.
Before that, where the options say so:

    q, k = q / sqrt(sum(q^2) + 1e-6), k / sqrt(sum(k^2) + 1e-6)   qk_l2norm
    beta = sigmoid(beta), times 2 with allow_neg_eigval             beta_sigmoid
    g    = -exp(a_log) * softplus(g + dt_bias)                      where a_log is given
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

L2NORM_EPS: Final = 1e-6


class Inputs(NamedTuple):
    """The tensors and options of a call, without its states."""

    q: torch.Tensor  # [batch, seqlen, qk_heads, K]
    k: torch.Tensor  # like q
    v: torch.Tensor  # [batch, seqlen, heads, V]
    g: torch.Tensor | None  # [batch, seqlen, heads], natural log, at most 0; None: zeros
    beta: torch.Tensor  # [batch, seqlen, heads]
    a_log: torch.Tensor | None  # [heads]; None: g is the gate itself
    dt_bias: torch.Tensor | None  # [heads], only beside a_log; None: zeros
    cu_seqlens: torch.Tensor | None  # [sequences + 1] integers, batch is 1; None: one per batch
    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    allow_neg_eigval: bool

    @property
    def head_dim(self) -> int:
        """K, the axis of the op's kernels."""
        head_dim: int = self.q.shape[3]
        return head_dim

    @property
    def heads(self) -> int:
        """Heads of v, the gates and the states."""
        heads: int = self.v.shape[2]
        return heads

    @property
    def group(self) -> int:
        """Heads of v for each head of q and k."""
        group: int = self.v.shape[2] // max(self.q.shape[2], 1)
        return group

    @property
    def sequences(self) -> int:
        """How many sequences there are, each with a state."""
        cu_seqlens = self.cu_seqlens
        count: int = self.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return count


# `Inputs._make`, three times as fast.
make_inputs: Final[Callable[[tuple[Any, ...]], Inputs]] = partial(tuple.__new__, Inputs)


class Gradients(NamedTuple):
    """Gradients of the inputs, each of the shape and dtype of its input; None for absent inputs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


# The tensors of a call in the order of the schemas, then states and indices.
Given: TypeAlias = "tuple[torch.Tensor | None, ...]"


class Launch(Protocol):
    """Computes calls of one kind: their shapes, strides, dtypes and options are equal."""

    def __call__(self, given: Given, out: torch.Tensor, final_state: torch.Tensor | None) -> None:
        """Write out, and the states after each sequence; with indices the states are a pool."""
        ...


class BackwardLaunch(Protocol):
    """Computes backwards of one kind."""

    def __call__(self, tensors: Given) -> Sequence[torch.Tensor | None]:
        """The fields of Gradients, of tensors in the order of the schema of the backward.

        An absent gradient of a result counts as zeros.
        """
        ...


class Backend(Protocol):
    """The functions of a backend module. States are views [sequences, heads, K, V] of any strides.

    Binaries have prepare_forward, prepare_update and prepare_backward instead. They take the chosen
    candidate and a call, and return a launch of such calls. It may be called without a final state,
    and in prepare_update indices may be None too.
    """

    def forward(
        self,
        inputs: Inputs,
        initial_state: torch.Tensor | None,
        out: torch.Tensor,
        final_state: torch.Tensor,
    ) -> None:
        """Write out [batch, seqlen, heads, V], and the state after each sequence."""
        ...

    def update(
        self, inputs: Inputs, pool: torch.Tensor, indices: torch.Tensor, out: torch.Tensor
    ) -> None:
        """As forward, on states pool[indices] in place; a negative index: zeros, not written."""
        ...

    def backward(
        self,
        inputs: Inputs,
        initial_state: torch.Tensor | None,
        grad_out: torch.Tensor | None,
        grad_final_state: torch.Tensor | None,
    ) -> Gradients:
        """The gradients of all inputs; an absent gradient of a result counts as zeros."""
        ...
