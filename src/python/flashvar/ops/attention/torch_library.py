"""Registers attention with torch: schemas, implementations, fakes, derivatives, batching rules.

Uses `Library.define` and `impl`, which cost 2 us a call; `custom_op` costs 11 us. Calls that are
traced, compiled, exported, transformed or intercepted by a mode go through these ops.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.ops import traced_writes  # noqa: F401 (exported graphs of integrations have its op)
from flashvar.ops.attention import run
from flashvar.ops.attention.autograd import backward_at_autograd_key, forward_at_autograd_key
from flashvar.ops.attention.flops import backward_flops, forward_flops
from flashvar.ops.attention.paged import attention_paged as _attention_paged
from flashvar.ops.attention.paged import attention_paged_fake
from flashvar.ops.attention.run import FiveGradients, split
from flashvar.ops.attention.validate import inspect_symbolic
from flashvar.ops.attention.vmap import backward_batched, forward_batched
from flashvar.ops.flop_formulas import add

_LIBRARY: Final = torch.library.Library("flashvar", "DEF")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)

_ARGUMENTS: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "bool causal, float? scale, SymInt window_left, SymInt window_right, float softcap, "
    "float dropout_p, bool deterministic, str layout, str backend, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k"
)
_LIBRARY.define(f"attention_fwd({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
# grad_bias is empty unless wants_bias; likewise grad_sinks.
_LIBRARY.define(
    "attention_bwd(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool wants_bias, "
    f"bool wants_sinks, {_ARGUMENTS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, "
    "Tensor grad_bias, Tensor grad_sinks)",
    tags=_TAGS,
)
# k and v are a cache; see ops/attention/paged.py.
_LIBRARY.define(
    "attention_paged(Tensor q, Tensor k, Tensor v, Tensor? slots, Tensor? table, Tensor before, "
    "Tensor? begins, Tensor? alibi_slopes, Tensor? cu_seqlens_q, SymInt new, Tensor lengths, "
    "bool causal, float? scale, SymInt window_left, SymInt window_right, float softcap, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)


def _attention_fwd_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, options = split(arguments)
    problem = inspect_symbolic(inputs, options)
    q = inputs.q
    return (
        q.new_empty(problem.out_shape),
        q.new_empty(problem.lse_shape, dtype=problem.lse_dtype),
    )


def _attention_bwd_fake(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wants_bias: bool,
    wants_sinks: bool,
    *arguments: Any,
) -> FiveGradients:
    q, k, v, bias, sinks = split(arguments)[0][:5]
    of_bias, of_sinks = (
        x.new_empty(x.shape) if wanted and x is not None else lse.new_empty(0)
        for x, wanted in ((bias, wants_bias), (sinks, wants_sinks))
    )
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_bias, of_sinks


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_fwd", run.forward, _key)
    _LIBRARY.impl("attention_bwd", run.backward, _key)
    _LIBRARY.impl("attention_paged", _attention_paged, _key)
torch.library.register_fake("flashvar::attention_fwd", _attention_fwd_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::attention_bwd", _attention_bwd_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::attention_paged", attention_paged_fake, lib=_LIBRARY)
_LIBRARY.impl("attention_fwd", forward_at_autograd_key, "Autograd", with_keyset=True)
_LIBRARY.impl("attention_bwd", backward_at_autograd_key, "Autograd", with_keyset=True)
torch.library.register_vmap("flashvar::attention_fwd", forward_batched, lib=_LIBRARY)
torch.library.register_vmap("flashvar::attention_bwd", backward_batched, lib=_LIBRARY)
add(
    {
        torch.ops.flashvar.attention_fwd: forward_flops,
        torch.ops.flashvar.attention_bwd: backward_flops,
    }
)

attention_fwd: Final = torch.ops.flashvar.attention_fwd.default
attention_paged: Final = torch.ops.flashvar.attention_paged.default
