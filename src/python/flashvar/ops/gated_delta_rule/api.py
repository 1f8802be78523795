"""`gated_delta_rule`: linear attention with a state that forgets and overwrites."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.dispatch_modes import is_compiling, no_dispatch_mode_active
from flashvar.ops.gated_delta_rule import run
from flashvar.ops.gated_delta_rule.autograd import differentiable
from flashvar.ops.gated_delta_rule.flops import register_flop_formulas
from flashvar.ops.gated_delta_rule.inputs import check_kinds, check_state_layout
from flashvar.ops.gated_delta_rule.spec import FORWARD, UPDATE
from flashvar.ops.gated_delta_rule.torch_library import (
    gated_delta_rule_fwd,
    gated_delta_rule_update,
)
from flashvar.ops.profiling import recorded

_TENSORS: Final = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens"),
    *("initial_state", "state_indices"),
)


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
    state_layout: Literal["kv", "vk"] = "kv",
    cu_seqlens: torch.Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: torch.Tensor | None = None,  # noqa: N803  as models name the parameter
    dt_bias: torch.Tensor | None = None,
    backend: Literal["auto", "cuda", "triton", "reference"] = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention by the gated delta rule.

    Each head of v has a state S [K, V]. For each token of a sequence, in order:

        S = exp(g) * S
        S = S + outer(k, beta * (v - S^T k))
        out = scale * S^T q

    Sums are kept in float32, float64 for float64 inputs. There are gradients of the first order of
    every floating-point tensor. Under autocast nothing is cast.

    Args:
        q: Queries, [batch, seqlen, heads, K]. bfloat16, float16 or float32, float64 too in the
            reference, and one dtype for q, k and v. Any K and V of at least 1.
        k: Keys, like q.
        v: Values, [batch, seqlen, heads of v, V]: as many heads as q or a multiple of them, of
            which each group in order shares a head of q and k.
        g: Gates, [batch, seqlen, heads of v], the natural logarithms of decays: at most 0, and
            -inf forgets all. On the CPU larger ones are refused. None is the delta rule, zeros.
            float32 or the dtype of q, as beta, A_log and dt_bias are.
        beta: How much of the state is overwritten, [batch, seqlen, heads of v], 0 to 2.
        scale: Factor of out; K ** -0.5 by default.
        initial_state: The state before each sequence, [sequences, heads of v, K, V], float32
            (float64 beside float64); zeros by default.
        return_final_state: Whether to return the state after each sequence.
        state_indices: For decoding without gradients. initial_state is a pool then, [any number,
            heads of v, K, V], float32 or of the dtype of q. State state_indices[i], integers, is
            that of sequence i, and is updated in place. Negative: the sequence begins with zeros,
            and its state is dropped. No state may belong to two sequences: on CUDA devices which
            of them stays is not defined.
        state_layout: "vk" where states are [..., V, K].
        cu_seqlens: The first row of each sequence and then the number of rows, [sequences + 1],
            int32 or int64: sequences, also of no tokens, are packed into a batch of 1.
        qk_l2norm: Normalise q and k first, x / sqrt(sum(x^2) + 1e-6).
        beta_sigmoid: beta is sigmoid(beta).
        allow_neg_eigval: beta is 2 * sigmoid(beta); with beta_sigmoid.
        A_log: [heads of v]. The gate is -exp(A_log) * softplus(g + dt_bias).
        dt_bias: [heads of v], with A_log; zeros by default.
        backend: "auto" takes the fastest that serves. A named one serves or raises; "reference" is
            plain torch operations.

    Returns:
        Out, [batch, seqlen, heads of v, V], contiguous, in the dtype of q; and the final state, in
        the shape and dtype of initial_state, or None. With state_indices it is initial_state.

    Raises:
        InvalidInputError: shapes, dtypes, devices or options that it does not take (ShapeError,
            DtypeError, DeviceError and LayoutError are kinds of it).
        BackendUnavailableError: the named backend does not serve the call.
    """
    arguments = (
        *(q, k, v, g, beta, A_log, dt_bias, cu_seqlens),
        *(scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout, backend),
    )
    states = (initial_state, state_indices)
    if not is_compiling() and no_dispatch_mode_active() and type(return_final_state) is bool:
        found = run.known(*states, arguments)
        if found is not None and not _has_gradients(arguments, states):
            function = FORWARD if state_indices is None else UPDATE
            call = (*states, arguments, return_final_state)
            out, final_state = recorded(function, found.run, *call)
            return out, final_state if return_final_state else None
        if found is not None and state_indices is None:
            out, final_state = recorded(FORWARD, differentiable, found, initial_state, arguments)
            return out, final_state if return_final_state else None
    return _checked(states, arguments, return_final_state)


def _checked(
    states: tuple[torch.Tensor | None, ...], arguments: tuple[Any, ...], return_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call through the dispatcher, with arguments of any kind."""
    initial_state, state_indices = states
    *of_inputs, scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, state_layout, backend = arguments
    tensors = dict(zip(_TENSORS, (*of_inputs, *states), strict=True))
    switches = {
        "qk_l2norm": qk_l2norm,
        "beta_sigmoid": beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "return_final_state": return_final_state,
    }
    check_kinds(tensors, switches, scale, backend)
    check_state_layout(state_layout)
    if not is_compiling() and torch._C._len_torch_dispatch_stack():
        register_flop_formulas()
    if state_indices is None:
        out, final_state = gated_delta_rule_fwd(initial_state, *arguments)
        return out, final_state if return_final_state else None
    if initial_state is None:
        raise InvalidInputError(
            "initial_state must be given with state_indices, which are its rows, got None: pass "
            "the pool of states"
        )
    if _has_gradients(arguments, states):
        raise InvalidInputError(
            "tensors must require no gradient with state_indices, which updates states in place, "
            "got one that does: call it under torch.no_grad(), or pass the states themselves"
        )
    out = gated_delta_rule_update(initial_state, state_indices, *arguments)
    return out, initial_state if return_final_state else None


def _has_gradients(arguments: tuple[Any, ...], states: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether autograd wants gradients of any tensor of a call."""
    if not torch.is_grad_enabled():
        return False
    tensors = (*states, *arguments[:8])
    if is_compiling():  # Dynamo does not trace torch's own question
        return any(x is not None and x.requires_grad for x in tensors)
    wanted: bool = torch._C._any_requires_grad(*tensors)
    return wanted
