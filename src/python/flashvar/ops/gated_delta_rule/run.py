"""The functions of gated_delta_rule below autograd and the dispatcher.

Arguments come in the order of the schemas: tensors, then options. What depends on shapes, strides,
dtypes, devices and options alone is in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch

from flashvar.ops.backend_choice import BackendFallback, choose_backend
from flashvar.ops.dispatch_modes import are_plain, no_dispatch_mode_active
from flashvar.ops.gated_delta_rule import inputs as checks
from flashvar.ops.gated_delta_rule.problem import (
    Backend,
    BackwardLaunch,
    Gradients,
    Inputs,
    Launch,
    make_inputs,
)
from flashvar.ops.gated_delta_rule.spec import (
    BACKWARD,
    FORWARD,
    MAX_BACKWARD_HEAD_DIM,
    RECURRENT_BELOW_COMPILED,
    STEP,
    UPDATE,
)
from flashvar.ops.plans import Maker, Plans, maker, prototype
from flashvar.ops.sequences import check_state_indices
from flashvar.selection.candidates import CandidateResult

# Bytes: what rows start at multiples of in calls of binaries by chunks.
_ROW_ALIGNMENT: Final = 16
_increment_version: Final = torch.autograd.graph.increment_version
# Tensors among the arguments.
_TENSORS: Final = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of calls of one kind."""

    launch: Launch | None  # None: there is nothing to compute
    options: tuple[Any, ...]  # those of the call, as in the schemas
    of_inputs: tuple[Any, ...]  # the fields of Inputs after its tensors
    on_cpu: bool  # values are checked there
    state_is_optional: bool  # to the backend
    alignment: int | None  # of the rows of q, k and v; None: calls of all alignments are alike
    make_out: Maker
    make_state: Maker

    def run(
        self, given: tuple[torch.Tensor | None, ...], with_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Out, and the states after each sequence where they are wanted; with indices in place.

        `given` are the tensors of the schemas, then states and indices.
        """
        states, indices = given[_TENSORS:]
        if self.on_cpu:
            checks.check_values(make_inputs(given[:_TENSORS] + self.of_inputs))
            if indices is not None and states is not None:
                check_state_indices(indices, states.shape[0])
        out, final_state = self.make_out(), states
        if indices is None:
            wanted = with_state or not self.state_is_optional
            final_state = self.make_state() if wanted else None
        if self.launch is not None:
            self.launch(given, out, final_state)
            if indices is not None and states is not None and not states.is_inference():
                _increment_version(states)
        return out, final_state


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The plan of backwards of one kind."""

    launch: BackwardLaunch
    state_layout: str
    alignment: int  # of the rows of the gradient of out, and of q, k and v

    def run(self, tensors: tuple[torch.Tensor | None, ...]) -> Sequence[torch.Tensor | None]:
        """The gradients of tensors that come in the order of the schema."""
        grads = self.launch(tensors)
        of_state = grads[-1]
        if of_state is None:
            return grads
        return *grads[:-1], _view(of_state, self.state_layout).contiguous()


def given(arguments: tuple[Any, ...]) -> Inputs:
    """The inputs of a call, checked; `scale` is None for K ** -0.5.

    Raises:
        InvalidInputError: with what was expected, what was found and what to do.
    """
    inputs = Inputs._make(arguments)
    checks.check(inputs)
    if inputs.scale is None:
        inputs = inputs._replace(scale=inputs.q.shape[-1] ** -0.5)
    return inputs


def checked(
    states: torch.Tensor | None, indices: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Inputs:
    """The inputs of a call, checked together with its states.

    Raises:
        InvalidInputError: with what was expected, what was found and what to do.
    """
    *of_inputs, layout, _ = arguments
    inputs = given(tuple(of_inputs))
    if states is not None and indices is not None:
        checks.check_pool(inputs, states, indices, layout)
    elif states is not None:
        checks.check_initial_state(inputs, states, layout)
    return inputs


def forward(
    initial_state: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out, and the state after each sequence."""
    given = (*arguments[:_TENSORS], initial_state, None)
    return _plan(initial_state, None, arguments).run(given, True)


def update(pool: torch.Tensor, indices: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Out; the states pool[indices] are those after each sequence then."""
    given = (*arguments[:_TENSORS], pool, indices)
    return _plan(pool, indices, arguments).run(given, True)[0]


def backward(
    grad_out: torch.Tensor | None,
    grad_final_state: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients of all tensors that are differentiable; empty where there is no tensor."""
    tensors = (grad_out, grad_final_state, initial_state, *arguments[:_TENSORS])
    grads = gradients(tensors, arguments[_TENSORS:])
    q: torch.Tensor = arguments[0]
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def gradients(
    tensors: tuple[torch.Tensor | None, ...], options: tuple[Any, ...]
) -> Sequence[torch.Tensor | None]:
    """As `backward`, of the tensors and the other arguments; None where there is no tensor."""
    plan = known_backward(tensors, options)
    if plan is None:
        plan = _backward_plan(tensors, options)
        _backward_plans.remember((options, _unusual_types(options)), tensors, plan)
    return plan.run(tensors)


_plans: Plans[Plan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()


def _plan(
    states: torch.Tensor | None, indices: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Plan:
    """The plan of a call, whose arguments come in the order of the schemas.

    The first call of a kind checks every argument and makes the plan.

    Raises:
        InvalidInputError: an argument is not supported.
        BackendUnavailableError: no backend can run the call.
    """
    key = _key(states, indices, arguments)
    found = _plans.get(key)
    if found is None:
        found = _make(states, indices, arguments)
        _plans.keep(key, found)
    return found


def known(given: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Plan, bool] | None:
    """The plan of a call that has been made before, and whether autograd records the call.

    Arguments of any kind, in the order of Plan.run. None where a check has to see them, or
    something in torch the call.
    """
    try:
        call = (options, _unusual_types(options))
        recent = _plans.recent(call, given)
        if recent is not None:
            alignment = recent[0].alignment
            if alignment is None or alignment == _alignment(given[0], given[1], given[2]):
                return recent
        tensors = [x for x in given if x is not None]
        if not (no_dispatch_mode_active() and are_plain(*tensors)):
            return None
        *of_inputs, states, indices = given
        found = _plans.get(_key(states, indices, (*of_inputs, *options)))
    # What has no strides, or cannot be hashed, is invalid: the checks of a first call say why.
    except (AttributeError, RuntimeError, TypeError):
        return None
    if found is None:
        return None
    _plans.remember(call, given, found)
    return found, torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)


def _unusual_types(options: tuple[Any, ...]) -> tuple[type, ...] | None:
    """The types of options where they are not the usual ones, whose equality says enough.

    hash(1) == hash(True): equal options of other types may be invalid.
    """
    scale, l2norm, sigmoid, negative, layout, backend = options
    if (
        (scale is None or type(scale) is float)
        and (l2norm is False or l2norm is True)
        and (sigmoid is False or sigmoid is True)
        and (negative is False or negative is True)
        and type(layout) is str
        and type(backend) is str
    ):
        return None
    return tuple(map(type, options))


def known_backward(
    tensors: tuple[torch.Tensor | None, ...], options: tuple[Any, ...]
) -> BackwardPlan | None:
    """The plan of a recent backward like this one; None where autograd records it."""
    recent = _backward_plans.recent((options, _unusual_types(options)), tensors)
    if recent is None:
        return None
    plan, records = recent
    grad_out, _, _, q, k, v, *_ = tensors
    if records or plan.alignment != _alignment(q, k, v, grad_out):
        return None
    return plan


def _backward_plan(
    tensors: tuple[torch.Tensor | None, ...], options: tuple[Any, ...]
) -> BackwardPlan:
    """The plan of a backward, made at the first of its kind."""
    grad_out, grad_final, initial_state, *of_inputs = tensors
    q, k, v, *_ = of_inputs
    alignment = _alignment(q, k, v, grad_out)
    key = (
        _key(initial_state, None, (*of_inputs, *options)),
        None if grad_out is None else (grad_out.shape, grad_out.stride(), grad_out.dtype),
        None if grad_final is None else (grad_final.shape, grad_final.stride(), grad_final.dtype),
        alignment,
    )
    found = _backward_plans.get(key)
    if found is None:
        *rest, layout, backend = options
        inputs = given((*of_inputs, *rest))
        chosen, implementation = _choose(BACKWARD, inputs, backend)
        launch: BackwardLaunch
        if inputs.q.is_meta:
            launch = partial(_without_values, layout)
        elif chosen.binary is None:
            launch = _with_views(implementation.backward, inputs[_TENSORS:], layout)
        else:
            binary: Any = implementation
            states = _k_first(initial_state, layout), _k_first(grad_final, layout)
            launch = binary.prepare_backward(chosen, inputs, states[0], grad_out, states[1])
        found = BackwardPlan(launch, layout, alignment)
        _backward_plans.keep(key, found)
    return found


def _without_values(layout: str, tensors: tuple[torch.Tensor | None, ...]) -> Gradients:
    """The gradients of meta tensors."""
    _, _, states, *given, _ = tensors
    wanted = (*given, _k_first(states, layout))
    return Gradients(*(None if x is None else torch.empty_like(x) for x in wanted))


def _with_views(
    backward: Callable[..., Gradients], of_inputs: tuple[Any, ...], layout: str
) -> BackwardLaunch:
    """The launch by a function that takes Inputs and views of states."""

    def launch(tensors: tuple[torch.Tensor | None, ...]) -> Gradients:
        grad_out, grad_final, states, *given = tensors
        inputs = make_inputs((*given, *of_inputs))
        return backward(inputs, _k_first(states, layout), grad_out, _k_first(grad_final, layout))

    return launch


def _alignment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor | None = None
) -> int:
    """The low bits of the addresses, combined; 0 if all are multiples of 16 bytes."""
    bits: int = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if grad_out is not None:
        bits |= grad_out.data_ptr()
    return bits % _ROW_ALIGNMENT


def _key(
    states: torch.Tensor | None, indices: torch.Tensor | None, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The key of plans: all that they depend on."""
    q, k, v, g, beta, a, b, cu, *rest = arguments
    options = tuple(rest)
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        beta.shape, beta.stride(), beta.dtype, beta.device,
        _alignment(q, k, v),
        None if g is None else (g.shape, g.stride(), g.dtype, g.device),
        None if a is None else (a.shape, a.stride(), a.dtype, a.device),
        None if b is None else (b.shape, b.stride(), b.dtype, b.device),
        None if cu is None else (cu.shape, cu.stride(), cu.dtype, cu.device),
        None if states is None else (states.shape, states.stride(), states.dtype, states.device),
        None
        if indices is None
        else (indices.shape, indices.stride(), indices.dtype, indices.device),
        options, _unusual_types(options),
    )  # fmt: skip


def _make(
    states: torch.Tensor | None, indices: torch.Tensor | None, arguments: tuple[Any, ...]
) -> Plan:
    inputs = checked(states, indices, arguments)
    *_, layout, backend = arguments
    out, after = like_forward(inputs, layout)
    launch, optional = None, False
    function = UPDATE if indices is not None or _few_tokens(inputs) else FORWARD
    if not out.is_meta and (out.numel() or (indices is None and after.numel())):
        final_state = after if indices is None else states
        given = (states, indices, out, final_state)
        launch, optional = _prepare(function, inputs, layout, backend, *given)
    return Plan(
        launch,
        arguments[_TENSORS:],
        inputs[_TENSORS:],
        out.device.type == "cpu",
        optional,
        _alignment(*inputs[:3]) if launch is not None and function == FORWARD else None,
        maker(out) if inputs.cu_seqlens is None else partial(torch.zeros_like, prototype(out)),
        maker(after),
    )


def _prepare(
    function: str,
    inputs: Inputs,
    layout: str,
    backend: str,
    states: torch.Tensor | None,
    indices: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
) -> tuple[Launch, bool]:
    """The launch that computes such calls, and whether it may be called without a final state."""
    chosen, implementation = _choose(function, inputs, backend)
    if chosen.binary is not None:
        binary: Any = implementation
        before, after = _k_first(states, layout), _k_first(final_state, layout)
        if function == FORWARD:
            return binary.prepare_forward(chosen, inputs, before, out, after), True
        return binary.prepare_update(chosen, inputs, before, indices, out, after), True

    of_inputs = inputs[_TENSORS:]

    def launch(
        given: tuple[torch.Tensor | None, ...], out: torch.Tensor, final_state: torch.Tensor | None
    ) -> None:
        inputs = make_inputs(given[:_TENSORS] + of_inputs)
        states, indices = given[_TENSORS:]
        after = _k_first(final_state, layout)
        if after is None:
            return
        if indices is None:
            implementation.forward(inputs, _k_first(states, layout), out, after)
        else:
            implementation.update(inputs, after, indices, out)

    return launch, False


def like_forward(inputs: Inputs, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a forward, not yet written. Varlen: rows of no sequence stay zeros."""
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    shape = checks.state_shape(inputs, inputs.sequences, layout)
    make = inputs.v.new_empty if inputs.cu_seqlens is None else inputs.v.new_zeros
    return make(inputs.v.shape), inputs.v.new_empty(shape, dtype=wide)


def like_backward(initial_state: torch.Tensor | None, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The results of a backward, not yet written."""
    tensors = (*inputs[:5], inputs.a_log, inputs.dt_bias, initial_state)
    return tuple(inputs.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _view(state: torch.Tensor, layout: str) -> torch.Tensor:
    """States as [..., K, V]."""
    return state if layout == "kv" else state.transpose(-1, -2)


def _k_first(state: torch.Tensor | None, layout: str) -> torch.Tensor | None:
    return None if state is None else _view(state, layout)


def _choose(function: str, inputs: Inputs, backend: str) -> tuple[CandidateResult, Backend]:
    """The candidate that runs a call, and its module.

    Raises:
        BackendUnavailableError: no candidate runs the call, or not the named one.
    """
    found = choose_backend(
        function, inputs.q, backend, inputs, partial(_fallback, function, inputs)
    )
    return cast("tuple[CandidateResult, Backend]", found)


def _fallback(function: str, inputs: Inputs, chosen: str) -> BackendFallback | None:
    """The backend that runs a call instead of the chosen one; None: the chosen one runs it."""
    if chosen == "triton" and function == BACKWARD and inputs.head_dim > MAX_BACKWARD_HEAD_DIM:
        limit, found = MAX_BACKWARD_HEAD_DIM, inputs.head_dim
        reason = f"Triton's kernels take q and k of head dims to {limit}, not {found}"
        return BackendFallback("reference", reason, "take a smaller head dim")
    if chosen != "cuda":
        return None
    if function == UPDATE:
        strided = [x.stride(3) != 1 and x.shape[3] > 1 for x in inputs[:3]]
        if not any(strided):
            return None
        reason = "binaries take contiguous rows of q, k and v"
        return BackendFallback("triton", reason, "make their last dimension contiguous")
    dims = inputs.head_dim, inputs.v.shape[3]
    if any(dim % STEP for dim in dims):
        reason = f"binaries take head dims that are multiples of {STEP}, not {dims}"
        return BackendFallback("triton", reason, "pad q, k and v with zeros, and pass scale")
    if not all(map(_rows_are_aligned, inputs[:3])):
        reason = "binaries take rows of q, k and v that start at multiples of 16 bytes"
        return BackendFallback("triton", reason, "pass contiguous clones of them")
    return None


def _few_tokens(inputs: Inputs) -> bool:
    """Whether sequences are so short, on average, that binaries go token by token."""
    rows: int = inputs.q.shape[0] * inputs.q.shape[1]
    return rows < RECURRENT_BELOW_COMPILED * inputs.sequences


def _rows_are_aligned(x: torch.Tensor) -> bool:
    strides = (stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1)
    return (
        x.stride(3) == 1
        and x.data_ptr() % _ROW_ALIGNMENT == 0
        and all(stride * x.element_size() % _ROW_ALIGNMENT == 0 for stride in strides)
    )
