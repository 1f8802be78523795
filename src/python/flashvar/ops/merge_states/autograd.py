"""The derivatives of merge_states, at any depth of transforms.

First derivatives in reverse mode are kernels. Those of higher order and of forward mode are torch's
own, of the reference's formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashvar.backends.reference.merge_states import formula
from flashvar.ops.derivatives import (
    Differentiated,
    attach,
    below_autograd,
    has_tangent,
    may_be_differentiated,
    skips_dispatcher,
)
from flashvar.ops.merge_states import run
from flashvar.ops.merge_states.inputs import (
    batched,
    check,
    out_shape,
    output_layout,
    parts_of,
    rows_first,
)
from flashvar.ops.merge_states.problem import Wanted
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD
from flashvar.ops.profiling import recorded


class _Merged(Differentiated):
    """The gradients of a forward: `inputs` are the options, then outs and lses."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if grad_out is None and grad_lse is None:
            return (None,) * (2 + len(wanted))
        tensors = ctx.saved_tensors
        parts = len(tensors) // 2
        outs, lses = list(tensors[:parts]), list(tensors[parts:])
        given = (grad_out, grad_lse, outs, lses, *ctx.options, wanted)
        if skips_dispatcher(grad_out, grad_lse, *tensors):
            of_outs, of_lses = recorded(BACKWARD, run.backward)(*given)
        else:
            of_outs, of_lses = torch.ops.flashvar.merge_states_bwd.default(*given)
        stacked, _, _ = ctx.options
        if stacked:
            each = of_outs, of_lses
        else:
            written = Wanted.of(wanted, parts, False)
            rest = iter(_unstacked(of_outs))
            each = (
                *(next(rest) if written.writes(part) else None for part in range(parts)),
                *(_unstacked(of_lses) if written.lses else (None,) * parts),
            )
        return (
            None,
            None,
            *(one if want else None for one, want in zip(each, wanted, strict=True)),
        )


def _unstacked(x: torch.Tensor) -> list[torch.Tensor]:
    """As unbind, which DTensor does not have in torch 2.8; it splits no tensor without entries."""
    return [one.squeeze(0) for one in x.split(1)] if len(x) else []


def forward_of_plain(
    outs: list[torch.Tensor], lses: list[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward of plain tensors that nothing intercepts: without the dispatcher."""
    results = recorded(FORWARD, run.forward)(outs, lses, *options)
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*outs, *lses)):
        out, lse = results
        return out, lse
    out, lse = attach(_Merged, results, options, *outs, *lses)
    return out, lse


def forward_at_autograd_key(keyset: Any, outs: Any, lses: Any, *options: Any) -> Any:
    """The Autograd kernel of merge_states_fwd."""
    if has_tangent(*outs, *lses):
        return _forward_formula(outs, lses, *options)
    op = torch.ops.flashvar.merge_states_fwd.default
    results = below_autograd(op, run.forward, keyset, (outs, lses, *options))
    if not (torch.is_grad_enabled() and may_be_differentiated(*outs, *lses)):
        return results
    return attach(_Merged, results, options, *outs, *lses)


def backward_at_autograd_key(
    keyset: Any, grad_out: Any, grad_lse: Any, outs: Any, lses: Any, *options: Any
) -> Any:
    """The Autograd kernel of merge_states_bwd."""
    tensors = [x for x in (grad_out, grad_lse, *outs, *lses) if x is not None]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if wanted or has_tangent(*tensors):
        return backward_formula(grad_out, grad_lse, outs, lses, *options)
    op = torch.ops.flashvar.merge_states_bwd.default
    return below_autograd(op, run.backward, keyset, (grad_out, grad_lse, outs, lses, *options))


def _forward_formula(
    outs: Any, lses: Any, stacked: bool, layout: str, _backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check(outs, lses, stacked, layout)
    out, lse = formula.forward(parts_of(outs, lses, stacked, layout))
    if output_layout(layout) == "bhsd":
        out = out.transpose(1, 2)
    shape = out_shape(outs[0], stacked, layout)
    lse_shape = tuple(lses[0].shape)[1 if stacked else 0 :]
    return out.reshape(shape).contiguous(), lse.reshape(lse_shape).contiguous()


def backward_formula(
    grad_out: Any,
    grad_lse: Any,
    outs: Any,
    lses: Any,
    stacked: bool,
    layout: str,
    _backend: str,
    wanted: Sequence[bool] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward in torch's own functions."""
    check(outs, lses, stacked, layout)
    if grad_out is None:
        grad_out = outs[0].new_zeros(out_shape(outs[0], stacked, layout))
    of_outs, of_lses = formula.backward(
        parts_of(outs, lses, stacked, layout),
        rows_first(grad_out, False, output_layout(layout)),
        None if grad_lse is None else batched(grad_lse, False),
    )
    if layout != "bshd":
        of_outs = of_outs.transpose(2, 3)
    front = () if stacked else (len(outs),)
    of_outs = of_outs.reshape(*front, *outs[0].shape)
    of_lses = of_lses.reshape(*front, *lses[0].shape)
    written = Wanted.of(wanted, len(outs), stacked)
    if not written.outs:
        of_outs = of_outs[:0]
    elif written.skipped:
        of_outs = of_outs[[part for part in range(len(outs)) if written.writes(part)]]
    return of_outs.contiguous(), of_lses[: None if written.lses else 0].contiguous()
