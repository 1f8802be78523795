"""Stands in for the extension of causal-conv1d: its three functions, on the library of a wheel.

The package itself imports it and stays as it is. Each call fills the parameters of
causal_conv1d.h and passes them to the library that fits the device; what the kernels cannot read is
refused.
"""

from __future__ import annotations

import ctypes
import json
import os
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _strides(*names: str) -> list[tuple[str, type]]:
    return [(f"{name}_stride", ctypes.c_uint32) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class _Params(ctypes.Structure):
    """ConvParamsBase."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("batch", "dim", "seqlen", "width")),
        ("silu_activation", ctypes.c_bool),
        *_strides("x_batch", "x_c", "x_l", "weight_c", "weight_width"),
        *_strides("out_batch", "out_c", "out_l"),
        ("conv_state_len", ctypes.c_int),
        *_strides("conv_state_batch", "conv_state_c", "conv_state_l"),
        *_pointers("x_ptr", "weight_ptr", "bias_ptr", "out_ptr", "conv_state_ptr"),
        *_pointers("cache_seqlens", "conv_state_indices_ptr", "seq_idx_ptr"),
        *_pointers("initial_states_ptr"),
        *_strides("initial_states_batch", "initial_states_l", "initial_states_c"),
        *_pointers("final_states_ptr"),
        *_strides("final_states_batch", "final_states_l", "final_states_c"),
    )


class _BackwardParams(_Params):
    """ConvParamsBwd: its members follow those of its base."""

    _fields_ = (
        *_strides("dx_batch", "dx_c", "dx_l", "dweight_c", "dweight_width"),
        *_strides("dout_batch", "dout_c", "dout_l"),
        *_pointers("dx_ptr", "dweight_ptr", "dbias_ptr", "dout_ptr"),
        *_pointers("dinitial_states_ptr"),
        *_strides("dinitial_states_batch", "dinitial_states_l", "dinitial_states_c"),
        *_pointers("dfinal_states_ptr"),
        *_strides("dfinal_states_batch", "dfinal_states_l", "dfinal_states_c"),
        ("deterministic", ctypes.c_bool),
        *_pointers("dweight_workspace_ptr", "dbias_workspace_ptr"),
        *_strides("dweight_workspace_batch", "dweight_workspace_dim", "dbias_workspace_batch"),
    )


class _Call(ctypes.Structure):
    """causalconv1d_call of the library's header."""

    _fields_ = (
        ("params", ctypes.c_void_p),
        ("params_size", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("dtype", ctypes.c_uint32),
        ("weight_dtype", ctypes.c_uint32),
        ("channel_last", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


@cache
def _library(capability: tuple[int, int]) -> ctypes.CDLL:
    """The library whose machine code runs on a device, of those that are installed."""
    found: dict[tuple[int, int], Path] = {}
    for distribution in metadata.distributions():
        for entry in distribution.entry_points.select(group="causalconv1d.binaries"):
            digits = entry.name.removeprefix("sm_")
            found[int(digits[:-1]), int(digits[-1])] = Path(
                str(distribution.locate_file(entry.value))
            )
    fitting = [one for one in found if one[0] == capability[0] and one[1] <= capability[1]]
    if not fitting:
        raise RuntimeError(f"expected a binary for {capability}, found {sorted(found)}")
    folder = found[max(fitting)]
    described = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    library = ctypes.CDLL(str(folder / described["library"]["file"]))
    library.causalconv1d_last_error.restype = ctypes.c_char_p
    return library


def _check(right: bool, words: str) -> None:
    if not right:
        raise RuntimeError(f"causal_conv1d: expected {words}")


def _check_common(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: list[torch.Tensor]
) -> None:
    _check(x.dtype in _DTYPES and weight.dtype in _DTYPES, "float32, float16 or bfloat16")
    _check(x.dim() == 3 and weight.dim() == 2, "x of (batch, dim, length), weight of (dim, width)")
    _check(weight.shape[0] == x.shape[1], "as many rows of weight as channels of x")
    _check(2 <= weight.shape[1] <= 4, "a width of 2 to 4")
    if bias is not None:
        _check(bias.dtype == weight.dtype and bias.shape == x.shape[1:2], "a bias like weight")
        _check(bias.stride(-1) == 1, "a bias without gaps")
    _check(all(one.device == x.device for one in (weight, *others)), "tensors of one device")


def _is_channel_last(x: torch.Tensor) -> bool:
    _check(x.stride(2) == 1 or x.stride(1) == 1, "x without gaps in channels or length")
    last = x.stride(1) == 1 and x.stride(2) > 1
    if last:
        aligned = x.shape[1] % 8 == 0 and x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0
        _check(aligned, "channels and strides in multiples of 8 where channels come last")
    return last


def _sequence_fields(
    x: torch.Tensor,
    width: int,
    last: bool,
    seq_idx: torch.Tensor | None,
    states: dict[str, torch.Tensor | None],
) -> dict[str, int]:
    """The fields of what only the channel-last kernels read."""
    fields: dict[str, int] = {}
    if seq_idx is not None:
        right = seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        _check(last and right and seq_idx.shape == (x.shape[0], x.shape[2]), "int32 seq_idx")
        fields["seq_idx_ptr"] = seq_idx.data_ptr()
    for name, one in states.items():
        if one is None:
            continue
        shape = (x.shape[0], x.shape[1], width - 1)
        _check(last and one.dtype == x.dtype and one.shape == shape, f"{name} of {shape} like x")
        # The kernels read dfinal_states by its strides.
        _check(name == "dfinal_states" or one.stride(1) == 1, f"{name} without gaps in channels")
        fields[f"{name}_ptr"] = one.data_ptr()
        for axis, position in (("batch", 0), ("c", 1), ("l", 2)):
            fields[f"{name}_{axis}_stride"] = one.stride(position)
    return fields


def _common_fields(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, silu: bool
) -> dict[str, int]:
    (batch, dim, seqlen), width = x.shape, weight.shape[1]
    fields = {"batch": batch, "dim": dim, "seqlen": seqlen, "width": width, "silu_activation": silu}
    fields |= {"x_ptr": x.data_ptr(), "weight_ptr": weight.data_ptr(), "out_ptr": out.data_ptr()}
    fields["bias_ptr"] = 0 if bias is None else bias.data_ptr()
    for name, one in (("x", x), ("out", out)):
        for axis, position in (("batch", 0), ("c", 1), ("l", 2)):
            fields[f"{name}_{axis}_stride"] = one.stride(position)
    fields |= {"weight_c_stride": weight.stride(0), "weight_width_stride": weight.stride(1)}
    return fields


def _run(op: str, params: _Params, x: torch.Tensor, weight: torch.Tensor, last: bool) -> None:
    library = _library(torch.cuda.get_device_capability(x.device))
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        kind = _DTYPES[x.dtype], _DTYPES[weight.dtype]
        address = ctypes.addressof(params)
        call = _Call(address, ctypes.sizeof(params), stream, *kind, last, 0)
        if getattr(library, f"causalconv1d_{op}")(ctypes.byref(call)) != 0:
            raise RuntimeError(library.causalconv1d_last_error().decode())


def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    final_states_out: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Write the convolution of x into out."""
    _check_common(x, weight, bias, [out])
    _check(out.dtype == x.dtype and out.shape == x.shape, "out like x")
    last = _is_channel_last(x)
    states = {"initial_states": initial_states, "final_states": final_states_out}
    fields = _common_fields(x, weight, bias, out, silu_activation)
    fields |= _sequence_fields(x, weight.shape[1], last, seq_idx, states)
    _run("conv_fwd", _Params(**fields), x, weight, last)


def causal_conv1d_bwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dbias: torch.Tensor | None,
    dinitial_states: torch.Tensor | None,
    silu_activation: bool,
) -> None:
    """Write the gradient of x, and add those of weight and bias."""
    _check_common(x, weight, bias, [dout, dx, dweight])
    last, width = _is_channel_last(x), weight.shape[1]
    _check(dout.shape == x.shape and dx.shape == x.shape, "gradients of x's shape")
    _check(dx.dtype == x.dtype and dx.stride(1 if last else 2) == 1, "dx like x")
    _check(dweight.dtype == torch.float32 and dweight.shape == weight.shape, "float32 dweight")
    _check((bias is None) == (dbias is None), "dbias where there is a bias")
    dout = dout.to(x.dtype)
    if last and dout.stride(1) != 1:
        dout = dout.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif not last and dout.stride(2) != 1:
        dout = dout.contiguous()
    if last:
        aligned = dout.stride(2) % 8 == 0 and dout.stride(0) % 8 == 0
        _check(aligned, "strides of dout in multiples of 8")
    states = {
        "initial_states": initial_states,
        "dfinal_states": dfinal_states,
        "dinitial_states": dinitial_states,
    }
    fields = _common_fields(x, weight, bias, dout, silu_activation)
    fields |= _sequence_fields(x, width, last, seq_idx, states)
    for name, one in (("dx", dx), ("dout", dout)):
        fields[f"{name}_ptr"] = one.data_ptr()
        for axis, position in (("batch", 0), ("c", 1), ("l", 2)):
            fields[f"{name}_{axis}_stride"] = one.stride(position)
    fields |= {"dweight_ptr": dweight.data_ptr(), "dweight_c_stride": dweight.stride(0)}
    fields |= {"dweight_width_stride": dweight.stride(1)}
    fields["dbias_ptr"] = 0 if dbias is None else dbias.data_ptr()
    # Sums over the batch and chunks in a fixed order go through a workspace.
    named = os.environ.get("CAUSAL_CONV1D_DETERMINISTIC", "")[:1]
    deterministic = named == "1" or (named != "0" and torch.are_deterministic_algorithms_enabled())
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []
    if deterministic:
        length = x.shape[2]
        chunk = 64 if length <= 128 else 128
        front = (x.shape[0], -(-length // chunk)) if last else (x.shape[0],)
        space = torch.zeros(*front, *weight.shape, device=x.device)
        fields |= {"deterministic": True, "dweight_workspace_ptr": space.data_ptr()}
        fields["dweight_workspace_batch_stride"] = space.stride(0)
        fields["dweight_workspace_dim_stride"] = space.stride(-2)
        sums.append((dweight, space))
        if dbias is not None:
            space = torch.zeros(*front, x.shape[1], device=x.device)
            fields["dbias_workspace_ptr"] = space.data_ptr()
            fields["dbias_workspace_batch_stride"] = space.stride(0)
            sums.append((dbias, space))
    _run("conv_bwd", _BackwardParams(**fields), x, weight, last)
    for gradient, space in sums:
        gradient.add_(space.flatten(0, space.dim() - gradient.dim() - 1).sum(0))


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    silu_activation: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> None:
    """Append x to the state and write the convolution of what is new into out."""
    _check_common(x, weight, bias, [out, conv_state])
    length, width = conv_state.shape[-1], weight.shape[1]
    entries = conv_state.shape[0] if conv_state_indices is not None else x.shape[0]
    _check(conv_state.dtype == x.dtype and length >= width - 1, "a state of width - 1 or more")
    _check(conv_state.shape == (entries, x.shape[1], length), "a state of (entries, dim, length)")
    _check(out.dtype == x.dtype and out.shape == x.shape, "out like x")
    fields = _common_fields(x, weight, bias, out, silu_activation)
    fields |= {"conv_state_ptr": conv_state.data_ptr(), "conv_state_len": length}
    for axis, position in (("batch", 0), ("c", 1), ("l", 2)):
        fields[f"conv_state_{axis}_stride"] = conv_state.stride(position)
    for field, one in (
        ("cache_seqlens", cache_seqlens),
        ("conv_state_indices_ptr", conv_state_indices),
    ):
        if one is not None:
            _check(one.dtype == torch.int32 and one.shape == x.shape[:1], f"int32 {field}")
            _check(one.stride(0) == 1 and one.device == x.device, f"{field} without gaps")
            fields[field] = one.data_ptr()
    _run("conv_update", _Params(**fields), x, weight, False)
