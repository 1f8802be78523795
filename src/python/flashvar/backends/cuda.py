"""Attention through a compiled binary: the C structs of `flashvar.h`, each filled in one go."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar import families, loader, manifest
from flashvar.errors import BackendUnavailableError
from flashvar.loader import Library

if TYPE_CHECKING:
    from flashvar.backends import BackwardLaunch, Launch
    from flashvar.ops.attention_problem import (
        BackwardProblem,
        BiasStrides,
        Gradients,
        Inputs,
        Problem,
    )
    from flashvar.verdicts import Verdict

_HEAD: Final = "IIiIQ"  # struct_size abi_version device dtype stream
_TENSOR: Final = "Qqqq"  # data, batch, sequence and head stride
_SIZES: Final = "qqqiiiIfI"  # batch seqlen_q seqlen_k heads_q heads_kv head_dim flags scale -
# flashvar_attention_features.
_FEATURES: Final = (
    "QQQqq"  # cu_seqlens_q cu_seqlens_k seqused_k total_q total_k
    "Qq"  # alibi_slopes alibi_batch_stride
    f"{_TENSOR}"  # bias
    "QffiiiI"  # rng dropout_p softcap window_left window_right head_dim_v bias_dtype
)
# flashvar_attention_fwd_params: q, k, v and out, then lse; behind all of it the counter.
_FORWARD: Final = struct.Struct(f"<{_HEAD}{_TENSOR * 4}Q{_SIZES}{_FEATURES}Q")
# The same in one problem: head, stream, four tensors, lse and the rest, where what never changes is
# bytes already.
_TAIL: Final = struct.Struct(f"<{_SIZES}{_FEATURES}")
_QUICK_BACKWARD: Final = struct.Struct(f"<16sQ{'Q24s' * 9}QQQQ{_TAIL.size}s")
_QUICK: Final = struct.Struct(f"<16sQ{'Q24s' * 4}Q{_TAIL.size}sQ")
# flashvar_attention_bwd_params: q, k, v, out, grad_out, grad_q, grad_k, grad_v and grad_bias, then
# lse, grad_lse, workspace and workspace_size.
_BACKWARD: Final = struct.Struct(f"<{_HEAD}{_TENSOR * 9}QQQQ{_SIZES}{_FEATURES}")
_NO_TENSOR: Final = (0, 0, 0, 0)

_ABI_VERSION: Final = manifest.ABI
_DTYPES: Final = {"bf16": 0, "fp16": 1}
_CAUSAL: Final = 1
_WINDOW_LEFT: Final = 2
_WINDOW_RIGHT: Final = 4
_DETERMINISTIC: Final = 8
_BIAS_FLOAT32: Final = 1


def prepare_attention_fwd(problem: Problem, verdict: Verdict) -> Launch:
    """Bind the binary that the verdict names and everything of the struct but the addresses."""
    library, device = _binary(problem, verdict)
    run = library.attention_fwd
    stream_of = torch._C._cuda_getCurrentRawStream
    pack, pack_tail = _QUICK.pack, _TAIL.pack
    head = struct.pack("<IIiI", _FORWARD.size, _ABI_VERSION, device, _DTYPES[problem.dtype])
    q_strides, k_strides, v_strides, out_strides = (
        struct.pack("<qqq", *strides) for strides in (problem.q, problem.k, problem.v, problem.out)
    )
    sizes = _sizes(problem)
    features = _features(problem)
    # Without any tensor behind v the rest is the same at every call.
    constant = None if _has_tensors(problem) else pack_tail(*sizes, *features(None))

    # The forward that takes the tiles of packed sequences from a counter.
    counts = (
        problem.total_q is not None
        and verdict.kernel is not None
        and verdict.kernel.family == families.SM90
    )

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        counter = torch.empty(1, dtype=torch.int32, device=out.device) if counts else None
        run(
            pack(
                head,
                stream_of(device),
                inputs[0].data_ptr(),
                q_strides,
                inputs[1].data_ptr(),
                k_strides,
                inputs[2].data_ptr(),
                v_strides,
                out.data_ptr(),
                out_strides,
                0 if lse is None else lse.data_ptr(),
                constant or pack_tail(*sizes, *features(inputs)),
                0 if counter is None else counter.data_ptr(),
            )
        )

    return launch


def prepare_attention_bwd(problem: BackwardProblem, verdict: Verdict) -> BackwardLaunch:
    """Bind the binary, and ask it once how much workspace the problem wants."""
    forward = problem.forward
    library, device = _binary(forward, verdict)
    run, workspace_of = library.attention_bwd, library.attention_bwd_workspace
    stream_of = torch._C._cuda_getCurrentRawStream
    head = struct.pack("<IIiI", _BACKWARD.size, _ABI_VERSION, device, _DTYPES[forward.dtype])
    q_strides, k_strides, v_strides, out_strides, grad_out_strides = (
        struct.pack("<qqq", *strides)
        for strides in (forward.q, forward.k, forward.v, forward.out, problem.grad_out)
    )
    grad_q_strides, grad_k_strides, grad_v_strides = (
        struct.pack("<qqq", *strides)
        for strides in (problem.grad_q, problem.grad_k, problem.grad_v)
    )
    grad_bias_strides = struct.pack("<qqq", *_bias_strides(problem.grad_bias))
    pack, pack_tail = _QUICK_BACKWARD.pack, _TAIL.pack
    sizes = _sizes(forward)
    features = _features(forward)
    constant = None if _has_tensors(forward) else pack_tail(*sizes, *features(None))
    wanted: list[int] = []

    def launch(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
    ) -> None:
        tail = constant or pack_tail(*sizes, *features(inputs))

        def packed(workspace: int, size: int) -> bytes:
            return pack(
                head,
                stream_of(device),
                inputs[0].data_ptr(),
                q_strides,
                inputs[1].data_ptr(),
                k_strides,
                inputs[2].data_ptr(),
                v_strides,
                out.data_ptr(),
                out_strides,
                grad_out.data_ptr(),
                grad_out_strides,
                grads[0].data_ptr(),
                grad_q_strides,
                grads[1].data_ptr(),
                grad_k_strides,
                grads[2].data_ptr(),
                grad_v_strides,
                _address(grads[3]),
                grad_bias_strides,
                lse.data_ptr(),
                _address(grad_lse),
                workspace,
                size,
                tail,
            )

        if not wanted:
            wanted.append(workspace_of(packed(0, 0)))
        size = wanted[0]
        if size == 0:
            run(packed(0, 0))
            return
        workspace = torch.empty(size, dtype=torch.uint8, device=inputs.q.device)
        run(packed(workspace.data_ptr(), size))

    return launch


def _binary(problem: Problem, verdict: Verdict) -> tuple[Library, int]:
    if verdict.binary is None or problem.device is None:
        raise BackendUnavailableError(
            "the cuda backend serves CUDA tensors through an installed binary, got "
            f"{verdict.candidate}: run `flashvar doctor` to see what is installed"
        )
    return loader.load(verdict.binary), problem.device


def _sizes(problem: Problem) -> tuple[float, ...]:
    flags = _CAUSAL if problem.window_right == 0 else 0
    flags |= _WINDOW_LEFT if problem.window_left >= 0 else 0
    flags |= _WINDOW_RIGHT if problem.window_right > 0 else 0
    flags |= _DETERMINISTIC if problem.deterministic else 0
    return (
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads_q,
        problem.heads_kv,
        problem.head_dim,
        flags,
        problem.scale,
        0,
    )


def _has_tensors(problem: Problem) -> bool:
    return (
        problem.total_q is not None
        or problem.has_seqused_k
        or problem.bias is not None
        or problem.alibi_batch_stride is not None
        or problem.dropout_p > 0
    )


def _features(problem: Problem) -> Any:
    """A function that gives the features with the addresses of a call; None has no tensors."""
    totals = (problem.total_q or 0, problem.total_k or 0)
    alibi_stride = problem.alibi_batch_stride or 0
    tail = (
        problem.dropout_p,
        problem.softcap,
        max(problem.window_left, 0),
        max(problem.window_right, 0),
        # 0 is the same, and what a binary from before the features may be given.
        problem.head_dim_v if problem.head_dim_v != problem.head_dim else 0,
        _BIAS_FLOAT32 if problem.bias_dtype == "fp32" else 0,
    )

    def features(inputs: Inputs | None) -> tuple[float, ...]:
        if inputs is None:
            return (0, 0, 0, *totals, 0, alibi_stride, *_NO_TENSOR, 0, *tail)
        return (
            _address(inputs.cu_seqlens_q),
            _address(inputs.cu_seqlens_k),
            _address(inputs.seqused_k),
            *totals,
            _address(inputs.alibi_slopes),
            alibi_stride,
            *_bias(inputs.bias, problem.bias),
            # The ABI has the generator's state exactly where something is dropped.
            _address(inputs.rng_state) if problem.dropout_p > 0 else 0,
            *tail,
        )

    return features


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bias(tensor: torch.Tensor | None, strides: BiasStrides | None) -> tuple[int, int, int, int]:
    return (_address(tensor), *_bias_strides(strides))


def _bias_strides(strides: BiasStrides | None) -> tuple[int, int, int]:
    """In the order of the struct: batch, query, heads."""
    return (0, 0, 0) if strides is None else (strides.batch, strides.query, strides.heads)
