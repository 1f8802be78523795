"""`flashvar.attention`: the public function, and when it may call a kernel without torch's help."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch.autograd import forward_ad

from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention_inputs import inspect
from flashvar.ops.attention_plan import plan
from flashvar.ops.torch_library import attention_fwd

Layout = Literal["bshd", "bhsd"]
BackendName = Literal["auto", "cuda", "triton", "reference"]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    layout: Layout = ...,
    backend: BackendName = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    layout: Layout = ...,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    backend: BackendName = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * q k^T + mask) v, without the matrix of scores.

    The kernels follow FlashAttention-2 (Dao 2023); sums are kept in float32.

    Gradients of q, k and v (also through the log-sum-exp) are right but slow: they are recomputed
    in plain torch operations, on the device of the inputs, whatever the backend. There are no
    second derivatives and none in forward mode.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; bfloat16 or float16, on the CPU float32 and float64
            too. Any strides, 0 among them, with a contiguous last dimension. The head dim is a
            multiple of 8 up to 256 on CUDA devices and anything on the CPU.
        k: [batch, seqlen_k, heads_kv, head_dim]; heads_q is a multiple of heads_kv, and query head
            h reads key head h // (heads_q / heads_kv). Dtype and device of q.
        v: Shape, dtype and device of k.
        causal: Hide key j from query i where j > i + seqlen_k - seqlen_q: the last query sees all.
        scale: Factor of the scores, any finite number; head_dim ** -0.5 by default.
        return_lse: Return the log-sum-exp of the scores too.
        layout: "bshd" for the shapes above, "bhsd" for [batch, heads, sequence, head_dim] in q, k,
            v and the output; neither is copied.
        backend: "auto" takes the fastest that serves. A named one serves or raises; "reference" is
            plain torch operations.

    Returns:
        The output, contiguous, in shape and dtype of q; with `return_lse` also the natural
        log-sum-exp [batch, heads_q, seqlen_q] in float32 (float64 for float64 inputs). A query that
        sees no key, or an empty sequence of keys, gives 0 and -inf.

    Raises:
        InvalidInputError: shapes, dtypes, devices, strides or options that attention does not take
            (ShapeError, DtypeError, DeviceError and LayoutError are kinds of it).
        BackendUnavailableError: nothing serves the call; the message says why for each candidate.
        BinaryError: the driver refused a launch.
    """
    if torch.compiler.is_compiling() or not _is_plain(q, k, v):
        if not torch.compiler.is_compiling():
            # Here too the words of an error are ours rather than the dispatcher's.
            inspect(q, k, v, causal=causal, scale=scale, layout=layout, backend=backend)
            _refuse_forward_mode(q, k, v)
        both = attention_fwd(q, k, v, causal, scale, layout, backend)
        return both if return_lse else both[0]
    out, lse = plan(q, k, v, causal, scale, layout, backend).run(q, k, v, return_lse)
    return out if lse is None else (out, lse)


def _is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether nothing but this call needs to know of it: then torch's dispatcher is not asked."""
    plain = torch.Tensor
    return (
        type(q) is plain
        and type(k) is plain
        and type(v) is plain
        and not (
            (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
        )
        and not q.is_meta
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def _refuse_forward_mode(*tensors: torch.Tensor) -> None:
    """Torch would take the tangent of an op that it cannot differentiate forward for 0."""
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise BackendUnavailableError(
            "flashvar.attention has no forward-mode derivative, got an input with a tangent (jvp, "
            "jacfwd or a dual tensor): use reverse mode, or "
            "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH there"
        )
