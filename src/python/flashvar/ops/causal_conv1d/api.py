"""`flashvar.causal_conv1d` and its update: depthwise causal convolution of short width."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
from torch.nn import functional

from flashvar.errors import InvalidInputError
from flashvar.ops.arguments import as_integer, is_bool, refuses_unknown_subclasses
from flashvar.ops.causal_conv1d import run, torch_library
from flashvar.ops.causal_conv1d.autograd import forward_of_plain
from flashvar.ops.causal_conv1d.inputs import (
    ACTIVATIONS,
    Activation,
    Layout,
    check,
    check_kinds,
    check_named,
    check_state_len,
    check_update,
    in_order_of,
)
from flashvar.ops.causal_conv1d.sequence_ids import (
    behind_state,
    check_seq_idx,
    ends_of,
    pack,
    unpack,
)
from flashvar.ops.causal_conv1d.sharding import check_written_shards, register_sharding_rules
from flashvar.ops.causal_conv1d.spec import UPDATE
from flashvar.ops.dispatch_modes import are_plain, is_compiling, no_dispatch_mode_active
from flashvar.ops.dispatched import dispatched
from flashvar.ops.profiling import recorded
from flashvar.ops.sequences import check_not_negated
from flashvar.ops.sharding import are_dtensors
from flashvar.selection.request import BackendName


@overload
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    activation: Activation = ...,
    residual: torch.Tensor | None = ...,
    initial_state: torch.Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    state_len: int | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    layout: Layout = ...,
    backend: BackendName = ...,
) -> torch.Tensor: ...


@overload
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    activation: Activation = ...,
    residual: torch.Tensor | None = ...,
    initial_state: torch.Tensor | None = ...,
    return_final_state: Literal[True],
    state_len: int | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    layout: Layout = ...,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    activation: Activation = ...,
    residual: torch.Tensor | None = ...,
    initial_state: torch.Tensor | None = ...,
    return_final_state: bool,
    state_len: int | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    layout: Layout = ...,
    backend: BackendName = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    state_len: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    layout: Layout = "btd",
    backend: BackendName = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel with its own short causal filter.

        z[t] = bias + sum(weight[:, j] * x[t - (width - 1) + j] for j in range(width))
        y[t] = activation(z[t]) + residual[t]

    Sums are in float32 (float64 for float64 tensors) and in a fixed order, so results have the same
    bits on every run. Every floating-point input has gradients of any order, and forward-mode
    derivatives. Autocast casts nothing.

    Args:
        x: [batch, seqlen, dim]; packed with cu_seqlens: [1, total, dim] or [total, dim]. bfloat16,
            float16 or float32; on the CPU also float64. Any strides.
        weight: [dim, width]; the last column applies to the token itself. Kernels have widths from
            2 to 4; wider filters run in plain torch operations, with backend="auto" too.
            Weight, bias, residual and initial_state may be bfloat16, float16 or float32 whatever
            the dtype of x; if x is float64 they must be too.
        bias: [dim].
        activation: "silu" or "swish", which mean the same, or None.
        residual: Added after the activation, in the shape of x.
        initial_state: The inputs before each sequence, [sequences, dim, columns], with the newest
            token in the last column: width - 1 columns (as in causal-conv1d), width (as in
            flash-linear-attention) or more. Zeros by default.
        return_final_state: Also return the state after each sequence, to be passed on as
            initial_state.
        state_len: The number of columns of the final state, width - 1 or more; width - 1 by
            default. With an initial_state it is the number of its columns, and no other is taken.
        cu_seqlens: The offsets of packed sequences: 0, then the cumulative sum of their lengths,
            int32 or int64. Lengths may be 0. On a CUDA device its values are not checked.
        seq_idx: Instead of cu_seqlens, and without final states: the sequence of each token,
            [batch, seqlen], int32 or int64. The tokens of a sequence must be adjacent. A negative
            number marks padding, which may hold anything and whose output is 0. The initial_state
            is then that of each batch entry, before its first sequence.
        layout: "btd" for the shapes above; "bdt" if x, residual and the output are [batch, dim,
            seqlen], or packed [dim, total]. Weight and states are the same in both.
        backend: "auto" takes the first of cuda, triton and reference that supports the call. A
            named backend computes the call or raises; "reference" is plain torch operations.

    Returns:
        The output, in the shape, dtype and order of strides of x. With return_final_state also the
        final state, in the dtype of initial_state, or of x without one.

    Raises:
        InvalidInputError: a shape, dtype, device or option is not supported (ShapeError,
            DtypeError, DeviceError and LayoutError are subclasses).
        BackendUnavailableError: no backend supports the call; the message has the reason for each.
        BinaryError: the driver refused a launch.
    """
    arguments = (x, weight, bias, residual, initial_state, cu_seqlens)
    if state_len is not None:  # read here: plans are kept by it
        state_len = as_integer(state_len)
    call = (activation, return_final_state, state_len, layout, backend)
    if seq_idx is None and not is_compiling():
        known = run.known(call, arguments)
        if known is not None:
            y, final_state = forward_of_plain(*known, arguments)
            return (y, final_state) if return_final_state else y
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    others = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    plain = _are_plain(x, weight, *(bias, residual, initial_state, cu_seqlens))
    if not (plain and _is_activation(activation)):
        plain = False
        check_kinds({**tensors, **others}, activation, layout, backend)
    if not is_bool(return_final_state):
        raise InvalidInputError(
            f"return_final_state must be True or False, found {return_final_state!r}: pass one of "
            "them, and the columns as state_len"
        )
    if seq_idx is not None:
        if plain:
            check_kinds({**tensors, **others}, activation, layout, backend)
        apart = {
            "cu_seqlens": cu_seqlens,
            "return_final_state": return_final_state or None,
            "state_len": state_len,
        }
        check_seq_idx(x, seq_idx, layout, apart)
        check_named(x, weight, bias, residual, initial_state, layout)
        _refuse_dtensors({**tensors, "initial_state": initial_state, "seq_idx": seq_idx})
        options = (activation is not None, layout, backend)
        return _of_named_sequences(x, weight, bias, residual, initial_state, seq_idx, *options)
    columns = 0
    if return_final_state:
        if plain and (weight.is_nested or (initial_state is not None and initial_state.is_nested)):
            check_kinds({**tensors, **others}, activation, layout, backend)
        columns = _columns(weight, initial_state, state_len)
    elif state_len is not None:
        raise InvalidInputError(
            f"state_len must come with return_final_state=True, found {state_len!r} without it: "
            "pass both, or leave state_len out"
        )
    given = (*arguments, activation is not None, columns, layout, backend)
    if plain:
        plan = run.plan(*given)
        records = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        y, final_state = forward_of_plain(plan, records, arguments)
        run.remember(call, arguments, plan)
    else:
        register_sharding_rules()
        if not is_compiling() and are_dtensors("causal_conv1d", {**tensors, **others}):
            # So that errors are not those of DTensor.
            check(x, weight, bias, residual, initial_state, cu_seqlens, layout)
        y, final_state = dispatched(torch_library.causal_conv1d_fwd, *given)
    return (y, final_state) if return_final_state else y


