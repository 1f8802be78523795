"""flashvar as an attention backend of diffusers.

    import flashvar.integrations.diffusers

    flashvar.integrations.diffusers.register()
    pipe.transformer.set_attention_backend("flashvar")

Or use diffusers' context manager, `attention_backend("flashvar")`.

Models whose processors call scaled_dot_product_attention directly, such as U-Nets, have no
attention backends: use `flashvar.integrations.torch.activate` for them.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

import torch

from flashvar.integrations.fallback import report_fallback
from flashvar.integrations.requirement import unmet
from flashvar.integrations.torch.attribute import REPLACED, is_replaced_by_others
from flashvar.integrations.torch.sdpa import attend, why_not
from flashvar.ops.dispatch_modes import is_compiling

__all__ = ["NAME", "register"]

NAME: Final = "flashvar"
_OLDEST: Final = "0.35"


def register() -> None:
    """Add "flashvar" to the attention backends of diffusers; a second call does nothing.

    Raises:
        IntegrationError: diffusers is missing, or has no attention backends yet.
    """
    try:
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
        names: Any = dispatch.AttentionBackendName
        registry: Any = dispatch._AttentionBackendRegistry
    except (ImportError, AttributeError) as error:
        raise unmet("diffusers", _OLDEST, str(error)) from error
    if NAME in names.__members__.values():
        return
    options = {"supports_context_parallel": True}  # as the native backend; 0.35 asks nobody
    if not options.keys() <= inspect.signature(registry.register).parameters.keys():
        options = {}
    registry.register(_member(names), **options)(_backend_of(registry, names.NATIVE))


def _member(names: Any) -> Any:
    """A new member of the enumeration of backends, which has no public way to add one."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = member
    names._member_names_.append(member._name_)
    names._value2member_map_[NAME] = member
    return member


def _backend_of(registry: Any, native: Any) -> Any:
    """The function that diffusers calls; it passes arguments by name."""

    def flashvar_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        mask = attn_mask
        if mask is not None and mask.dim() == 2 and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None]  # a mask of keys, [batch, keys]
        if _parallel_config is not None:
            reason: str | None = "context parallelism"
        elif is_replaced_by_others():
            reason = REPLACED
        elif return_lse:
            reason = "the log-sum-exp is wanted too"
        else:
            reason = why_not(
                query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, "bshd", "auto"
            )
        if reason is None:
            return attend(query, key, value, mask, dropout_p, is_causal, scale, "bshd", "auto")
        if not is_compiling():
            report_fallback("diffusers", reason, "its native backend")
        given = {
            "query": query,
            "key": key,
            "value": value,
            "attn_mask": mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "return_lse": return_lse,
            "_parallel_config": _parallel_config,
        }
        # Older versions take fewer, and pass none of those that they do not take.
        taken = registry._supported_arg_names[native]
        return registry._backends[native](**{name: given[name] for name in given if name in taken})

    return flashvar_attention
