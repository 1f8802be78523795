"""`gated_delta_rule`: linear attention with a state that forgets and overwrites."""

from __future__ import annotations

from typing import Any, Final, Literal, overload

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.arguments import as_traceable
from flashvar.ops.dispatch_modes import is_compiling
from flashvar.ops.dispatched import dispatched
from flashvar.ops.gated_delta_rule import run
from flashvar.ops.gated_delta_rule.autograd import differentiable
from flashvar.ops.gated_delta_rule.inputs import StateLayout, check_kinds, check_state_layout
from flashvar.ops.gated_delta_rule.sharding import check_written_shards, register_sharding_rules
from flashvar.ops.gated_delta_rule.spec import FORWARD, UPDATE
from flashvar.ops.gated_delta_rule.torch_library import (
    gated_delta_rule_fwd,
    gated_delta_rule_update,
)
from flashvar.ops.profiling import recorded
from flashvar.ops.sequences import check_not_negated
from flashvar.ops.sharding import are_dtensors
from flashvar.selection.request import BackendName

_TENSORS: Final = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens"),
    *("initial_state", "state_indices"),
)


@overload
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    return_final_state: Literal[True],
    state_indices: torch.Tensor | None = ...,
    state_layout: StateLayout = ...,
    cu_seqlens: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    beta_sigmoid: bool = ...,
    allow_neg_eigval: bool = ...,
    A_log: torch.Tensor | None = ...,  # noqa: N803
    dt_bias: torch.Tensor | None = ...,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    return_final_state: bool = ...,
    state_indices: torch.Tensor | None = ...,
    state_layout: StateLayout = ...,
    cu_seqlens: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    beta_sigmoid: bool = ...,
    allow_neg_eigval: bool = ...,
    A_log: torch.Tensor | None = ...,  # noqa: N803
    dt_bias: torch.Tensor | None = ...,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    state_indices: torch.Tensor | None = None,
    state_layout: StateLayout = "kv",
    cu_seqlens: torch.Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: torch.Tensor | None = None,  # noqa: N803  as models name the parameter
    dt_bias: torch.Tensor | None = None,
    backend: BackendName = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention by the gated delta rule (Yang et al. 2025).

    Each head of v has a state S, a matrix [K, V], where K is the head dim of q and k, and V that of
    v. For each token of a sequence, in order:

        S = exp(g) * S
        S = S + outer(k, beta * (v - S^T k))
        out = scale * S^T q

    Sums are in float32 (float64 for float64 inputs). Every floating-point input has first
    derivatives. Autocast casts nothing.

    Args:
        q: Queries, [batch, seqlen, heads, K]: bfloat16, float16 or float32, in the reference also
            float64. q, k and v must have the same dtype. K and V are at least 1.
        k: Keys, like q.
        v: Values, [batch, seqlen, heads of v, V]. The number of heads is that of q or a multiple of
            it; consecutive heads of v share a head of q and k.
        g: Gates, [batch, seqlen, heads of v]: the natural logarithms of the decays, at most 0; -inf
            clears the state. Positive gates are an error on the CPU, and are not checked on CUDA
            devices. None means zeros, which is the delta rule. g, beta, A_log and dt_bias are
            float32 or have the dtype of q.
        beta: How much of the state is overwritten, [batch, seqlen, heads of v], 0 to 2.
        scale: Factor of the output; K ** -0.5 by default.
        initial_state: The state before each sequence, [sequences, heads of v, K, V], in float32
            (float64 for float64 inputs); zeros by default.
        return_final_state: Also return the state after each sequence.
        state_indices: For decoding, without gradients. initial_state is then a pool of states, [any
            number, heads of v, K, V], in float32 or the dtype of q; sequence i uses the state at
            index state_indices[i] and updates it in place. With a negative index a sequence starts
            from zeros, and its state is not stored. No two sequences may use the same state: on
            CUDA devices what it then holds is undefined.
        state_layout: "vk" if states are [..., V, K].
        cu_seqlens: The offsets of sequences packed into a batch of 1: 0, then the end of each,
            [sequences + 1], int32 or int64. A sequence may be empty.
        qk_l2norm: Normalize q and k first: x / sqrt(sum(x^2) + 1e-6).
        beta_sigmoid: Use sigmoid(beta) as beta.
        allow_neg_eigval: Use 2 * sigmoid(beta) as beta; requires beta_sigmoid.
        A_log: [heads of v]. If given, the gate is -exp(A_log) * softplus(g + dt_bias).
        dt_bias: [heads of v], with A_log; zeros by default.
        backend: "auto" takes the first of cuda, triton and reference that supports the call. A
            named backend computes the call or raises; "reference" is plain torch operations.

    Returns:
        The output, [batch, seqlen, heads of v, V], contiguous, in the dtype of q; and the final
        state, in the shape and dtype of initial_state, or None without return_final_state. With
        state_indices the final state is initial_state itself.

    Raises:
        InvalidInputError: a shape, dtype, device or option is not supported (ShapeError,
            DtypeError, DeviceError and LayoutError are subclasses).
        BackendUnavailableError: no backend supports the call; the message has the reason for each.
        BinaryError: the driver refused a launch.
    """
    given = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, state_indices)
    options = (scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout, backend)
    if not is_compiling() and type(return_final_state) is bool:
        known = run.known(given, options)
        if known is not None:
            plan, records = known
            if not records:
                call = recorded(FORWARD if state_indices is None else UPDATE, plan.run)
                out, final_state = call(given, return_final_state)
                return out, final_state if return_final_state else None
            if state_indices is None:
                call = recorded(FORWARD, differentiable)
                out, final_state = call(plan, given, return_final_state)
                return out, final_state if return_final_state else None
    return _checked(given, options, return_final_state)


def _checked(
    given: tuple[torch.Tensor | None, ...], options: tuple[Any, ...], return_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call through the dispatcher, with arguments of any kind."""
    *of_inputs, initial_state, state_indices = given
    options = tuple(map(as_traceable, options))
    scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout, backend = options
    tensors = dict(zip(_TENSORS, given, strict=True))
    arguments = (*of_inputs, *options)
    switches = {
        "qk_l2norm": qk_l2norm,
        "beta_sigmoid": beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "return_final_state": return_final_state,
    }
    check_kinds(tensors, switches, scale, backend)
    check_state_layout(state_layout)
    register_sharding_rules()
    shards = not is_compiling() and are_dtensors("gated_delta_rule", tensors)
    if shards:  # so that errors are not those of DTensor
        run.checked(initial_state, state_indices, arguments)
    if state_indices is None:
        out, final_state = dispatched(gated_delta_rule_fwd, initial_state, *arguments)
        return out, final_state if return_final_state else None
    if initial_state is None:
        raise InvalidInputError(
            "initial_state must be given with state_indices, which are its rows, found None: pass "
            "the pool of states"
        )
    check_not_negated("initial_state", initial_state)
    if _has_gradients(given):
        raise InvalidInputError(
            "tensors must require no gradient with state_indices, which updates states in place, "
            "found one that does: call it under torch.no_grad(), or pass the states themselves"
        )
    if shards:
        check_written_shards(initial_state, state_indices, *of_inputs)
    out = dispatched(gated_delta_rule_update, initial_state, state_indices, *arguments)
    return out, initial_state if return_final_state else None


def _has_gradients(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether autograd wants gradients of any tensor of a call."""
    if not torch.is_grad_enabled():
        return False
    if is_compiling():  # Dynamo does not trace torch's own question
        return any(x is not None and x.requires_grad for x in tensors)
    wanted: bool = torch._C._any_requires_grad(*tensors)
    return wanted
