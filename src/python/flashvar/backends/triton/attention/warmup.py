"""Compiles the Triton kernels of a kind of call before the first such call.

Kernels depend only on the fields of `Kind`, not on sizes, strides or scales. Those for few queries
also depend on the heads of a group, and with more than 16 queries times heads on how many there
are; they are compiled for one query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from flashvar.backends.triton.absent_device import set_target
from flashvar.backends.triton.attention import few_rows, launch, split_kv, tiles
from flashvar.backends.triton.attention.split_kv import Machine
from flashvar.backends.triton.attention.tiles import Tile
from flashvar.backends.triton.repeated import Bind, RepeatedLaunch
from flashvar.machine.shared_memory import SHARED_MEMORY
from flashvar.ops.attention import plan as plans
from flashvar.ops.attention.padding import pad_inputs
from flashvar.ops.attention.plan import plan
from flashvar.ops.attention.problem import Gradients, Inputs, Options, Wanted
from flashvar.ops.attention.validate import inspect, inspect_backward
from flashvar.ops.attention.warmup import Kind
from flashvar.ops.dtypes import dtype_of

# Two sequences, longer than the window; rows of a bias are 16-byte aligned.
_SEQLEN: Final = 64
_WINDOW: Final = 16
_BATCH: Final = 2
# Heads that share a key head: for each number there is another kernel for few queries.
_GROUPS: Final = (1, 2, 4, 8)
# Of a device that is not there. No kernel depends on it.
_MULTIPROCESSORS: Final = 128


def options_of(kind: Kind) -> Options:
    """The options of one call of a kind."""
    packed = "varlen" in kind.features
    return Options(
        causal=kind.causal,
        window_left=_WINDOW if "window" in kind.features else -1,
        softcap=1.0 if "softcap" in kind.features else 0.0,
        dropout_p=0.5 if "dropout" in kind.features else 0.0,
        backend="triton",
        max_seqlen_q=_SEQLEN if packed else None,
        max_seqlen_k=_SEQLEN if packed else None,
    )


def inputs_of(kind: Kind, device: torch.device, queries: int = _SEQLEN, group: int = 1) -> Inputs:
    """The tensors of one call of a kind, filled with zeros."""
    rows = (_BATCH * _SEQLEN,) if "varlen" in kind.features else (_BATCH, _SEQLEN)
    make: Any = partial(torch.zeros, device=device)
    dtype, integers = dtype_of(kind.dtype), torch.int32
    q, k = (make(*rows, 1, kind.head_dim, dtype=dtype) for _ in range(2))
    if queries < _SEQLEN:
        q = make(_BATCH, queries, group, kind.head_dim, dtype=dtype)
    offsets, used = None, None
    if "varlen" in kind.features:
        offsets = torch.arange(_BATCH + 1, dtype=integers, device=device) * _SEQLEN
    if "seqused" in kind.features:
        used = torch.full((_BATCH,), _SEQLEN, dtype=integers, device=device)
    return Inputs(
        q,
        k,
        make(*rows, 1, kind.head_dim_v, dtype=dtype),
        bias=make(1, 1, queries, _SEQLEN, dtype=dtype) if "bias" in kind.features else None,
        sinks=make(group, dtype=dtype) if "sinks" in kind.features else None,
        alibi_slopes=make(group) if "alibi" in kind.features else None,
        rng_state=make(2, dtype=torch.int64) if "dropout" in kind.features else None,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        seqused_k=used,
    )


def run(kind: Kind, device: int) -> None:
    """Make one call on `cuda:device`; Triton caches the kernels that it compiles."""
    inputs, options = inputs_of(kind, torch.device("cuda", device)), options_of(kind)
    if not kind.training:
        plan(*inputs[:3], inputs[3:], options).run(inputs, with_lse=False)
        for start in _few_queries(kind, inputs.q.device, split_kv.machine_of(device)):
            start()
    else:
        out, lse = plans.forward(inputs, options)
        wanted = Wanted(inputs.bias is not None)
        plans.backward(out, None, inputs, out, lse, options, wanted)
    torch.cuda.synchronize(device)


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile for a GPU that is not in this machine, into Triton's cache.

    Afterwards this process cannot launch Triton kernels.
    """
    set_target(capability)
    inputs, options = pad_inputs(inputs_of(kind, torch.device("cpu"))), options_of(kind)
    choose = _chooser(kind, inputs, capability)
    problem = inspect(inputs, options)
    out = inputs.q.new_empty(problem.out_shape)
    lse = torch.empty(problem.lse_shape)
    forward = launch.forward(problem, choose("forward"), _compile)
    if not kind.training:
        forward(inputs, out, None)
        machine = split_kv.Machine(capability, SHARED_MEMORY[capability], _MULTIPROCESSORS)
        for start in _few_queries(kind, inputs.q.device, machine, _compile):
            start()
        return
    forward(inputs, out, lse)
    wants_bias = inputs.bias is not None
    backward = inspect_backward(inputs, options, out, wants_bias)
    both = choose("backward_q"), choose("backward_kv")
    grads = Gradients(inputs.q, inputs.k, inputs.v, torch.empty(1) if wants_bias else None)
    run = launch.backward(backward, *both, choose("backward_bias"), _compile)
    run(inputs, out, lse, out, None, grads)


def _few_queries(
    kind: Kind, device: torch.device, machine: Machine, bind: Bind = RepeatedLaunch
) -> Iterator[Callable[[], None]]:
    """Launches of the kernels for one query, as in decoding, if they run such a kind of call."""
    if "varlen" in kind.features:
        return
    for group in _GROUPS:
        inputs = pad_inputs(inputs_of(kind, device, queries=1, group=group))
        problem = inspect(inputs, options_of(kind))
        if few_rows.runs(problem):
            out = inputs.q.new_empty(problem.out_shape)
            for splits in (1, *split_kv.MERGED_SPLITS):
                launch = few_rows.forward(problem, machine, splits, bind)
                yield partial(launch, inputs, out, None)


def _compile(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    return partial(kernel.warmup, grid=grid, **arguments)


def _chooser(kind: Kind, inputs: Inputs, capability: tuple[int, int]) -> Callable[[str], Tile]:
    dims = inputs.q.shape[-1], inputs.v.shape[-1]
    bias = tiles.BIAS_BYTES[kind.dtype if inputs.bias is not None else None]
    shared_memory = SHARED_MEMORY[capability]
    return lambda direction: tiles.choose(direction, capability, shared_memory, *dims, bias)
