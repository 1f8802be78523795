"""The rules by which torch's DTensor shards attention.

Sequences of a batch know nothing of each other, nor do heads, so q, k and v may be sharded over
either: the parts are computed where they lie. What lies otherwise (over the sequence, or so that
the heads of q and their heads of k come apart) is gathered first, as DTensor does for every op. So
is a call with dropout, whose mask counts batch and heads from the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.attention.problem import Inputs, Options

_DTENSORS: Final = "torch.distributed.tensor"
_TENSORS: Final = len(Inputs._fields)
# grad_out, grad_lse, out, lse and wants_bias.
_BEFORE: Final = 5

_taught: list[bool] = []


class Way(NamedTuple):
    """Where everything lies in one way to compute a call."""

    inputs: Inputs  # placements, None where there is no tensor
    out: Any
    lse: Any
    grad_bias: Any


def teach_dtensor() -> None:
    """Make the rules known to DTensor, once it is there."""
    if _DTENSORS not in sys.modules or _taught:
        return
    _taught.append(True)
    register: Any = import_module(f"{_DTENSORS}.experimental").register_sharding
    ops = torch.ops.flashvar
    register(ops.attention_fwd.default)(_forward)
    register(ops.attention_bwd.default)(_backward)


# torch.compile calls it while it traces.
teach_dtensor._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_mixture(inputs: Inputs) -> None:
    """Refuse DTensors beside plain tensors, of which nobody knows whose part they are."""
    module = sys.modules.get(_DTENSORS)
    if module is None:
        return
    found = {
        name: isinstance(tensor, module.DTensor)
        for name, tensor in inputs._asdict().items()
        if tensor is not None
    }
    if len(set(found.values())) > 1:
        plain = ", ".join(name for name, is_dtensor in found.items() if not is_dtensor)
        raise InvalidInputError(
            f"attention takes DTensors alone or none, got DTensors beside the plain {plain}: "
            "distribute_tensor() them too, Replicate() where every rank has the whole"
        )


def _forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    options = [None] * len(Options._fields)
    return [([way.out, way.lse], [*way.inputs, *options]) for way in _ways(arguments)]


def _backward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    grad_out, grad_lse, wants_bias = arguments[0], arguments[1], arguments[_BEFORE - 1]
    options = [None] * len(Options._fields)
    found = []
    for way in _ways(arguments[_BEFORE:]):
        of_out = None if grad_out is None else way.out
        of_lse = None if grad_lse is None else way.lse
        grad_bias = way.grad_bias if wants_bias else _replicate()
        grads = [*way.inputs[:3], grad_bias]
        found.append((grads, [of_out, of_lse, way.out, way.lse, None, *way.inputs, *options]))
    return found


def _ways(arguments: tuple[Any, ...]) -> list[Way]:
    """All ways to compute a call of these specs and options."""
    given, options = Inputs._make(arguments[:_TENSORS]), Options._make(arguments[_TENSORS:])
    whole = _replicate()
    ways = [_way(given, lambda name, spec: whole, whole, whole, whole)]
    if options.dropout_p == 0:
        packed = given.cu_seqlens_q is not None or given.cu_seqlens_k is not None
        heads = 1 if packed or options.layout != "bshd" else 2
        heads_out = 1 if packed or options.layout == "bhsd" else 2
        heads_q, heads_kv = given.q.shape[heads], given.k.shape[heads]
        if heads_q == heads_kv or heads_kv % given.q.mesh.size() == 0:
            ways.append(_by_heads(given, heads, heads_out, 0 if packed else 1))
        if not packed:
            ways.append(_by_batch(given))
    return ways


def _by_heads(given: Inputs, heads: int, heads_out: int, heads_lse: int) -> Way:
    """Each part has its heads of q, and those of k and v that they read."""

    def place(name: str, spec: Any) -> Any:
        if name in ("q", "k", "v"):
            return _shard(heads)
        if name == "bias":
            return _shard(1) if spec.shape[1] > 1 else _replicate()
        return _shard(len(spec.shape) - 1) if name == "alibi_slopes" else _replicate()

    own_bias = given.bias is not None and given.bias.shape[1] > 1
    grad_bias = _shard(1) if own_bias else _partial()
    return _way(given, place, _shard(heads_out), _shard(heads_lse), grad_bias)


def _by_batch(given: Inputs) -> Way:
    """Each part has its sequences."""

    def place(name: str, spec: Any) -> Any:
        one_bias = name == "bias" and spec.shape[0] == 1
        one_slope = name == "alibi_slopes" and len(spec.shape) == 1
        return _replicate() if one_bias or one_slope or name == "rng_state" else _shard(0)

    own_bias = given.bias is not None and given.bias.shape[0] > 1
    return _way(given, place, _shard(0), _shard(0), _shard(0) if own_bias else _partial())


def _way(
    given: Inputs, place: Callable[[str, Any], Any], out: Any, lse: Any, grad_bias: Any
) -> Way:
    fields = given._asdict().items()
    made = (None if spec is None else place(name, spec) for name, spec in fields)
    return Way(Inputs._make(made), out, lse, grad_bias)


def _shard(dim: int) -> Any:
    return import_module(_DTENSORS).Shard(dim)


def _replicate() -> Any:
    return import_module(_DTENSORS).Replicate()


def _partial() -> Any:
    return import_module(_DTENSORS).Partial()