def _refuse_dtensors(tensors: dict[str, Any]) -> None:
    if not is_compiling() and are_dtensors("causal_conv1d", tensors):
        raise InvalidInputError(
            "seq_idx must come with plain tensors, found DTensors: pass cu_seqlens, or call it in "
            "torch.distributed.tensor.experimental.local_map"
        )


def _columns(weight: torch.Tensor, state: torch.Tensor | None, state_len: int | None) -> int:
    """The number of columns of the final state."""
    if weight.dim() != 2:  # the op says what is wrong
        return 0
    if state_len is None:
        if state is None or state.dim() == 0:
            return cast("int", weight.shape[1] - 1)
        return cast("int", state.shape[-1])
    check_state_len(state_len, weight, state)
    return state_len


def _are_plain(x: Any, second: Any, *optional: Any) -> bool:
    """Whether a call of these tensors may skip the dispatcher; the optional ones may be None."""
    return (
        not is_compiling()
        and no_dispatch_mode_active()
        and are_plain(x, second, *[one for one in optional if one is not None])
    )


def _is_activation(given: Any) -> bool:
    return given is None or (type(given) is str and given in ACTIVATIONS)


@refuses_unknown_subclasses
def _of_named_sequences(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    state: torch.Tensor | None,
    seq_idx: torch.Tensor,
    silu: bool,
    layout: str,
    backend: str,
) -> torch.Tensor:
    """The output where seq_idx names the sequences: all batches are packed into one."""
    given, past = x, 0
    if layout == "bdt":
        x = x.transpose(1, 2)
        residual = None if residual is None else residual.transpose(1, 2)
    if state is not None:
        past = weight.shape[1] - 1
        x, seq_idx = behind_state(x, seq_idx, state, past)
        residual = None if residual is None else functional.pad(residual, (0, 0, past, 0))
    y, _ = dispatched(
        torch_library.causal_conv1d_fwd,
        pack(x, seq_idx),
        weight,
        bias,
        None if residual is None else residual.reshape(1, x.shape[0] * x.shape[1], x.shape[2]),
        *(None, ends_of(seq_idx), silu, 0, "btd", backend),
    )
    y = unpack(y, seq_idx, past).to(given.dtype)
    return in_order_of(given, y if layout == "btd" else y.transpose(1, 2))


