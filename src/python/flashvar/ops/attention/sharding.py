"""Sharding rules of attention for torch's DTensor.

The sequences of a batch are independent, and so are heads. Tensors that are sharded over either are
computed where they are. With any other placement (sharded over the sequence, or with a query head
on another rank than its key head) DTensor gathers the tensors first, as for every op. The same
holds for calls with dropout, whose mask depends on the global indices of batch and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from flashvar.ops.attention.problem import Inputs, Options
from flashvar.ops.sharding import groups_stay_together, partial, register, replicate, shard

_TENSORS: Final = len(Inputs._fields)
# grad_out, grad_lse, out, lse, wants_bias and wants_sinks.
_BEFORE: Final = 6


class Strategy(NamedTuple):
    """One sharding strategy: the placement of every tensor of a call."""

    inputs: Inputs  # placements, None where there is no tensor
    out: Any
    lse: Any
    grad_bias: Any
    grad_sinks: Any


def register_sharding_rules() -> None:
    """Register the rules with DTensor, once it is imported."""
    ops = torch.ops.flashvar
    register({ops.attention_fwd.default: _forward, ops.attention_bwd.default: _backward})


# torch.compile calls the function at trace time, instead of tracing it.
register_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    options = [None] * len(Options._fields)
    return [
        ([strategy.out, strategy.lse], [*strategy.inputs, *options])
        for strategy in _strategies(arguments)
    ]


def _backward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    grad_out, grad_lse, _, _, wants_bias, wants_sinks = arguments[:_BEFORE]
    options = [None] * len(Options._fields)
    found = []
    for strategy in _strategies(arguments[_BEFORE:]):
        of_out = None if grad_out is None else strategy.out
        of_lse = None if grad_lse is None else strategy.lse
        grad_bias = strategy.grad_bias if wants_bias else replicate()
        grad_sinks = strategy.grad_sinks if wants_sinks else replicate()
        grads = [*strategy.inputs[:3], grad_bias, grad_sinks]
        given = [of_out, of_lse, strategy.out, strategy.lse, None, None]
        found.append((grads, [*given, *strategy.inputs, *options]))
    return found


def _strategies(arguments: tuple[Any, ...]) -> list[Strategy]:
    """All sharding strategies of a call with these specs and options."""
    given, options = Inputs._make(arguments[:_TENSORS]), Options._make(arguments[_TENSORS:])
    replicated = replicate()
    strategies = [_strategy(given, lambda name, spec: replicated, *[replicated] * 4)]
    if options.dropout_p == 0:
        packed = given.cu_seqlens_q is not None
        of_q = 1 if packed or options.layout != "bshd" else 2
        of_keys = 1 if given.cu_seqlens_k is not None or options.layout != "bshd" else 2
        of_out = 1 if packed or options.layout == "bhsd" else 2
        heads_q, heads_kv = given.q.shape[of_q], given.k.shape[of_keys]
        group = heads_q // heads_kv if heads_kv else 1
        if groups_stay_together(heads_kv, group, given.q.mesh):
            strategies.append(_by_heads(given, of_q, of_keys, of_out, 0 if packed else 1))
        if not packed:
            strategies.append(_by_batch(given))
    return strategies


def _by_heads(given: Inputs, of_q: int, of_keys: int, of_out: int, of_lse: int) -> Strategy:
    """Each rank has some heads of q, and the heads of k and v that they read.

    The numbers are the dimensions of the heads. Packed queries may come with keys that are not.
    """

    def placement(name: str, spec: Any) -> Any:
        if name in ("q", "k", "v"):
            return shard(of_q if name == "q" else of_keys)
        if name == "bias":
            return shard(1) if spec.shape[1] > 1 else replicate()
        if name == "sinks":
            return shard(0)
        return shard(len(spec.shape) - 1) if name == "alibi_slopes" else replicate()

    bias_has_dim = given.bias is not None and given.bias.shape[1] > 1
    grad_bias = shard(1) if bias_has_dim else partial()
    return _strategy(given, placement, shard(of_out), shard(of_lse), grad_bias, shard(0))


def _by_batch(given: Inputs) -> Strategy:
    """Each rank has some sequences of the batch."""

    def placement(name: str, spec: Any) -> Any:
        one_bias = name == "bias" and spec.shape[0] == 1
        one_slope = name == "alibi_slopes" and len(spec.shape) == 1
        shared = one_bias or one_slope or name in ("sinks", "rng_state")
        return replicate() if shared else shard(0)

    bias_has_dim = given.bias is not None and given.bias.shape[0] > 1
    return _strategy(
        given,
        placement,
        shard(0),
        shard(0),
        shard(0) if bias_has_dim else partial(),
        partial(),
    )


def _strategy(
    given: Inputs,
    placement: Callable[[str, Any], Any],
    out: Any,
    lse: Any,
    grad_bias: Any,
    grad_sinks: Any,
) -> Strategy:
    fields = given._asdict().items()
    made = (None if spec is None else placement(name, spec) for name, spec in fields)
    return Strategy(Inputs._make(made), out, lse, grad_bias, grad_sinks)
