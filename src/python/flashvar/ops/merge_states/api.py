"""`flashvar.merge_states`: attention over all keys from attentions over disjoint parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from flashvar.ops.dispatch_modes import are_plain, is_compiling, no_dispatch_mode_active
from flashvar.ops.merge_states.autograd import forward_of_plain
from flashvar.ops.merge_states.inputs import check_kinds, given
from flashvar.ops.merge_states.sharding import register_sharding_rules
from flashvar.ops.merge_states.torch_library import merge_states_fwd


def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    layout: Literal["bshd", "bhsd", "bhsd->bshd"] = "bshd",
    backend: Literal["auto", "cuda", "triton", "reference"] = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attentions of the same queries over disjoint keys: what attention over all gives.

    Each part is what `flashvar.attention(..., return_lse=True)` returns for some of the keys:

        lse = log(sum(exp(lses[i])))
        out = sum(exp(lses[i] - lse) * outs[i])

    Sums are kept in float32, float64 for float64 parts, and made in one order: the same bits on
    every run. There are gradients of every out and lse, of any order and kind. Under autocast
    nothing is cast.

    Args:
        outs: The outputs of the parts, at least one: [batch, seqlen, heads, head_dim] each, or
            packed [total, heads, head_dim]; or one tensor with the parts in front. bfloat16,
            float16 or float32, on the CPU float64 too, and one dtype for all. Any head dim; any
            strides, but parts that are not contiguous in their last dimension, or not laid out as
            the other parts are, are copied. On CUDA devices lists of more than 224 parts are
            copied too, and of more than 8 through Triton; a stacked tensor never is.
        lses: Their natural log-sum-exps: [batch, heads, seqlen] each, or packed [heads, total]; or
            one tensor with the parts in front. float32; beside float64 outs float64 too.
        layout: "bshd" for the shapes above, "bhsd" for [batch, heads, seqlen, head_dim] in outs
            and the output, "bhsd->bshd" for that in outs alone.
        backend: "auto" takes the fastest that serves. A named one serves or raises; "reference" is
            plain torch operations.

    Returns:
        The merged output, contiguous, in the dtype of outs, and its log-sum-exp in the dtype of
        lses. A part of weight 0 counts for nothing, whatever its out holds, NaN too: where its lse
        is -inf, or so far below the highest that the exponential of the difference is 0. Rows that
        are -inf in every part give 0 and -inf. A NaN among the lses of a row gives NaN and NaN;
        +inf among them gives NaN and +inf.

    Raises:
        InvalidInputError: shapes, dtypes, devices or options that merge_states does not take
            (ShapeError, DtypeError, DeviceError and LayoutError are kinds of it).
        BackendUnavailableError: nothing serves the call; the message says why for each candidate.
        BinaryError: the driver refused a launch.
    """
    out_list, lse_list, stacked = given(outs, lses)
    if (
        out_list
        and not is_compiling()
        and no_dispatch_mode_active()
        and are_plain(*out_list, *lse_list)
    ):
        return forward_of_plain(out_list, lse_list, stacked, layout, backend)
    check_kinds(out_list, lse_list, layout, backend)
    register_sharding_rules()
    out, lse = merge_states_fwd(out_list, lse_list, stacked, layout, backend)
    return out, lse
