"""Functions of `fla.ops.gated_delta_rule` and `fla.ops.delta_rule` on flashvar's gated_delta_rule.

Names, order and defaults are those of flash-linear-attention 0.6.0. What it takes behind **kwargs
has a name here, for callers such as transformers drop options that the signature does not name.
"""
# A_log is what models name the parameter.
# ruff: noqa: N803

from __future__ import annotations

import warnings
from typing import Any, Final

import torch

from flashvar.compat.fla.supported import parameters_of, require, unsupported_option
from flashvar.errors import InvalidInputError
from flashvar.ops.gated_delta_rule.api import gated_delta_rule

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
]

Results = tuple[torch.Tensor, torch.Tensor | None]

_CHUNK_SIZES: Final = (16, 32, 64)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
    seq_idx: torch.Tensor | None = None,
    **others: Any,
) -> Results:
    """The gated delta rule, with gradients of every tensor.

    `cu_seqlens_cpu` and `chunk_indices` are not needed, and `chunk_size` changes no result.
    `seq_idx` needs `cu_seqlens` beside it.
    """
    _refuse_head_first(head_first)
    _refuse_names_alone(seq_idx, cu_seqlens)
    _check_chunk_size(chunk_size)
    return _run(
        *("chunk_gated_delta_rule", q.dtype, {**others, "cp_context": cp_context}),
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias),
    )


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    seq_idx: torch.Tensor | None = None,
    **others: Any,
) -> Results:
    """The gated delta rule, with gradients. Gates of keys or values (gk, gv) are not supported."""
    _refuse_head_first(head_first or None)
    _refuse_names_alone(seq_idx, cu_seqlens)
    return _run(
        *("fused_recurrent_gated_delta_rule", v.dtype, {**others, "gk": gk, "gv": gv}),
        *(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens),
        *(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias),
    )


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    chunk_size: int = 64,
    head_first: bool | None = None,
    **others: Any,
) -> Results:
    """The delta rule, which is the gated one without gates."""
    _refuse_head_first(head_first)
    _check_chunk_size(chunk_size)
    return _run(
        *("chunk_delta_rule", q.dtype, others),
        *(q, k, v, None, beta, scale, initial_state, output_final_state, cu_seqlens),
        use_qk_l2norm_in_kernel,
    )


def fused_recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    head_first: bool = False,
    **others: Any,
) -> Results:
    """The delta rule, which is the gated one without gates."""
    _refuse_head_first(head_first or None)
    return _run(
        *("fused_recurrent_delta_rule", q.dtype, others),
        *(q, k, v, None, beta, scale, initial_state, output_final_state, cu_seqlens),
        use_qk_l2norm_in_kernel,
    )


def unsupported(options: dict[str, Any]) -> str | None:
    """Why the functions above do not run a call with these arguments; None where they do."""
    beta = options.get("beta")
    if beta is not None and beta.dim() == 4:
        return "beta has a value for each channel of v"
    return unsupported_option(options, _SUPPORTED, options["q"])


_SUPPORTED: Final = parameters_of(
    *(chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
    *(chunk_delta_rule, fused_recurrent_delta_rule),
)


def _refuse_head_first(head_first: bool | None) -> None:
    """Raise what flash-linear-attention raises."""
    if head_first is not None:
        raise DeprecationWarning(
            f"head_first is not an option any more, found {head_first}: pass tensors as [batch, "
            "seqlen, heads, ...], and leave it out"
        )


def _refuse_names_alone(seq_idx: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> None:
    """Refuse packed sequences that would be computed as one.

    Transformers' models pass the names of sequences to whatever has the parameter.
    """
    if seq_idx is not None and cu_seqlens is None:
        raise InvalidInputError(
            "packed sequences must come as cu_seqlens, found seq_idx alone: pass their offsets, to "
            "a model of transformers as cu_seq_lens_q"
        )


def _check_chunk_size(chunk_size: Any) -> None:
    if chunk_size not in _CHUNK_SIZES:
        raise InvalidInputError(
            f"chunk_size must be one of {', '.join(map(str, _CHUNK_SIZES))}, found {chunk_size!r}: "
            "leave it out, it changes no result"
        )


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """state_v_first by its name or by the deprecated one."""
    if transpose_state_layout is None:
        return bool(state_v_first)
    if state_v_first:
        raise InvalidInputError(
            "the order of states must be named once, found state_v_first and the deprecated "
            "transpose_state_layout: leave the second out"
        )
    warnings.warn(
        "transpose_state_layout is deprecated: pass state_v_first", DeprecationWarning, stacklevel=3
    )
    return bool(transpose_state_layout)


def _gate(
    used: bool, a_log: torch.Tensor | None, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not used:
        return None, None
    if a_log is None:
        raise InvalidInputError(
            "A_log must be given with use_gate_in_kernel=True, found None: pass it, or the gate "
            "itself without use_gate_in_kernel"
        )
    return a_log, dt_bias


def _run(
    function: str,
    out_dtype: torch.dtype,
    others: dict[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool | None,
    cu_seqlens: torch.Tensor | None,
    qk_l2norm: bool,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    *,
    state_v_first: bool = False,
    gate: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Results:
    """The op, of tensors of any mixture of dtypes: they are widened, which is exact.

    `others` are the options of `function` that the op does not have.
    """
    require(function, unsupported({**others, "q": q, "beta": beta}))
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if beta is None:
        beta = torch.ones_like(v[..., 0])

    def widened(x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None or x.dtype == dtype else x.to(wide)

    out, state = gated_delta_rule(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        widened(g),
        beta if beta.dtype == dtype else beta.to(wide),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.to(wide),
        return_final_state=bool(output_final_state),
        state_layout="vk" if state_v_first else "kv",
        cu_seqlens=cu_seqlens,
        qk_l2norm=bool(qk_l2norm),
        beta_sigmoid=bool(beta_sigmoid),
        allow_neg_eigval=bool(allow_neg_eigval),
        A_log=widened(gate[0]),
        dt_bias=widened(gate[1]),
    )
    return out.to(out_dtype), state


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
