"""Fallback to the model's own attention, for calls that flashvar does not support."""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashvar.errors import BackendUnavailableError
from flashvar.integrations.fallback import report_fallback
from flashvar.integrations.transformers.visibility import Visibility, as_bias

# Arguments that only eager attention supports, not sdpa.
ONLY_EAGER: Final = ("output_attentions", "head_mask", "softcap", "s_aux", "sinks")
# Keys of a call that are not in its tensors or mask, so that no other path sees them either.
_SELECTED: Final = (
    "masks the keys that it does not select only for eager and sdpa",
    "load the model with attn_implementation='sdpa' or 'eager'",
)
ONLY_ITS_OWN: Final = {
    "indices": _SELECTED,
    "block_indices": _SELECTED,
    "block_table": (
        "leaves earlier keys in a paged cache",
        "set max_blocks_per_request=0 in the ContinuousBatchingConfig",
    ),
}


class Call(NamedTuple):
    """The tensors and numbers of a call, as transformers passes them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dropout: float
    scaling: float | None
    softcap: float | None
    s_aux: torch.Tensor | None
    position_bias: torch.Tensor | None


def fall_back(
    reason: str, module: torch.nn.Module, call: Call, visibility: Visibility, others: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's sdpa attention, or its eager attention if only that supports the call.

    Logs the reason of the fallback once.

    Raises:
        BackendUnavailableError: FLASHVAR_STRICT=1; or the call needs eager attention, which the
            model's file does not have; or neither eager attention nor sdpa supports the call.
    """
    name = type(module).__name__
    for argument, (fact, instead) in ONLY_ITS_OWN.items():
        if others.get(argument) is not None:
            raise BackendUnavailableError(
                f"{name} {fact}, found a call of flashvar ({reason}): {instead}"
            )
    keys = visibility.keys
    call = call._replace(key=call.key[:, :, :keys], value=call.value[:, :, :keys])
    if call.position_bias is not None:
        call = call._replace(position_bias=call.position_bias[..., :keys])
    options = {**others, **call._asdict()}
    options = {word: value for word, value in options.items() if value is not None}
    only = [word for word in ONLY_EAGER if options.get(word, False) is not False]
    report_fallback(
        name, reason, "the model's eager attention" if only else "the model's sdpa attention"
    )
    forward = sdpa_attention_forward
    if only:
        file = sys.modules.get(type(module).__module__)
        forward = getattr(file, "eager_attention_forward", None)
        if forward is None:
            raise BackendUnavailableError(
                f"{name} has no eager attention to use instead of flashvar, found a call with "
                f"{' and '.join(only)}: leave that out, or load the model without flashvar "
                f"({reason})"
            )
    mask = as_bias(visibility, call.query.shape[0], call.query.shape[2], call.query)
    # With -inf alone the softmax of a query that sees no key is NaN; the lowest number avoids it.
    mask = mask.clamp(min=torch.finfo(mask.dtype).min)
    out: tuple[torch.Tensor, torch.Tensor | None]
    out = forward(module, **options, attention_mask=mask, is_causal=False)
    return out
