"""How the Triton kernels are called for one problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.triton.attention import tiles, tuned
from flashvar.backends.triton.attention.arguments import backward_arguments, forward_arguments
from flashvar.backends.triton.attention.bwd_bias import attention_bwd_bias_kernel
from flashvar.backends.triton.attention.bwd_kv import attention_bwd_kv_kernel
from flashvar.backends.triton.attention.bwd_q import attention_bwd_q_kernel
from flashvar.backends.triton.attention.fwd import STRIDE_UNIT, attention_fwd_kernel
from flashvar.machine.system import gather
from flashvar.ops.attention.problem import Strides

if TYPE_CHECKING:
    from flashvar.backends.triton.attention.tiles import Tile
    from flashvar.ops.attention.problem import (
        BackwardLaunch,
        BackwardProblem,
        Gradients,
        Inputs,
        Launch,
        Problem,
    )
    from flashvar.selection.candidates import CandidateResult

# Of a kernel and a grid makes what takes the arguments.
Begin = Callable[[Any, "tuple[int, ...]"], Any]

# 16 bytes of a 16-bit dtype: what one memory instruction moves.
_WIDE: Final = STRIDE_UNIT.value
_WIDE_BYTES: Final = 2 * _WIDE
# What the interpreter, which has no device, pretends to be.
_NO_DEVICE: Final = ((8, 0), 48 * 1024)
BIAS_BYTES: Final = {None: 0, "bf16": 2, "fp16": 2, "fp32": 4}


def prepare_forward(problem: Problem, chosen: CandidateResult) -> Launch:
    """Choose the tile and freeze every argument but the tensors.

    The kernels read rows in 16-byte pieces. Tensors that start or stride elsewhere are copied
    first: Triton 3.6 gives wrong addresses to narrow tiles of unaligned rows.
    """
    del chosen
    run = _forward(problem) if _wide(problem.q, problem.k, problem.v) else None

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        if run is not None and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _WIDE_BYTES == 0:
            run(inputs, out, lse)
            return
        copied, inputs = _copied(problem, inputs)
        _forward(copied)(inputs, out, lse)

    return launch


def prepare_backward(problem: BackwardProblem, chosen: CandidateResult) -> BackwardLaunch:
    """Choose the tiles and freeze every argument but the tensors; copies as the forward does."""
    del chosen
    forward = problem.forward
    wide = _wide(forward.q, forward.k, forward.v, problem.grad_out)
    run = _backward(problem) if wide else None

    def launch(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
    ) -> None:
        tensors = (inputs.q, inputs.k, inputs.v, grad_out)
        if run is not None and not any(one.data_ptr() % _WIDE_BYTES for one in tensors):
            run(inputs, out, lse, grad_out, grad_lse, grads)
            return
        copied, inputs = _copied(forward, inputs)
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        strides = _strides_of(grad_out, forward.layout_out)
        moved = replace(problem, forward=copied, grad_out=strides)
        _backward(moved)(inputs, out, lse, grad_out, grad_lse, grads)

    return launch


def start(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What takes the arguments of a kernel and starts it on a grid."""
    return kernel[grid]


def forward(problem: Problem, tile: Tile, begin: Begin = start) -> Launch:
    """The launch with one tile; rows have to be aligned."""
    arguments = forward_arguments(problem, tile, attention_fwd_kernel)
    run = begin(attention_fwd_kernel, (_programs(problem, tile),))
    device = problem.device

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        q, k, v, *extras = inputs
        with _on(device):
            run(q, k, v, out, lse, *extras, **arguments)

    return launch


