"""A package `fla` with the functions and signatures of flash-linear-attention, which say who ran.

In `before` the names, order and places are those of 0.5.1, else of 0.6.0.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashvar.compat.stand_in import modules_of


def functions(before: bool) -> dict[str, Callable[..., Any]]:
    """By name; each returns its own name and what it got."""
    indices = "" if before else "chunk_indices=None, "
    heads = {
        "chunk_gated_delta_rule": (
            "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
            "use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
            "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
            f"{indices}cp_context=None, **kwargs"
        ),
        "fused_recurrent_gated_delta_rule": (
            "q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, "
            "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
            "A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
            "state_v_first=False, cu_seqlens=None, **kwargs"
        ),
        "chunk_delta_rule": (
            "q, k, v, beta, scale=None, initial_state=None, output_final_state=False, "
            "use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs"
        ),
        "fused_recurrent_delta_rule": (
            "q, k, v, beta=None, scale=None, initial_state=None, output_final_state=False, "
            "use_qk_l2norm_in_kernel=False, cu_seqlens=None"
        ),
        "causal_conv1d": (
            "x, weight=None, bias=None, residual=None, initial_state=None, "
            "output_final_state=False, activation=None, backend='triton', cu_seqlens=None, "
            "cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs"
        ),
        "causal_conv1d_update": (
            "x, cache, residual=None, weight=None, bias=None, activation=None"
        ),
    }
    if not before:
        heads["fast_causal_conv1d_fn"] = (
            "x, weight=None, bias=None, residual=None, initial_state=None, "
            "output_final_state=False, activation=None, cu_seqlens=None, cu_seqlens_cpu=None, "
            "chunk_indices=None, seq_idx=None"
        )
    found = {}
    for name, head in heads.items():
        home = "fla.ops" if "rule" in name else "fla.modules.convolution"
        names: dict[str, Any] = {"__name__": home}
        exec(f"def {name}({head}):\n    return {name!r}, dict(locals())", names)
        # As decorators of flash-linear-attention do.
        plain = names[name]
        found[name] = functools.wraps(plain)(functools.partial(_called, plain))
    return found


def _called(plain: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return plain(*arguments, **options)


def put(before: bool) -> dict[str, ModuleType]:
    """Put the package into sys.modules, with modules that have bound functions by name."""
    made = functions(before)
    gated = {n: made[n] for n in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")}
    plain = {n: made[n] for n in ("chunk_delta_rule", "fused_recurrent_delta_rule")}
    convolution = {n: made[n] for n in ("causal_conv1d", "causal_conv1d_update")}
    fast = {n: made[n] for n in made if n.startswith("fast")}
    chunk = {**gated, "chunk_gdn": gated["chunk_gated_delta_rule"]}
    contents: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {**chunk, **plain},
        "fla.ops.gated_delta_rule": chunk,
        "fla.ops.gated_delta_rule.chunk": chunk,
        "fla.ops.delta_rule": plain,
        "fla.modules": {},
        "fla.modules.convolution": {**convolution, **fast},
        "fla.layers": {},
        "fla.layers.gated_deltanet": {**gated, "causal_conv1d": made["causal_conv1d"]},
        "a_model_of_someone": {"rule": gated["chunk_gated_delta_rule"]},
    }
    if before:
        contents["fla.modules.conv"] = {"causal_conv1d": made["causal_conv1d"]}
        contents["fla.modules.conv.causal_conv1d"] = {"causal_conv1d": made["causal_conv1d"]}
    else:
        contents["fla.modules.causal_conv1d"] = convolution
        contents["fla.modules.causal_conv1d.backends"] = fast
    modules = modules_of(contents)
    sys.modules.update(modules)
    return modules


def installed() -> bool:
    """Whether there is a real one."""
    return importlib.util.find_spec("fla") is not None
