"""causal_conv1d in torch's own functions, which have derivatives of every order and kind.

Rows of all states and then of all sequences stand in one table [rows, dim]. Each tap of the
convolution, and each column of the final states, is a choice of rows of it; no row is chosen twice.
Rows are taken by index_select: vectorized functions of torch.autograd.functional have no batching
rule for the derivative of indexing.
"""

from __future__ import annotations

import torch

from flashvar.ops.causal_conv1d.problem import Convolution


def forward(
    conv: Convolution, residual: torch.Tensor | None, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [batch, seqlen, dim] and the final state [sequences, dim, columns]."""
    rows = _TableRows(conv, columns)
    table = _table(conv, rows)
    z = _sum(conv, [table.index_select(0, tap) for tap in rows.taps])
    y = torch.nn.functional.silu(z) if conv.silu else z
    if residual is not None:
        y = y + residual.flatten(0, 1).to(y.dtype)
    final = table.index_select(0, rows.final).unflatten(0, (conv.sequences, columns))
    dtype = conv.x.dtype if conv.state is None else conv.state.dtype
    return y.unflatten(0, conv.x.shape[:2]).to(conv.x.dtype), final.transpose(1, 2).to(dtype)


def backward(
    conv: Convolution, grad_y: torch.Tensor, grad_final: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight, bias and state, the last two wide if there are none."""
    columns = 0 if grad_final is None else grad_final.shape[-1]
    rows = _TableRows(conv, columns)
    table = _table(conv, rows)
    inputs = [table.index_select(0, tap) for tap in rows.taps]
    # reshape, not flatten, which torch's older kind of batches has not.
    grad_z = grad_y.reshape(inputs[0].shape).to(table.dtype)
    if conv.silu:
        z = _sum(conv, inputs)
        gate = torch.sigmoid(z)
        grad_z = grad_z * gate * (1 + z * (1 - gate))
    grad_weight = torch.stack([(grad_z * one).sum(0) for one in inputs], 1)
    weight = conv.weight.to(table.dtype)
    of_table = torch.zeros_like(table)
    for j, tap in enumerate(rows.taps):
        of_table = of_table.index_add(0, tap, grad_z * weight[:, j])
    if grad_final is not None:
        grads = grad_final.transpose(1, 2).reshape(len(rows.final), table.shape[1]).to(table.dtype)
        of_table = of_table.index_add(0, rows.final, grads)
    begin = conv.sequences * rows.columns
    grad_state = of_table[:begin].reshape(conv.sequences, rows.columns, conv.x.shape[-1])
    grad_state = grad_state.transpose(1, 2)
    return (
        of_table[begin:].reshape(conv.x.shape).to(conv.x.dtype),
        grad_weight.to(conv.weight.dtype),
        grad_z.sum(0) if conv.bias is None else grad_z.sum(0).to(conv.bias.dtype),
        grad_state if conv.state is None else grad_state.to(conv.state.dtype),
    )


class _TableRows:
    """Rows of the table (_table) that taps and final states take."""

    def __init__(self, conv: Convolution, final_columns: int) -> None:
        batch, seqlen = conv.x.shape[:2]
        sequences, device = conv.sequences, conv.x.device
        past = conv.width - 1
        # Without a state there are zeros as far back as the final states may reach.
        zeros = max(past, final_columns)
        self.columns = zeros if conv.state is None else conv.state.shape[-1]
        rows = torch.arange(batch * seqlen, device=device)
        if conv.cu_seqlens is None:
            ends = seqlen * torch.arange(sequences + 1, device=device)
        else:
            ends = conv.cu_seqlens.long()
        at = torch.searchsorted(ends, rows, right=True) - 1
        # Rows of no sequence count as rows of the last one, so that no index is out of bounds.
        at = at.clamp(0, max(sequences - 1, 0))
        begins = ends[at]
        self.taps = [self._row(rows - past + j, begins, at, sequences) for j in range(past + 1)]
        at = torch.arange(sequences, device=device).repeat_interleave(final_columns)
        column = torch.arange(final_columns, device=device).repeat(sequences)
        self.final = self._row(ends[at + 1] - final_columns + column, ends[at], at, sequences)

    def _row(
        self, token: torch.Tensor, begin: torch.Tensor, at: torch.Tensor, sequences: int
    ) -> torch.Tensor:
        of_state = at * self.columns + self.columns + token - begin
        return torch.where(token >= begin, sequences * self.columns + token, of_state)


def _table(conv: Convolution, rows: _TableRows) -> torch.Tensor:
    wide = torch.promote_types(torch.float32, conv.x.dtype)
    x = conv.x.flatten(0, 1).to(wide)
    if conv.state is None:
        return torch.cat((x.new_zeros(conv.sequences * rows.columns, x.shape[1]), x))
    return torch.cat((conv.state.transpose(1, 2).flatten(0, 1).to(wide), x))


def _sum(conv: Convolution, inputs: list[torch.Tensor]) -> torch.Tensor:
    weight = conv.weight.to(inputs[0].dtype)
    z = inputs[0] * weight[:, 0]
    for j, one in enumerate(inputs[1:], 1):
        z = z + one * weight[:, j]
    return z if conv.bias is None else z + conv.bias.to(z.dtype)