def backward(
    problem: BackwardProblem,
    tile_q: Tile,
    tile_kv: Tile,
    tile_bias: Tile | None = None,
    begin: Begin = start,
) -> BackwardLaunch:
    """The launches with one tile each; rows have to be aligned."""
    forward = problem.forward
    run_q = begin(attention_bwd_q_kernel, (_programs(forward, tile_q),))
    run_kv = begin(attention_bwd_kv_kernel, (_programs_kv(forward, tile_kv),))
    arguments_q = backward_arguments(problem, tile_q, attention_bwd_q_kernel)
    arguments_kv = backward_arguments(problem, tile_kv, attention_bwd_kv_kernel)
    run_bias, arguments_bias = None, {}
    if problem.grad_bias is not None:
        tile = tile_bias or best_tile(forward, "backward_bias")
        arguments_bias = backward_arguments(problem, tile, attention_bwd_bias_kernel)
        matrices = arguments_bias["bias_batches"] * arguments_bias["bias_heads"]
        rows, columns = -(-forward.seqlen_q // tile.block_q), -(-forward.seqlen_k // tile.block_kv)
        run_bias = begin(attention_bwd_bias_kernel, (matrices * rows * columns,))
    device = forward.device

    def launch(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
    ) -> None:
        q, k, v, bias, slopes, rng, *places = inputs
        extras = (bias, slopes, rng)
        base, delta = torch.empty_like(lse), torch.empty_like(lse)
        given = (out, lse, grad_out, grad_lse)
        with _on(device):
            run_q(q, k, v, *given, grads.q, base, delta, *extras, *places, **arguments_q)
            among = (q, k, v, grad_out, base, delta)
            run_kv(*among, grads.k, grads.v, *extras, *places, **arguments_kv)
            if run_bias is not None and grads.bias is not None:
                run_bias(*among, grads.bias, *extras, **arguments_bias)

    return launch


def _forward(problem: Problem) -> Launch:
    return forward(problem, best_tile(problem, "forward"))


def _backward(problem: BackwardProblem) -> BackwardLaunch:
    tile_q, tile_kv = (best_tile(problem.forward, f"backward_{side}") for side in ("q", "kv"))
    return backward(problem, tile_q, tile_kv)


def best_tile(problem: Problem, direction: str) -> Tile:
    """What was measured on this device, else what the table says."""
    device = None if problem.device is None else gather().device(problem.device)
    dims = problem.head_dim, problem.head_dim_v
    bias = BIAS_BYTES[problem.bias_dtype]
    if device is None:
        return tiles.choose(direction, *_NO_DEVICE, *dims, bias)
    measured = tuned.tiles_of(tuned.machine(gather().triton, device.name))
    best = measured.get(tuned.key(direction, max(sum(tiles.split(dim)) for dim in dims)))
    return tiles.choose(direction, device.capability, device.shared_memory, *dims, bias, best)


def _programs(problem: Problem, tile: Tile) -> int:
    rows = tile.block_q
    if problem.total_q is not None:
        return problem.heads_q * (problem.total_q // rows + problem.batch)
    return problem.batch * problem.heads_q * -(-problem.seqlen_q // rows)


def _programs_kv(problem: Problem, tile: Tile) -> int:
    rows = tile.block_kv
    if problem.total_k is not None:
        return problem.heads_kv * (problem.total_k // rows + problem.batch)
    return problem.batch * problem.heads_kv * -(-problem.seqlen_k // rows)


def _on(device: int | None) -> Any:
    """Triton launches on the current device."""
    elsewhere = device is not None and device != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def _wide(*tensors: Strides) -> bool:
    return all(stride % _WIDE == 0 for strides in tensors for stride in strides)


def _copied(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The call with contiguous q, k and v."""
    q, k, v = (
        tensor.clone(memory_format=torch.contiguous_format)
        for tensor in (inputs.q, inputs.k, inputs.v)
    )
    layout = problem.layout
    of_q, of_k, of_v = (_strides_of(tensor, layout) for tensor in (q, k, v))
    return replace(problem, q=of_q, k=of_k, v=of_v), inputs._replace(q=q, k=k, v=v)


def _strides_of(tensor: torch.Tensor, layout: str) -> Strides:
    """Of [batch, sequence, heads] in whatever layout; packed rows have batch 0."""
    if tensor.dim() == 3:
        return Strides(0, tensor.stride(0), tensor.stride(1))
    batch, second, third, _ = tensor.stride()
    return Strides(batch, third, second) if layout == "bhsd" else Strides(batch, second, third)
