"""`flashvar.merge_states`: attention over all keys from attentions over disjoint parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashvar.ops.dispatch_modes import are_plain, is_compiling, no_dispatch_mode_active
from flashvar.ops.dispatched import dispatched
from flashvar.ops.merge_states.autograd import forward_of_plain
from flashvar.ops.merge_states.inputs import Layout, check, check_kinds, given
from flashvar.ops.merge_states.sharding import register_sharding_rules
from flashvar.ops.merge_states.torch_library import merge_states_fwd
from flashvar.ops.sharding import are_dtensors
from flashvar.selection.request import BackendName


def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    layout: Layout = "bshd",
    backend: BackendName = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention results of the same queries over disjoint sets of keys.

    This is the last step of Flash-Decoding (Dao et al. 2023). The result equals attention over all
    of the keys. Each part is what `flashvar.attention(..., return_lse=True)` returns for one set:

        lse = log(sum(exp(lses[i])))
        out = sum(exp(lses[i] - lse) * outs[i])

    Sums are in float32 (float64 for float64 parts) and in a fixed order, so results have the same
    bits on every run. Every out and lse has gradients of any order, and forward-mode derivatives.
    Autocast casts nothing.

    Args:
        outs: The outputs of the parts, at least one: [batch, seqlen, heads, head_dim] each, or
            packed [total, heads, head_dim]; or one tensor with the parts stacked in dimension 0.
            All have one dtype: bfloat16, float16 or float32, on the CPU also float64. Any head dim
            and any strides; parts that are not contiguous in the last dimension, or whose strides
            differ from those of the others, are copied. On CUDA devices lists of more than 224
            parts (more than 8 through Triton) are copied too; a stacked tensor never is.
        lses: Their natural log-sum-exps: [batch, heads, seqlen] each, or packed [heads, total]; or
            one tensor with the parts stacked in dimension 0. float32; with float64 outs also
            float64.
        layout: "bshd" for the shapes above; "bhsd" if outs and the output are [batch, heads,
            seqlen, head_dim]; "bhsd->bshd" if only outs are.
        backend: "auto" takes the first of cuda, triton and reference that supports the call. A
            named backend computes the call or raises; "reference" is plain torch operations.

    Returns:
        The merged output, contiguous, in the dtype of outs, and its log-sum-exp in the dtype of
        lses. A part has weight 0 in a row where its lse is -inf, or so far below the highest that
        the exponential of the difference is 0; its out is then ignored, even NaN. A row that is
        -inf in every part gives 0 and -inf. A NaN among the lses of a row gives NaN and NaN; +inf
        among them gives NaN and +inf.

    Raises:
        InvalidInputError: a shape, dtype, device or option is not supported (ShapeError,
            DtypeError, DeviceError and LayoutError are subclasses).
        BackendUnavailableError: no backend supports the call; the message has the reason for each.
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
    if not is_compiling() and are_dtensors("merge_states", _named(out_list, lse_list)):
        check(out_list, lse_list, stacked, layout)  # so that errors are not those of DTensor
    options = (stacked, layout, backend)
    out, lse = dispatched(merge_states_fwd, out_list, lse_list, *options)
    return out, lse


def _named(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = (("outs", outs), ("lses", lses))
    return {f"{name}[{part}]": x for name, xs in parts for part, x in enumerate(xs)}
