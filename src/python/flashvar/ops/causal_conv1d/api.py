"""`flashvar.causal_conv1d` and its update: depthwise causal convolution of short width."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.causal_conv1d import run, torch_library
from flashvar.ops.causal_conv1d.autograd import forward_of_plain
from flashvar.ops.causal_conv1d.inputs import (
    ACTIVATIONS,
    check_channels,
    check_kinds,
    check_state_len,
)
from flashvar.ops.causal_conv1d.sequence_ids import check_seq_idx, ends_of
from flashvar.ops.causal_conv1d.spec import UPDATE
from flashvar.ops.dispatch_modes import are_plain, is_compiling, no_dispatch_mode_active
from flashvar.ops.profiling import recorded

Activation = Literal["silu", "swish"] | None
Layout = Literal["btd", "bdt"]
BackendName = Literal["auto", "cuda", "triton", "reference"]


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
    """Convolve each channel of sequences with a short filter of its own, causally.

        z[t] = bias + sum(weight[:, j] * x[t - (width - 1) + j] for j in range(width))
        y[t] = activation(z[t]) + residual[t]

    Sums are kept in float32, float64 for float64 tensors, and made in one order: the same bits on
    every run. There are gradients of every floating-point input, of any order and kind. Under
    autocast nothing is cast.

    Args:
        x: [batch, seqlen, dim]; packed with cu_seqlens [1, total, dim] or [total, dim]. bfloat16,
            float16 or float32, on the CPU float64 too. Any strides.
        weight: [dim, width], a width from 2 to 4; the last column is that of the token itself.
            As bias, residual and initial_state bfloat16, float16 or float32, whatever x is; float64
            if x is.
        bias: [dim].
        activation: "silu" or "swish", which are the same, or None.
        residual: Added after the activation; the shape of x.
        initial_state: What came before each sequence, [sequences, dim, columns], the newest token
            in the last column: width - 1 columns (causal-conv1d), width (flash-linear-attention) or
            more. Zeros if it is left out.
        return_final_state: Whether to return what came before the next token, as initial_state.
        state_len: The columns of the final state: those of initial_state, else width - 1, if it is
            left out.
        cu_seqlens: Where packed sequences begin and end: 0 and the cumulative sum of their lengths,
            int32 or int64. Lengths may be 0. It is not read on the host unless it lies there: on a
            CUDA device what it must be is not checked.
        seq_idx: In place of cu_seqlens, and without states, the sequence of each token, [batch,
            seqlen], int32 or int64, those of a sequence side by side. Where it is negative there is
            padding, which may hold anything and whose output is 0.
        layout: "btd" for the shapes above, "bdt" for [batch, dim, seqlen] or packed [dim, total] in
            x, residual and the output. Weight and states are the same in both.
        backend: "auto" takes the fastest that serves. A named one serves or raises; "reference" is
            plain torch operations.

    Returns:
        The output, in the shape, dtype and order of strides of x; with return_final_state also the
        final state, in the dtype of initial_state, else of x.

    Raises:
        InvalidInputError: shapes, dtypes, devices or options that causal_conv1d does not take
            (ShapeError, DtypeError, DeviceError and LayoutError are kinds of it).
        BackendUnavailableError: nothing serves the call; the message says why for each candidate.
        BinaryError: the driver refused a launch.
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    others = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    plain = _are_plain(x, weight, *(bias, residual, initial_state, cu_seqlens))
    if not (plain and _is_activation(activation)):
        plain = False
        check_kinds({**tensors, **others}, activation, layout, backend)
    if type(return_final_state) is not bool:
        raise InvalidInputError(
            f"return_final_state must be True or False, got {return_final_state!r}: pass one of "
            "them, and the columns as state_len"
        )
    if seq_idx is not None:
        apart = {**others, "return_final_state": return_final_state, "state_len": state_len}
        check_seq_idx(x, seq_idx, layout, apart)
        check_channels(x, weight, bias, residual, layout)
        return _of_named_sequences(tensors, seq_idx, activation is not None, layout, backend)
    columns = 0
    if return_final_state and weight.dim() == 2:  # of another weight the op says what is wrong
        default = weight.shape[1] - 1
        if initial_state is not None and initial_state.dim() > 0:
            default = initial_state.shape[-1]
        columns = default if state_len is None else state_len
        check_state_len(columns, weight, initial_state)
    elif state_len is not None:
        raise InvalidInputError(
            f"state_len is that of the final state, got {state_len!r} without it: pass "
            "return_final_state=True, or leave it out"
        )
    y, final_state = (forward_of_plain if plain else torch_library.causal_conv1d_fwd)(
        *tensors.values(), *others.values(), activation is not None, columns, layout, backend
    )
    return (y, final_state) if return_final_state else y


