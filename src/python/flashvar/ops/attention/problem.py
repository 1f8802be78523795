"""The types that describe a call of attention: inputs, options, problem, gradients and launches.

Backends read sizes and strides only from `Problem`, always in the order batch, sequence, heads,
independent of the user's layout. The semantics, for query i and key j of one sequence, where
d(i) = i + seqlen_k - seqlen_q is the diagonal key of query i:

    s = scale * (q . k);  s = softcap * tanh(s / softcap);  s += bias - slope * |d(i) - j|
    visible: d(i) - window_left <= j <= d(i) + window_right
    p = exp(s) / (sum(exp(s)) + exp(sink));  out = dropout(p) v;  lse = log(sum(exp(s)) + exp(sink))

Without sinks, exp(sink) is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from flashvar.ops.arguments import as_integer

if TYPE_CHECKING:
    from flashvar.selection.candidates import CandidateResult


class Inputs(NamedTuple):
    """The tensors of a call, q, k and v in the user's layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None  # [batch or 1, heads_q or 1, seqlen_q, seqlen_k]
    sinks: torch.Tensor | None = None  # [heads_q]
    alibi_slopes: torch.Tensor | None = None  # float32 [heads_q] or [batch, heads_q]
    rng_state: torch.Tensor | None = None  # int64 [2]: seed and offset of the dropout mask
    cu_seqlens_q: torch.Tensor | None = None  # [batch + 1], int32 in launches, else also int64
    cu_seqlens_k: torch.Tensor | None = None  # the same
    seqused_k: torch.Tensor | None = None  # [batch], the same


# `Inputs._make`, three times as fast.
make_inputs: Final[Callable[[tuple[torch.Tensor | None, ...]], Inputs]] = partial(
    tuple.__new__, Inputs
)


class Options(NamedTuple):
    """The arguments of a call other than its tensors; hashable."""

    causal: bool = False
    scale: float | None = None  # None: head_dim ** -0.5
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    layout: str = "bshd"
    backend: str = "auto"
    max_seqlen_q: int | None = None  # upper bounds of packed sequences; None: the total
    max_seqlen_k: int | None = None


def pack_options(
    causal: object,
    scale: object,
    window_left: object,
    window_right: object,
    softcap: object,
    dropout_p: object,
    deterministic: object,
    layout: object,
    backend: object,
    max_seqlen_q: object = None,
    max_seqlen_k: object = None,
    /,
) -> tuple[Any, ...]:
    """The fields of Options in order, unchecked; a plain tuple is made in a quarter of the time.

    Integers of other types are read here: plans are kept by these fields, and a tensor's hash does
    not change with its value.
    """
    if type(window_left) is not int or type(window_right) is not int:
        window_left, window_right = as_integer(window_left), as_integer(window_right)
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        max_seqlen_q = as_integer(max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        max_seqlen_k = as_integer(max_seqlen_k)
    return (
        causal,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
        deterministic,
        layout,
        backend,
        max_seqlen_q,
        max_seqlen_k,
    )


OptionalTensors = tuple[torch.Tensor | None, ...]
NO_TENSORS: Final[OptionalTensors] = (None,) * (len(Inputs._fields) - 3)


def inputs_of(given: tuple[torch.Tensor | None, ...]) -> Inputs:
    """The inputs of a call; `given` are their fields, or q, k and v alone."""
    return make_inputs(given if len(given) > 3 else given + NO_TENSORS)


def pack_tensors(
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> OptionalTensors:
    """The fields of Inputs after q, k and v, in order."""
    return (bias, sinks, alibi_slopes, rng_state, cu_seqlens_q, cu_seqlens_k, seqused_k)


class Gradients(NamedTuple):
    """The outputs of a backward, each in the shape and layout of its input."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None  # float32, zeros at the call; None: not wanted
    sinks: torch.Tensor | None = None  # not by a launch, which writes delta instead


# `Gradients._make`, three times as fast.
make_gradients: Final[Callable[[tuple[torch.Tensor | None, ...]], Gradients]] = partial(
    tuple.__new__, Gradients
)


class Wanted(NamedTuple):
    """Which optional gradients a backward computes."""

    bias: bool = False
    sinks: bool = False


class Strides(NamedTuple):
    """Strides in elements; that of the head dim is 1. Packed tensors have batch stride 0."""

    batch: int
    sequence: int
    heads: int


class BiasStrides(NamedTuple):
    """Strides in elements, 0 where broadcast; that of the keys is 1."""

    batch: int
    heads: int
    query: int


@dataclass(frozen=True)
class Problem:
    """One call of attention without its data.

    The output is contiguous, of shape `out_shape`: [batch, seqlen_q, heads_q, head_dim_v] in the
    order `layout_out`.
    """

    dtype: str
    device: int | None  # CUDA ordinal; None is the CPU
    layout: str  # of q, k and v: "bshd" or "bhsd"; packed tensors are [total, heads, head_dim]
    layout_out: str  # of out
    scale: float
    window_left: int  # keys before the diagonal that a query sees; -1: all
    window_right: int  # keys after the diagonal; -1: all, 0: causal
    softcap: float  # 0: none
    dropout_p: float
    deterministic: bool
    batch: int
    seqlen_q: int  # of every sequence; an upper bound where sequences are packed
    seqlen_k: int
    total_q: int | None  # rows of packed queries; None: dense
    total_k: int | None
    has_seqused_k: bool
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    out_shape: tuple[int, ...]
    bias: BiasStrides | None
    bias_dtype: str | None  # that of q, or "fp32"
    alibi_batch_stride: int | None  # 0: the same slopes for the whole batch; None: no slopes
    sinks_dtype: str | None  # None: no sinks

    @property
    def empty(self) -> bool:
        """Whether no query sees any key: outputs and gradients of q, k and v are 0."""
        queries = self.seqlen_q if self.total_q is None else self.total_q
        keys = self.seqlen_k if self.total_k is None else self.total_k
        return 0 in (self.batch, queries, keys)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """[batch, heads_q, seqlen_q] in either layout; [heads_q, total_q] where packed."""
        if self.total_q is not None:
            return (self.heads_q, self.total_q)
        return (self.batch, self.heads_q, self.seqlen_q)

    @property
    def lse_dtype(self) -> torch.dtype:
        """Float32; float64 where the inputs are float64."""
        return torch.float64 if self.dtype == "fp64" else torch.float32


@dataclass(frozen=True)
class BackwardProblem:
    """A backward: the forward's problem, and the strides of its gradients."""

    forward: Problem
    grad_out: Strides
    grad_q: Strides
    grad_k: Strides
    grad_v: Strides
    grad_bias: BiasStrides | None  # None: not wanted


class Launch(Protocol):
    """Writes attention of one problem into `out` and, unless it is None, `lse`."""

    def __call__(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Enqueue and return; tensors come in the user's layout."""
        ...


class BackwardLaunch(Protocol):
    """Writes every element of the gradients of q, k and v, and adds to the gradient of the bias.

    Where `delta` is given, it is like lse, and is written: rowsum(grad_out o out) - grad_lse. Rows
    with lse -inf may be left as they are.
    """

    def __call__(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
        delta: torch.Tensor | None = None,
    ) -> None:
        """Enqueue and return; tensors come in the user's layout."""
        ...


class Backend(Protocol):
    """The functions that a backend's attention module has."""

    def prepare_forward(self, problem: Problem, chosen: CandidateResult) -> Launch:
        """Make the launch of a problem that is not empty."""
        ...

    def prepare_backward(self, problem: BackwardProblem, chosen: CandidateResult) -> BackwardLaunch:
        """Make the launch of a backward that is not empty."""
        ...
