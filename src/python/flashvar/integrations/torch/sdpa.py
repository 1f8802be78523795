"""scaled_dot_product_attention in terms of flashvar.attention.

The semantics are torch's: a causal mask is aligned to the top left corner, a boolean mask is True
where a key is visible, and masks are broadcast.
"""

from __future__ import annotations

from operator import index
from typing import Any, Final, TypeAlias

import torch
from torch.autograd import forward_ad

from flashvar.integrations.support import unsupported
from flashvar.ops.arguments import is_bool, is_number, is_scale
from flashvar.ops.attention.api import attention
from flashvar.ops.attention.call import call_plain, run_plan
from flashvar.ops.attention.options import ALL_DROPPED, Layout, plain_number
from flashvar.ops.attention.plan import Plan, plan
from flashvar.ops.attention.problem import NO_TENSORS, pack_options
from flashvar.ops.autocast import dtype_on
from flashvar.ops.dispatch_modes import (
    PLAIN,
    are_plain,
    autocasts,
    is_compiling,
    no_dispatch_mode_active,
)
from flashvar.ops.plans import Plans
from flashvar.selection.request import BackendName

__all__ = ["attend", "attend_fast", "attend_with_lse", "non_plain_type", "why_not"]

_grad_enabled: Final = torch.is_grad_enabled

# The plan of a call, and whether rows come before heads in memory.
_Recent: TypeAlias = tuple[Plan, bool]
_recent: Final[Plans[_Recent]] = Plans()


def attend_fast(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    backend: BackendName,
    on_cpu: bool = True,
) -> torch.Tensor | None:
    """Fast path of `attend`: q, k and v have one shape [batch, heads, sequence, head_dim].

    Dtype and device are the same too, and autocast would cast none of them. Returns None where
    `why_not` must decide, and on the CPU without `on_cpu`.
    """
    # Plans are kept by the scale: a tensor's hash does not change with its value.
    usual = scale is None or type(scale) is float or is_number(scale)
    if is_compiling() or not usual:
        return None
    # What autocast casts depends on its dtypes.
    dtypes = (dtype_on("cpu"), dtype_on("cuda")) if autocasts() else None
    key = (causal, type(causal), scale, type(scale), backend, on_cpu, dtypes)
    known = _known(key, q, k, v)
    if known is not None:
        (found, rows_first), records = known
        out, _ = run_plan(found, records, (q, k, v), False)
        return out.transpose(1, 2) if rows_first else out
    if not are_plain(q, k, v) or not is_bool(causal) or not is_scale(scale):
        return None
    if q.is_nested or k.is_nested or v.is_nested or not no_dispatch_mode_active():
        return None
    if not _are_strided(q, k, v):
        return None
    shape, dtype, device = q.shape, q.dtype, q.device
    if not on_cpu and device.type == "cpu":
        return None
    if shape != k.shape or shape != v.shape or len(shape) != 4 or 0 in shape:
        return None
    if k.dtype is not dtype or v.dtype is not dtype or k.device != device or v.device != device:
        return None
    if dtypes is not None and _dtype_after(dtype_on(device.type), q) is not dtype:
        return None
    strides = q.stride()
    if strides[3] != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return None
    backward = (q.requires_grad or k.requires_grad or v.requires_grad) and _grad_enabled()
    if unsupported(dtype, device, shape[3], shape[3], backward, backend) is not None:
        return None
    rows_first = _has_rows_first(shape, strides)
    layout = "bhsd->bshd" if rows_first else "bhsd"
    options = pack_options(causal, scale, -1, -1, 0.0, 0.0, False, layout, backend)
    out, _ = call_plain((q, k, v), options, False)
    _recent.remember(key, (q, k, v), (plan(q, k, v, NO_TENSORS, options), rows_first))
    return out.transpose(1, 2) if rows_first else out


def _known(key: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[_Recent, bool] | None:
    """The plan of a recent call like this one, and whether autograd records it."""
    try:
        return _recent.recent(key, tensors)
    except TypeError:  # an option that cannot be hashed
        return None


def why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    layout: Layout,
    backend: BackendName,
) -> str | None:
    """Why flashvar does not run a call; None if it does, and `attend` may be called."""
    kind = non_plain_type(q) or non_plain_type(k) or non_plain_type(v)
    if kind is not None:
        return f"a tensor has the type {kind.__name__}"
    if q.is_nested or k.is_nested or v.is_nested or not _are_strided(q, k, v):
        return "a tensor is nested or sparse"
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or len(v_shape) != 4:
        return f"tensors of {len(q_shape)}, {len(k_shape)} and {len(v_shape)} dimensions, not 4"
    if not all((*q_shape, *k_shape, *v_shape)):
        return "a tensor is empty"
    heads = 1 if layout == "bhsd" else 2
    fits = k_shape == v_shape or k_shape[:3] == v_shape[:3]
    if q_shape[0] != k_shape[0] or not fits or q_shape[3] != k_shape[3]:
        return "the batch, the head dim or v does not fit, so torch would broadcast"
    if q_shape[heads] != k_shape[heads] and not (gqa and q_shape[heads] % k_shape[heads] == 0):
        return "the heads of q and k differ without enable_gqa, or k's do not divide q's"
    cast = dtype_on(q.device.type)
    dtype = _dtype_after(cast, q)
    if (
        k.device != q.device
        or v.device != q.device
        or not dtype == _dtype_after(cast, k) == _dtype_after(cast, v)
    ):
        return "q, k and v differ in dtype or device"
    if not is_bool(causal) or not is_bool(gqa):
        return "is_causal or enable_gqa is not a bool"
    if not is_scale(plain_number(scale, booleans=True)):
        return "scale is not a finite number of float32"
    probability = plain_number(dropout_p, booleans=True)
    if not is_number(probability) or not 0 <= probability < ALL_DROPPED:
        return "dropout_p is not a probability below 1"
    backward = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if mask is not None:
        reason = _why_not_mask(mask, q, k_shape, causal, layout, cast)
        if reason is not None:
            return reason
        backward = backward or (_grad_enabled() and mask.requires_grad)
    if is_compiling() or not no_dispatch_mode_active():
        if torch._C._are_functorch_transforms_active():
            return "a functorch transform, which may want second derivatives"
        if not is_compiling() and forward_ad._current_level >= 0:
            return "forward-mode derivatives may be wanted"
    # index: sizes may be symbols while a graph is traced.
    return unsupported(dtype, q.device, index(q_shape[3]), index(v_shape[3]), backward, backend)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    layout: Layout,
    backend: BackendName,
    bottom_right: bool = False,
) -> torch.Tensor:
    """Attention of a call for which `why_not` returned None.

    The output has the memory order of q, heads or rows first, because callers view it accordingly.
    Tensors are cast as autocast requires, and copied if their last dimension is not contiguous. A
    causal mask begins in the top left corner; with `bottom_right` it ends in that one.
    """
    q, k, v, options = _arguments(q, k, v, mask, causal, layout, bottom_right)
    rows_first = layout == "bhsd" and _has_rows_first(q.shape, q.stride())
    out = attention(
        q,
        k,
        v,
        scale=plain_number(scale, booleans=True),
        dropout_p=plain_number(dropout_p, booleans=True),
        layout="bhsd->bshd" if rows_first else layout,
        backend=backend,
        **options,
    )
    return out.transpose(1, 2) if rows_first else out


