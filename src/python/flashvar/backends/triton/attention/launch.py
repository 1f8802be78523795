"""Launches of the Triton kernels for one problem."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from flashvar.backends.triton.attention import few_rows, tiles, tuned
from flashvar.backends.triton.attention.arguments import backward_arguments, forward_arguments
from flashvar.backends.triton.attention.bwd_bias import attention_bwd_bias_kernel
from flashvar.backends.triton.attention.bwd_kv import attention_bwd_kv_kernel
from flashvar.backends.triton.attention.bwd_q import attention_bwd_q_kernel
from flashvar.backends.triton.attention.fwd import STRIDE_UNIT, attention_fwd_kernel
from flashvar.backends.triton.attention.split_kv import NO_DEVICE, machine_of
from flashvar.backends.triton.repeated import Bind, RepeatedLaunch, on_device
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

# Elements of a 16-bit dtype in 16 bytes, the width of a vectorized load.
_LOAD_ELEMENTS: Final = STRIDE_UNIT.value
_LOAD_BYTES: Final = 2 * _LOAD_ELEMENTS


def prepare_forward(problem: Problem, chosen: CandidateResult) -> Launch:
    """Choose the tile and compute every argument but the tensors.

    The kernels need rows that are 16-byte aligned. Other tensors are copied first: Triton 3.6
    computes wrong addresses for narrow tiles of unaligned rows.
    """
    del chosen
    run = _forward(problem) if _strides_aligned(problem.q, problem.k, problem.v) else None

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        if run is not None and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _LOAD_BYTES == 0:
            run(inputs, out, lse)
            return
        copied, inputs = _copied(problem, inputs)
        _forward(copied)(inputs, out, lse)

    return launch


def prepare_backward(problem: BackwardProblem, chosen: CandidateResult) -> BackwardLaunch:
    """As `prepare_forward`, for the kernels of the backward."""
    del chosen
    forward = problem.forward
    aligned = _strides_aligned(forward.q, forward.k, forward.v, problem.grad_out)
    run = _backward(problem) if aligned else None

    def launch(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
        delta: torch.Tensor | None = None,
    ) -> None:
        tensors = (inputs.q, inputs.k, inputs.v, grad_out)
        if run is not None and not any(one.data_ptr() % _LOAD_BYTES for one in tensors):
            run(inputs, out, lse, grad_out, grad_lse, grads, delta)
            return
        copied, inputs = _copied(forward, inputs)
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        strides = _strides_of(grad_out, forward.layout_out)
        copied_problem = replace(problem, forward=copied, grad_out=strides)
        _backward(copied_problem)(inputs, out, lse, grad_out, grad_lse, grads, delta)

    return launch


def forward(problem: Problem, tile: Tile, bind: Bind = RepeatedLaunch) -> Launch:
    """The launch with a given tile; rows must be 16-byte aligned."""
    arguments = forward_arguments(problem, tile, attention_fwd_kernel)
    run = bind(attention_fwd_kernel, (_programs(problem, tile),), arguments)
    device = problem.device

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        q, k, v, *optional = inputs
        with on_device(device):
            run(q, k, v, out, lse, *optional)

    return launch


def backward(
    problem: BackwardProblem,
    tile_q: Tile,
    tile_kv: Tile,
    tile_bias: Tile | None = None,
    bind: Bind = RepeatedLaunch,
) -> BackwardLaunch:
    """The launch of all kernels with given tiles; rows must be 16-byte aligned."""
    forward = problem.forward
    arguments_q = backward_arguments(problem, tile_q, attention_bwd_q_kernel)
    arguments_kv = backward_arguments(problem, tile_kv, attention_bwd_kv_kernel)
    run_q = bind(attention_bwd_q_kernel, (_programs(forward, tile_q),), arguments_q)
    run_kv = bind(attention_bwd_kv_kernel, (_programs_kv(forward, tile_kv),), arguments_kv)
    run_bias = None
    if problem.grad_bias is not None:
        tile = tile_bias or best_tile(forward, "backward_bias")
        of_bias = backward_arguments(problem, tile, attention_bwd_bias_kernel)
        matrices = of_bias["bias_batches"] * of_bias["bias_heads"]
        rows, columns = -(-forward.seqlen_q // tile.block_q), -(-forward.seqlen_k // tile.block_kv)
        run_bias = bind(attention_bwd_bias_kernel, (matrices * rows * columns,), of_bias)
    device = forward.device

    def launch(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
        delta: torch.Tensor | None = None,
    ) -> None:
        q, k, v, bias, _, slopes, rng, *sequences = inputs
        optional = (bias, slopes, rng)
        lse_log2 = torch.empty_like(lse)
        delta = torch.empty_like(lse) if delta is None else delta
        given = (out, lse, grad_out, grad_lse)
        with on_device(device):
            run_q(q, k, v, *given, grads.q, lse_log2, delta, *optional, *sequences)
            shared = (q, k, v, grad_out, lse_log2, delta)
            run_kv(*shared, grads.k, grads.v, *optional, *sequences)
            if run_bias is not None and grads.bias is not None:
                run_bias(*shared, grads.bias, *optional)

    return launch


def _forward(problem: Problem) -> Launch:
    machine = machine_of(problem.device)
    if few_rows.is_faster(problem, machine):
        return few_rows.forward(problem, machine)
    return forward(problem, best_tile(problem, "forward"))


def _backward(problem: BackwardProblem) -> BackwardLaunch:
    tile_q, tile_kv = (best_tile(problem.forward, f"backward_{side}") for side in ("q", "kv"))
    return backward(problem, tile_q, tile_kv)


def best_tile(problem: Problem, direction: str) -> Tile:
    """The tile that was measured on this device, else the tile of the table."""
    device = None if problem.device is None else gather().device(problem.device)
    dims = problem.head_dim, problem.head_dim_v
    bias = tiles.BIAS_BYTES[problem.bias_dtype]
    if device is None:
        return tiles.choose(direction, *NO_DEVICE[:2], *dims, bias)
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


def _strides_aligned(*tensors: Strides) -> bool:
    return all(stride % _LOAD_ELEMENTS == 0 for strides in tensors for stride in strides)


def _copied(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The problem and inputs with contiguous copies of q, k and v."""
    q, k, v = (
        tensor.clone(memory_format=torch.contiguous_format)
        for tensor in (inputs.q, inputs.k, inputs.v)
    )
    layout = problem.layout
    of_q, of_k, of_v = (_strides_of(tensor, layout) for tensor in (q, k, v))
    return replace(problem, q=of_q, k=of_k, v=of_v), inputs._replace(q=q, k=k, v=v)


def _strides_of(tensor: torch.Tensor, layout: str) -> Strides:
    """The strides of batch, sequence and heads in any layout; packed tensors have batch 0."""
    if tensor.dim() == 3:
        return Strides(0, tensor.stride(0), tensor.stride(1))
    batch, second, third, _ = tensor.stride()
    return Strides(batch, third, second) if layout == "bhsd" else Strides(batch, second, third)
