"""How a public call gets to the kernels: directly, through autograd, or through torch's op."""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.ops.arguments import as_traceable, is_number, refuse_unknown_subclasses
from flashvar.ops.attention.autograd import differentiable
from flashvar.ops.attention.options import check_options
from flashvar.ops.attention.plan import Plan, known, plan, remember
from flashvar.ops.attention.problem import NO_TENSORS, OptionalTensors, Options, make_inputs
from flashvar.ops.attention.sharding import register_sharding_rules
from flashvar.ops.attention.spec import FORWARD
from flashvar.ops.attention.torch_library import attention_fwd
from flashvar.ops.attention.validate import check_tensors, inspect_symbolic, rows_contiguous
from flashvar.ops.autocast import dtype_on, lowered
from flashvar.ops.dispatch_modes import (
    are_plain,
    autocasts,
    is_compiling,
    is_mapped,
    no_dispatch_mode_active,
)
from flashvar.ops.dispatched import dispatched
from flashvar.ops.profiling import recorded
from flashvar.ops.sharding import are_dtensors

Outputs = tuple[torch.Tensor, torch.Tensor | None]

_grad_enabled: Final = torch.is_grad_enabled

# Seeds are 63 random bits.
_SEEDS: Final = 2**63 - 1


def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors,
    options: tuple[Any, ...],
    with_lse: bool,
) -> Outputs:
    """Attention of unchecked tensors; `options` are the fields of Options in order.

    Optimized for host time, which is all that a small call costs.
    """
    if is_compiling():
        register_sharding_rules()
        out, lse = attention_fwd(*_cast((q, k, v, *optional)), *map(as_traceable, options))
        return out, lse
    given = (q, k, v) if optional is NO_TENSORS else (q, k, v, *optional)
    if autocasts() and _skips_dispatcher(given):
        given = _cast(given)
    recent = known(given, options)
    if recent is not None:
        found, records = recent
        return run_plan(found, records, given, with_lse)
    if not _skips_dispatcher(given):
        try:
            return _dispatched(q, k, v, optional, options)
        except TypeError as error:
            refuse_unknown_subclasses(error, (q, k, v, *optional))
            raise
    return call_plain(given, options, with_lse)


def _skips_dispatcher(given: tuple[Any, ...]) -> bool:
    """Whether a call of unchecked tensors may skip the dispatcher."""
    q, k, v, *optional = given
    plain = are_plain(q, k, v, *[x for x in optional if x is not None])
    return plain and no_dispatch_mode_active()


def call_plain(given: tuple[Any, ...], options: tuple[Any, ...], with_lse: bool) -> Outputs:
    """`call` for plain tensors while no dispatch mode is active; the caller has checked both.

    `given` are the fields of Inputs, or q, k and v alone.
    """
    q, k, v, *optional = given
    found = plan(q, k, v, tuple(optional) or NO_TENSORS, options)
    records = _grad_enabled() and any(x is not None and x.requires_grad for x in given)
    outputs = run_plan(found, records, given, with_lse)
    remember(given, options, found)
    return outputs


def run_plan(
    found: Plan,
    records: bool,
    given: tuple[torch.Tensor | None, ...],
    with_lse: bool,
) -> Outputs:
    """A call by its plan, of what the plan was made for; `records` is whether autograd does."""
    outputs: Outputs
    if records:
        outputs = recorded(FORWARD, differentiable)(found, given, with_lse)
    else:
        outputs = recorded(FORWARD, found.run)(given, with_lse)
    return outputs


def _dispatched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors,
    options: tuple[Any, ...],
) -> Outputs:
    """Attention through torch's op; checks first, so that errors are ours, not the dispatcher's."""
    check_options(Options._make(options))
    given = make_inputs((q, k, v, *optional))
    check_tensors(given)
    are_dtensors("attention", given._asdict())
    # The user cannot choose the strides of an entry whose mapped dimension is the last in memory.
    rows = [rows_contiguous(x) if x is not None and is_mapped(x) else x for x in given]
    inputs = make_inputs(_cast(tuple(rows)))
    inspect_symbolic(inputs, Options._make(options))
    register_sharding_rules()
    out, lse = dispatched(attention_fwd, *inputs, *options)
    return out, lse


def rng_state_of(
    q: torch.Tensor, dropout_p: float, given: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The given state; else, if dropout_p is positive, a newly drawn one.

    Invalid arguments draw nothing: the call itself refuses them.
    """
    dropout_p = as_traceable(dropout_p)
    if given is not None or not (isinstance(q, torch.Tensor) and is_number(dropout_p)):
        return given
    return draw_rng_state(q) if dropout_p > 0 else None


def draw_rng_state(q: torch.Tensor) -> torch.Tensor:
    """Seed and offset of a dropout mask from torch's generator of the device of q."""
    return torch.randint(_SEEDS, (2,), dtype=torch.int64, device=q.device)


def _cast(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors in the dtype of autocast; as for scaled_dot_product_attention, except float64.

    `given` are the fields of Inputs, or q, k and v alone; of them q, k, v and bias are cast.
    """
    dtype = dtype_on(given[0].device.type)
    if dtype is None:
        return given
    # To a q in float64, which is not cast, a bias in float32 may be added, but none in `dtype`.
    cast = 3 if given[0].dtype == torch.float64 else 4
    return (*[lowered(x, dtype) for x in given[:cast]], *given[cast:])
