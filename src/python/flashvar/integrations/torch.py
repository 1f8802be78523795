"""Flashvar behind torch.nn.functional.scaled_dot_product_attention.

    import flashvar.integrations.torch

    with flashvar.integrations.torch.activate():    # or activate() ... deactivate()
        model(batch)

What flashvar does not serve goes to torch's own, and `last_reason` says why.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Final

import torch
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from flashvar.integrations import torch_flash
from flashvar.integrations.declining import decline
from flashvar.integrations.sdpa import attend, attend_at_once, why_not
from flashvar.integrations.serving import named
from flashvar.ops.attention import BackendName, attention
from flashvar.ops.attention_options import plain_scale
from flashvar.ops.attention_watchers import is_compiling

__all__ = ["SERVED", "Activation", "activate", "active", "deactivate", "last_reason", "report"]

SERVED: Final = "served by flashvar"
_ON_CPU: Final = (
    "CPU tensors, where torch's own is faster; activate(backend='reference') takes them"
)
_SWITCHED_OFF: Final = "flash attention is switched off (torch.nn.attention.sdpa_kernel)"

_torchs_own: Final = functional.scaled_dot_product_attention

_stack: list[Activation] = []
# What the innermost activation says, where a call finds it fastest.
_backend: BackendName = "auto"
_on_cpu = False
_had_fastpath = True
_counts: Counter[str] = Counter()
_last: str | None = None


class Activation:
    """One `activate()`: a context manager, which undoes it at its end."""

    def __init__(self, backend: BackendName) -> None:
        self.backend = backend
        self.on_cpu = named(backend) != "auto"

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self in _stack:
            _stack.remove(self)
            _switch()


def activate(backend: BackendName = "auto") -> Activation:
    """Put flashvar behind torch.nn.functional.scaled_dot_product_attention, in this process.

    Every call is judged by itself. Calls that flashvar does not serve go to torch's own, with one
    line in the log for each reason, or raise with FLASHVAR_STRICT=1; calls on the CPU go there
    silently unless a backend is named. The fused inference path of torch.nn.MultiheadAttention and
    TransformerEncoder, which asks nobody, is switched off meanwhile.

    Modules that took the function out of torch.nn.functional before keep torch's own. Where torch
    has a registry of flash attentions (torch.nn.attention.register_flash_attention_impl), flashvar
    becomes the one in use, so that they too reach it on CUDA devices when torch chooses flash.

    Args:
        backend: As in `flashvar.attention`; "reference" serves on the CPU too.

    Returns:
        A context manager that undoes this at its end; without `with`, it lasts until `deactivate`.

    Raises:
        ConfigurationError: the backend has no such name.
    """
    activation = Activation(backend)
    _stack.append(activation)
    _switch()
    return activation


def deactivate() -> None:
    """Undo every `activate`; does nothing where there was none."""
    if _stack:
        _stack.clear()
        _switch()


def active() -> bool:
    """Whether scaled_dot_product_attention is flashvar's now."""
    return bool(_stack)


def last_reason() -> str | None:
    """Why the last call went to torch's own; None where flashvar served it, or before any.

    Calls in code that torch.compile compiled are not counted.
    """
    return _last


def report() -> dict[str, int]:
    """How many calls there were since the first `activate`, by what became of them."""
    return dict(_counts)


def _switch() -> None:
    """Make torch as the innermost activation wants it."""
    global _backend, _on_cpu, _had_fastpath
    ours = functional.scaled_dot_product_attention is _scaled_dot_product_attention
    if not _stack:
        functional.scaled_dot_product_attention = _torchs_own
        torch.backends.mha.set_fastpath_enabled(_had_fastpath)
        torch_flash.switch_off()
        return
    _backend, _on_cpu = _stack[-1].backend, _stack[-1].on_cpu
    if not ours:
        _counts.clear()
        _had_fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        torch_flash.switch_on()
        functional.scaled_dot_product_attention = _scaled_dot_product_attention


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention, by flashvar where it serves (flashvar.integrations.torch)."""
    bottom_right = False
    if attn_mask is None and dropout_p == 0.0 and _takes(query):
        out = attend_at_once(query, key, value, is_causal, scale, _backend)
        if out is not None:
            _note(None)
            return out
    if attn_mask is not None and isinstance(attn_mask, CausalBias) and not is_causal:
        square = attn_mask.seq_len_q == attn_mask.seq_len_kv
        bottom_right = attn_mask.variant == CausalVariant.LOWER_RIGHT and not square
        is_causal, attn_mask = True, None
    reason = _why_not(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if not is_compiling():
        _note(reason)
    if reason is None and bottom_right:
        return attention(
            query,
            key,
            value,
            causal=True,
            scale=plain_scale(scale),
            dropout_p=dropout_p,
            layout="bhsd",
            backend=_backend,
        )
    if reason is None:
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, "bhsd", _backend)
    if bottom_right:
        shape = query.shape[-2], key.shape[-2]
        seen = torch.ones(shape, dtype=torch.bool, device=query.device)
        attn_mask, is_causal = seen.tril(shape[1] - shape[0]), False
    return _torchs_own(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    gqa: bool,
) -> str | None:
    if not _takes(q):
        return _SWITCHED_OFF if _on_cpu or q.device.type != "cpu" else _ON_CPU
    return why_not(q, k, v, mask, dropout_p, causal, gqa, "bhsd", _backend)


def _takes(q: torch.Tensor) -> bool:
    """Whether calls of such tensors are flashvar's to look at."""
    return (_on_cpu or q.device.type != "cpu") and not _flash_is_off()


def _flash_is_off() -> bool:
    return not torch._C._get_flash_sdp_enabled()


# While torch.compile traces, what holds then is kept, as torch's own choice of a kernel is.
_flash_is_off._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _note(reason: str | None) -> None:
    global _last
    _last = reason
    _counts[reason or SERVED] += 1
    if reason is not None and reason is not _ON_CPU:
        decline("scaled_dot_product_attention", reason, "torch's own")


# torch.jit.script takes it for torch's own.
if hasattr(torch.jit, "_builtins"):
    torch.jit._builtins._register_builtin(
        _scaled_dot_product_attention, "aten::scaled_dot_product_attention"
    )