def _are_plain(x: Any, second: Any, *optional: Any) -> bool:
    """Whether a call of these tensors may skip the dispatcher; the optional ones may be None."""
    return (
        not is_compiling()
        and no_dispatch_mode_active()
        and are_plain(x, second, *[one for one in optional if one is not None])
    )


def _is_activation(given: Any) -> bool:
    return given is None or (type(given) is str and given in ACTIVATIONS)


def _of_named_sequences(
    tensors: dict[str, Any], seq_idx: torch.Tensor, silu: bool, layout: str, backend: str
) -> torch.Tensor:
    """The output where seq_idx names the sequences: all batches are packed into one."""
    x, residual = (
        one if one is None or layout == "btd" else one.transpose(1, 2)
        for one in (tensors["x"], tensors["residual"])
    )
    padding = (seq_idx < 0)[..., None]
    # In the backward 0, the gradient of padding, times NaN would be NaN.
    x = x.masked_fill(padding, 0)
    y, _ = torch_library.causal_conv1d_fwd(
        x.reshape(1, x.shape[0] * x.shape[1], x.shape[2]),
        tensors["weight"],
        tensors["bias"],
        None if residual is None else residual.reshape(1, x.shape[0] * x.shape[1], x.shape[2]),
        *(None, ends_of(seq_idx), silu, 0, "btd", backend),
    )
    y = y.view(x.shape).masked_fill(padding, 0)
    return y if layout == "btd" else y.transpose(1, 2)


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
    """Convolve the next tokens of sequences, and move them into the states, in place.

    It has no derivatives: a gradient that is asked for raises.

    Args:
        x: [batch, dim], one token of each sequence, or [batch, seqlen, dim] with any number.
        state: What came before, [batch, dim, columns] as `causal_conv1d` returns it; or with
            state_indices a pool [states, dim, columns]. It is written.
        weight: [dim, width], as bias and activation those of `causal_conv1d`.
        bias: [dim].
        activation: "silu", "swish" or None.
        residual: Added after the activation; the shape of x.
        state_indices: The state of each sequence in the pool, int32 or int64, each state at most
            once. A sequence with a negative index has none: it gives 0. On a CUDA device, where
            indices are not read on the host, one beyond the pool gives NaN.
        state_positions: Where the states are circular buffers: how many tokens each sequence has
            seen, [batch], int32 or int64. The next token goes to that column, modulo the columns,
            and the others stay where they are. They are not counted up.
        layout: "btd" for the shapes above, "bdt" for [batch, dim, seqlen] in x, residual and the
            output.
        backend: As in `causal_conv1d`.

    Returns:
        The output, in the shape, dtype and order of strides of x.

    Raises:
        InvalidInputError: shapes, dtypes, devices or options that it does not take.
        BackendUnavailableError: nothing serves the call; the message says why for each candidate.
        BinaryError: the driver refused a launch.
    """
    others = bias, residual, state_indices, state_positions
    plain = _are_plain(x, state, weight, *others) and _is_activation(activation)
    if plain and not (
        torch.is_grad_enabled() and torch._C._any_requires_grad(x, state, weight, *others)
    ):
        arguments = (x, state, weight, *others, activation is not None, layout, backend)
        return cast("torch.Tensor", recorded(UPDATE, run.update, *arguments))
    tensors = {"x": x, "state": state, "weight": weight, "bias": bias, "residual": residual}
    given = {
        **tensors,
        "state_indices": state_indices,
        "state_positions": state_positions,
    }
    check_kinds(given, activation, layout, backend)
    return torch_library.causal_conv1d_update(
        *given.values(), activation is not None, layout, backend
    )