def attend_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` of [batch, rows, heads, head_dim], and the log-sum-exp [batch, heads, rows]."""
    q, k, v, options = _arguments(q, k, v, mask, causal, "bshd", False)
    out, lse = attention(
        q,
        k,
        v,
        scale=plain_number(scale, booleans=True),
        dropout_p=plain_number(dropout_p, booleans=True),
        return_lse=True,
        **options,
    )
    return out, lse


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    layout: Layout,
    bottom_right: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Arguments of `attention`: the tensors, and mask and causality as options."""
    cast = dtype_on(q.device.type)
    q, k, v = (_prepared(x, cast) for x in (q, k, v))
    bias, window = None, (-1, -1)
    if mask is not None:
        bias = _bias(mask.to(_dtype_after(cast, mask)), q, layout)
    if causal and not bottom_right:
        rows = 2 if layout == "bhsd" else 1
        more = q.shape[rows] - k.shape[rows]
        # flashvar's diagonal ends in the bottom right corner, torch's begins in the top left.
        if more < 0:  # no query sees the keys after the last query
            k, v = k.narrow(rows, 0, q.shape[rows]), v.narrow(rows, 0, q.shape[rows])
            bias = None if bias is None else bias.narrow(-1, 0, q.shape[rows])
        elif more > 0:
            causal, window = False, (-1, more)
    return q, k, v, {"causal": causal, "window_size": window, "bias": bias}


def _dtype_after(cast: torch.dtype | None, tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor after autocast, which does not cast float64."""
    dtype = tensor.dtype
    if cast is None or dtype == torch.float64 or not dtype.is_floating_point:
        return dtype
    return cast


def _prepared(tensor: torch.Tensor, cast: torch.dtype | None) -> torch.Tensor:
    tensor = tensor.to(_dtype_after(cast, tensor))
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _are_strided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return q.layout is k.layout is v.layout is torch.strided


def _has_rows_first(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether [batch, heads, sequence, head_dim] is [batch, sequence, heads, ...] in memory."""
    return strides[1] < strides[2] and shape[1] > 1


def non_plain_type(tensor: object) -> type | None:
    """The type of an argument that is not a plain tensor, such as a subclass; else None."""
    kind = type(tensor)
    return None if kind in PLAIN else kind


def _why_not_mask(
    mask: torch.Tensor,
    q: torch.Tensor,
    k_shape: torch.Size,
    causal: bool,
    layout: Layout,
    cast: torch.dtype | None,
) -> str | None:
    if (kind := non_plain_type(mask)) is not None:
        return f"attn_mask has the type {kind.__name__}"
    if causal:
        return "is_causal together with an attn_mask"
    if _dtype_after(cast, mask) not in (torch.bool, torch.float32, _dtype_after(cast, q)):
        return f"attn_mask of {mask.dtype} with {q.dtype}"
    if mask.device != q.device:
        return "attn_mask is on another device"
    rows = 2 if layout == "bhsd" else 1
    keys, queries = k_shape[rows], q.shape[rows]
    leading = (q.shape[3 - rows], q.shape[0])
    shape = mask.shape
    if not 2 <= len(shape) <= 4 or shape[-1] != keys or shape[-2] not in (1, queries):
        return "attn_mask does not have one column for each key"
    sizes = zip(shape[-3::-1], leading[: len(shape) - 2], strict=True)
    if any(have not in (1, want) for have, want in sizes):
        return "attn_mask does not fit batch and heads of q"
    if mask.stride(-1) != 1 and keys > 1 and mask.dtype != torch.bool:
        return "attn_mask is not contiguous in its keys"
    return None


def _bias(mask: torch.Tensor, q: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The mask as a bias of the scores, [batch or 1, heads or 1, seqlen_q, seqlen_k]."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        mask = zeros.masked_fill_(mask.logical_not(), -torch.inf)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    rows = 2 if layout == "bhsd" else 1
    return mask.expand(-1, -1, q.shape[rows], -1) if mask.shape[2] == 1 else mask
