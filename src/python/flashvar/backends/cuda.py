"""Attention through a compiled binary: the C struct of `flashvar.h`, filled in one go."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import torch

from flashvar import loader, manifest
from flashvar.errors import BackendUnavailableError

if TYPE_CHECKING:
    from flashvar.backends import Launch
    from flashvar.ops.attention_inputs import Problem
    from flashvar.verdicts import Verdict

# flashvar_attention_fwd_params, field by field.
_PARAMS: Final = struct.Struct(
    "<"
    "IIiI"  # struct_size abi_version device dtype
    "Q"  # stream
    "Qqqq"  # q: data, batch, sequence and head stride
    "Qqqq"  # k
    "Qqqq"  # v
    "Qqqq"  # out
    "Q"  # lse
    "qqq"  # batch seqlen_q seqlen_k
    "iiiI"  # heads_q heads_kv head_dim flags
    "fI"  # scale reserved
)
_ABI_VERSION: Final = manifest.ABI
_DTYPES: Final = {"bf16": 0, "fp16": 1}
_CAUSAL: Final = 1


def prepare_attention_fwd(problem: Problem, verdict: Verdict) -> Launch:
    """Bind the binary that the verdict names and everything of the struct but the addresses."""
    if verdict.binary is None or problem.device is None:
        raise BackendUnavailableError(
            "the cuda backend serves CUDA tensors through an installed binary, got "
            f"{verdict.candidate}: run `flashvar doctor` to see what is installed"
        )
    run = loader.load(verdict.binary).attention_fwd
    pack = _PARAMS.pack
    stream_of = torch._C._cuda_getCurrentRawStream
    device = problem.device
    head = (_PARAMS.size, _ABI_VERSION, device, _DTYPES[problem.dtype])
    q_strides, k_strides, v_strides, out_strides = problem.q, problem.k, problem.v, problem.out
    tail = (
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads_q,
        problem.heads_kv,
        problem.head_dim,
        _CAUSAL if problem.causal else 0,
        problem.scale,
        0,
    )

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        run(
            pack(
                *head,
                stream_of(device),
                q.data_ptr(),
                *q_strides,
                k.data_ptr(),
                *k_strides,
                v.data_ptr(),
                *v_strides,
                out.data_ptr(),
                *out_strides,
                0 if lse is None else lse.data_ptr(),
                *tail,
            )
        )

    return launch
