"""Plans: the cached checks, choice of backend and prepared launch of one kind of attention call.

Programs repeat calls with the same shapes, strides and options thousands of times. Everything that
depends on these alone is in the plan, so a repeated call costs one look-up, the allocation of its
outputs and the launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.attention.choice import choose_forward
from flashvar.ops.attention.offsets import are_int32, cast_launch, check_values
from flashvar.ops.attention.options import check_options
from flashvar.ops.attention.padding import (
    needs_padding,
    pad,
    pad_inputs,
    padded_launch,
    unpad_gradients,
)
from flashvar.ops.attention.problem import (
    NO_TENSORS,
    BackwardLaunch,
    BackwardProblem,
    Gradients,
    Inputs,
    Launch,
    OptionalTensors,
    Options,
    Problem,
    Wanted,
    inputs_of,
    make_gradients,
    make_inputs,
)
from flashvar.ops.attention.sinks import fill_without_keys, gradient
from flashvar.ops.attention.spec import BACKWARD
from flashvar.ops.attention.trace import logged_backward, logged_forward
from flashvar.ops.attention.validate import check_tensors, inspect, inspect_backward
from flashvar.ops.backend_choice import choose_backend
from flashvar.ops.plans import Maker, Plans, maker, prototype
from flashvar.selection.candidates import CandidateResult
from flashvar.selection.request import Overrides


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem, the candidate that runs it, and its launch."""

    problem: Problem
    chosen: CandidateResult
    launch: Launch | None  # None: there is nothing to compute
    options: Options
    make_out: Maker
    make_lse: Maker
    reads_offsets: bool  # whether the values of cu_seqlens and seqused_k are checked at each call

    def run(
        self, given: tuple[torch.Tensor | None, ...], with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, contiguous in the user's layout, and with `with_lse` the log-sum-exp.

        `given` are the fields of Inputs, or q, k and v alone.
        """
        inputs = inputs_of(given)
        if self.reads_offsets:
            check_values(inputs, self.options)
        out = self.make_out()
        lse = self.make_lse() if with_lse else None
        if self.launch is not None:
            self.launch(inputs, out, lse)
        else:
            out.zero_()
            if lse is not None:
                fill_without_keys(lse, inputs)
        return out, lse


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The plan of a backward."""

    problem: BackwardProblem
    launch: BackwardLaunch | None  # None: there is nothing to compute, or `pads`
    pads: bool  # whether the plan of the padded problem computes the gradients
    copies_grad_out: bool
    wants_sinks: bool
    makers: tuple[Maker, Maker, Maker]  # of the gradients of q, k and v
    # A prototype of that of the bias; None: not wanted. Printing it would crash.
    bias_like: torch.Tensor | None = field(repr=False)

    def run(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
    ) -> Gradients:
        """The gradients in the shapes, dtypes and memory orders of their inputs.

        `out` and `lse` are contiguous, as a forward makes them; the other tensors need not be.
        The memory order is that of torch's own gradients: where q is a transposed view, autograd
        passes its gradient back through the view without a copy.
        """
        make_q, make_k, make_v = self.makers
        bias = None if self.bias_like is None else torch.zeros_like(self.bias_like)
        grads = make_gradients((make_q(), make_k(), make_v(), bias, None))
        delta = None
        if self.launch is None:
            for grad in grads[:3]:
                grad.zero_()
            if self.wants_sinks:
                delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse
        else:
            if self.copies_grad_out:
                grad_out = grad_out.contiguous()
            if grad_lse is not None:
                grad_lse = grad_lse.contiguous()
            if self.wants_sinks:
                delta = torch.empty_like(lse)
            self.launch(inputs, out, lse, grad_out, grad_lse, grads, delta)
        if delta is not None and inputs.sinks is not None:
            grads = grads._replace(sinks=gradient(inputs.sinks, lse, delta))
        if bias is None or inputs.bias is None:
            return grads
        return grads._replace(bias=bias.to(inputs.bias.dtype))


_are_deterministic: Final = torch.are_deterministic_algorithms_enabled

_plans: Plans[Plan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()


def known(given: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Plan, bool] | None:
    """The plan of a recent call like this one, and whether autograd records such calls.

    Arguments of any kind. None where a check has to see them, or something in torch the call.
    """
    try:
        return _plans.recent((options, unusual_types(options), given[0].shape), given)
    # What has no shape, or cannot be hashed, is invalid: the checks say why.
    except (AttributeError, RuntimeError, TypeError):
        return None


def remember(given: tuple[Any, ...], options: tuple[Any, ...], found: Plan) -> None:
    """Let `known` find the plan of a call of plain tensors that nothing in torch intercepts."""
    _plans.remember((options, unusual_types(options), given[0].shape), given, found)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors,
    options: tuple[Any, ...],
) -> Plan:
    """The plan of a call; the first call of a kind checks every argument and makes the plan.

    `optional` are the other fields of Inputs and `options` the fields of Options, in order.

    Raises:
        InvalidInputError: an argument is not supported.
        BackendUnavailableError: no backend can run the call.
    """
    try:
        key = _key(q, k, v, optional, options)
        found = _plans.get(key)
    # An option that cannot be hashed or a tensor without strides is invalid: the checks say why.
    except (TypeError, ValueError, RuntimeError):
        check_options(Options._make(options))
        check_tensors(make_inputs((q, k, v, *optional)))
        raise
    if found is None:
        found = _make(make_inputs((q, k, v, *optional)), Options._make(options))
        _plans.keep(key, found)
    return found


def known_backward(
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    saved: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
    wanted: Wanted,
) -> BackwardPlan | None:
    """The plan of a recent backward like this one; None where autograd records it.

    `saved` is what a forward saved.
    """
    found = _backward_plans.recent((options, wanted, _are_deterministic()), grads + saved)
    return None if found is None or found[1] else found[0]


def remember_backward(
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    saved: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
    wanted: Wanted,
) -> None:
    """Let `known_backward` find the plan of a backward that has been computed without autograd."""
    out, lse = saved[-2:]
    if grads[0] is None or out is None or lse is None:
        return
    inputs, named = inputs_of(saved[:-2]), _deterministic_if_asked(Options._make(options))
    found = backward_plan(inputs, _optional(inputs), named, grads[0], wanted)
    if not found.pads and out.is_contiguous() and lse.is_contiguous():
        _backward_plans.remember((options, wanted, _are_deterministic()), grads + saved, found)


def backward_plan(
    inputs: Inputs,
    optional: OptionalTensors,
    options: Options,
    grad_out: torch.Tensor,
    wanted: Wanted,
) -> BackwardPlan:
    """The plan of a backward, made at the first call of its kind."""
    q, k, v = inputs[:3]
    key = (
        _key(q, k, v, optional, options),
        grad_out.stride(),
        wanted,
    )
    found = _backward_plans.get(key)
    if found is None:
        found = _make_backward(inputs, options, grad_out, wanted)
        _backward_plans.keep(key, found)
    return found


def plan_of(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Plan:
    """As `plan`, of the fields of Inputs."""
    q, k, v = inputs[:3]
    return plan(q, k, v, _optional(inputs), options)


def forward(inputs: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and its log-sum-exp."""
    out, lse = plan_of(inputs, options).run(inputs, with_lse=True)
    assert lse is not None
    return out, lse


def backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    wanted: Wanted,
) -> Gradients:
    """The gradients of q, k, v and those that are `wanted`.

    A `grad_out` or `grad_lse` of None stands for zeros.
    """
    options = _deterministic_if_asked(options)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    q, optional = inputs.q, _optional(inputs)
    chosen = backward_plan(inputs, optional, options, grad_out, wanted)
    _check_results(chosen.problem.forward, q, grad_out, out, grad_lse, lse)
    if not chosen.pads:
        # Hooks of saved tensors may have changed the order of their memory.
        return chosen.run(inputs, out.contiguous(), lse.contiguous(), grad_out, grad_lse)
    padded = backward(
        pad(grad_out),
        grad_lse,
        pad_inputs(inputs),
        pad(out),
        lse,
        options._replace(scale=chosen.problem.forward.scale),
        wanted,
    )
    return unpad_gradients(padded, inputs)


def _deterministic_if_asked(options: Options) -> Options:
    """The options; deterministic where torch.use_deterministic_algorithms asks for it."""
    return options._replace(deterministic=True) if _are_deterministic() else options


def _optional(inputs: tuple[Any, ...]) -> OptionalTensors:
    optional = inputs[3:]
    for x in optional:  # not any(): a generator takes twice as long
        if x is not None:
            return optional
    return NO_TENSORS


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors,
    options: tuple[Any, ...],
) -> tuple[Any, ...]:
    facts = None
    if optional is not NO_TENSORS:
        facts = tuple(
            None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in optional
        )
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        facts,
        options,
        unusual_types(options),
    )


def unusual_types(options: tuple[Any, ...]) -> tuple[type, ...] | None:
    """The types of options where they are not the usual ones, whose equality says enough.

    Equal options of other types may be invalid: hash(1) == hash(True), so causal=1 would find the
    plan of causal=True.
    """
    causal, scale, left, right, softcap, dropout_p, exact, layout, backend, max_q, max_k = options
    # One expression, as each call of a function costs as much as half of these checks.
    if (
        (causal is False or causal is True)
        and (scale is None or type(scale) is float)
        and type(left) is int
        and type(right) is int
        and type(softcap) is float
        and type(dropout_p) is float
        and (exact is False or exact is True)
        and type(layout) is str
        and type(backend) is str
        and (max_q is None or type(max_q) is int)
        and (max_k is None or type(max_k) is int)
    ):
        return None
    return tuple(map(type, options))


def _make(inputs: Inputs, options: Options) -> Plan:
    problem = inspect(inputs, options)
    q = inputs.q
    strict = Overrides.from_environment().strict and not q.is_meta
    of_sequences = inputs.cu_seqlens_q is not None or inputs.seqused_k is not None
    reads_offsets = of_sequences and (q.device.type == "cpu" or strict)
    if needs_padding(problem, options.backend):
        padded = pad_inputs(inputs)
        inner = _make(padded, options._replace(scale=problem.scale))
        launch = None if inner.launch is None else padded_launch(problem, inner.launch)
        chosen = inner.chosen
    else:
        chosen, backend = choose_forward(q, options.backend, problem)
        launch = None
        if not problem.empty and not q.is_meta:
            launch = backend.prepare_forward(problem, chosen)
            if not are_int32(inputs):
                launch = cast_launch(launch)
            launch = logged_forward(launch, problem, chosen)
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=problem.lse_dtype)
    return Plan(problem, chosen, launch, options, maker(out), maker(lse), reads_offsets)


def _make_backward(
    inputs: Inputs,
    options: Options,
    grad_out: torch.Tensor,
    wanted: Wanted,
) -> BackwardPlan:
    copies = grad_out.stride(-1) != 1 and grad_out.shape[-1] > 1
    if copies:
        grad_out = grad_out.contiguous()
    problem = inspect_backward(inputs, options, grad_out, wanted.bias)
    forward = problem.forward
    pads = needs_padding(forward, options.backend)
    launch = None
    if not forward.empty and not pads and not inputs.q.is_meta:
        chosen, backend = choose_backend(BACKWARD, inputs.q, options.backend, forward)
        launch = backend.prepare_backward(problem, chosen)
        if not are_int32(inputs):
            launch = cast_launch(launch)
        launch = logged_backward(launch, problem, chosen)
    q, k, v, bias = inputs[:4]
    grad_bias = None
    if wanted.bias and bias is not None:
        grad_bias = prototype(bias.new_empty(bias.shape, dtype=forward.lse_dtype))
    makers = (maker(q), maker(k), maker(v))
    wants_sinks = wanted.sinks and inputs.sinks is not None
    return BackwardPlan(problem, launch, pads, copies, wants_sinks, makers, grad_bias)


def _check_results(
    problem: Problem,
    q: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    lse: torch.Tensor,
) -> None:
    """Refuse results of another forward: hooks of saved tensors may return anything."""
    shape, lse_shape, lse_dtype = problem.out_shape, problem.lse_shape, problem.lse_dtype
    dtype, device = q.dtype, q.device
    given = [x for x in (out, grad_out, lse, grad_lse) if x is not None]
    if (
        out.dtype is dtype
        and grad_out.dtype is dtype
        and lse.dtype is lse_dtype
        and out.shape == grad_out.shape == shape
        and lse.shape == lse_shape
        and (grad_lse is None or (grad_lse.shape == lse_shape and grad_lse.dtype is lse_dtype))
        and all(x.device == device for x in given)
    ):
        return
    found = [f"{tuple(x.shape)} of {x.dtype} on {x.device}" for x in given]
    raise InvalidInputError(
        f"out and lse must be {shape} of {dtype} and {lse_shape} of {lse_dtype} in the backward, "
        f"on {device}, and their gradients likewise, found {', '.join(found)}: return saved "
        "tensors from their hooks as they were"
    )