def causal_conv1d_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = None,
    *,
    residual: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    state_positions: torch.Tensor | None = None,
    layout: Layout = "btd",
    backend: BackendName = "auto",
) -> torch.Tensor:
    """Convolve the next tokens of each sequence, and update the states in place.

    It has no derivatives: asking for a gradient raises an error.

    Args:
        x: [batch, dim], one token of each sequence, or [batch, seqlen, dim], any number of tokens.
        state: The inputs before x, [batch, dim, columns], as `causal_conv1d` returns them; with
            state_indices a pool of states, [states, dim, columns]. Updated in place.
        weight: [dim, width]; weight, bias and activation as in `causal_conv1d`.
        bias: [dim].
        activation: "silu", "swish" or None.
        residual: Added after the activation, in the shape of x.
        state_indices: The index of each sequence's state in the pool, int32 or int64; no state may
            be used twice. A sequence with a negative index has no state, and its output is 0. On a
            CUDA device an index beyond the pool gives NaN; on the CPU it is an error.
        state_positions: For states that are circular buffers: the number of tokens that each
            sequence has seen, [batch], int32 or int64. The next token is written to the column of
            that number, modulo the number of columns; the other columns are not moved. The numbers
            themselves are not updated.
        layout: "btd" for the shapes above; "bdt" if x, residual and the output are [batch, dim,
            seqlen].
        backend: As in `causal_conv1d`.

    Returns:
        The output, in the shape, dtype and order of strides of x.

    Raises:
        InvalidInputError: a shape, dtype, device or option is not supported (ShapeError,
            DtypeError, DeviceError and LayoutError are subclasses).
        BackendUnavailableError: no backend supports the call; the message has the reason for each.
        BinaryError: the driver refused a launch.
    """
    given = (x, state, weight, bias, residual, state_indices, state_positions)
    call = (activation, layout, backend)
    known = None if is_compiling() else run.known_update(call, given)
    y: torch.Tensor
    if known is not None and not known[1]:
        y = recorded(UPDATE, known[0].run)(*given)
        return y
    arguments: tuple[Any, ...] = (*given, activation is not None, layout, backend)
    plain = _are_plain(*given) and _is_activation(activation)
    if plain and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*given)):
        plan = run.update_plan(*arguments)
        y = recorded(UPDATE, plan.run)(*given)
        run.remember_update(call, given, plan)
        return y
    named = dict(zip(run.UPDATE_NAMES, given, strict=True))
    check_kinds(named, activation, layout, backend)
    check_not_negated("state", state)
    register_sharding_rules()
    if not is_compiling() and are_dtensors("causal_conv1d_update", named):
        # So that errors are not those of DTensor.
        check_update(*given, layout)
        check_written_shards(*arguments)
    y = dispatched(torch_library.causal_conv1d_update, *arguments)
    return y
