"""What a mask of transformers comes to: as little as the kernels need, and never less than it says.

A model asks for its mask once in a forward, as a function of four indices; all of its layers get
the answer. Those that transformers itself composes are read, not evaluated. The answer is

- None, where causal (or not) says it all,
- int32 [batch, 1, 1, keys], the number of each key's sequence, 0 where it is padding, with a
  `Layout` attached, which can be found again from the numbers. Four dimensions are what a model
  leaves alone that is given a mask it made before, as `generate` does with static caches,
- float [batch, 1, seqlen_q, keys], added to the scores, for every other function, and for models
  that read what is in their masks (`transformers_models`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from flashvar.integrations.declining import decline
from flashvar.integrations.transformers_layout import Layout, attach, bounded, padding_layout
from flashvar.integrations.transformers_models import Use, use_of_masks


class Pattern(NamedTuple):
    """Which keys a query sees, whatever the padding; sizes are those of `window_size`."""

    causal: bool
    window: tuple[int, int] = (-1, -1)
    sequences: torch.Tensor | None = None  # [batch, seqlen], the number of each row's


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> torch.Tensor | None:
    """The mask function that is registered with transformers; arguments are those of its own.

    Returns:
        What the module's docstring says.

    Raises:
        BackendUnavailableError: FLASHVAR_STRICT=1, and the model does not call our attention.
    """
    told = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    use: Use = "hands on" if config is None else use_of_masks(type(config))
    if use != "hands on":
        if use == "own attention" and not torch.compiler.is_compiling():
            reason = f"models with {type(config).__name__} compute attention themselves"
            decline("transformers", reason, "the model's own")
        own: torch.Tensor | None = eager_mask(**told, dtype=dtype, config=config, **others)
        return own
    pattern = read(mask_function)
    if pattern is None or (torch.compiler.is_compiling() and isinstance(q_offset, torch.Tensor)):
        return _evaluated(told, dtype)
    # A static cache has room for keys that are yet to come.
    keys = int(q_offset) + q_length - kv_offset if pattern.causal else kv_length
    window = bounded(pattern.window, keys)
    packed = pattern.sequences is not None
    # Kernels let the last query see the last key, which is how causal ones lie anyway.
    aligned = packed or (window != (-1, -1) and not pattern.causal)
    if not 0 < keys <= kv_length or (aligned and q_length != keys):
        return _evaluated(told, dtype)
    if pattern.sequences is not None:
        numbers = pattern.sequences.expand(batch_size, -1).int() + 1
    elif attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + keys].int()
        numbers = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]))
    else:
        numbers = torch.ones((1, 1), dtype=torch.int32, device=device).expand(batch_size, keys)
    layout = Layout(pattern.causal, window, keys)
    if packed or attention_mask is not None:
        layout = padding_layout(numbers, q_length, pattern.causal, window)
    # What a layer believes of itself, without a mask.
    believed = pattern.causal or getattr(config, "is_causal", True)
    if keys == kv_length and believed and layout == (pattern.causal, (-1, -1), keys, None, None):
        return None
    return attach(numbers[:, None, None], layout)


def _evaluated(told: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores, by asking the mask function for every query and key."""
    visible = sdpa_mask(**told, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, -torch.inf)


def read(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function that transformers composed of its own; None: any other.

    While a graph is traced, what a function captured cannot be read.
    """
    if function is causal_mask_function:
        return Pattern(causal=True)
    if function is bidirectional_mask_function:
        return Pattern(causal=False)
    if torch.compiler.is_compiling() or function.__module__ != causal_mask_function.__module__:
        return None
    maker = _MAKERS.get(function.__qualname__.partition(".")[0])
    if maker is None or function.__closure__ is None:
        return None
    cells = [cell.cell_contents for cell in function.__closure__]
    try:
        return maker(dict(zip(function.__code__.co_freevars, cells, strict=True)))
    except KeyError:  # another version of transformers, which names them differently
        return None


def _all_of(cells: dict[str, Any]) -> Pattern | None:
    """The intersection of several functions."""
    found = [read(function) for function in cells["mask_functions"]]
    patterns = [pattern for pattern in found if pattern is not None]
    numbered = [pattern.sequences for pattern in patterns if pattern.sequences is not None]
    if len(patterns) < len(found) or len(numbered) > 1:
        return None
    sides = zip(*(pattern.window for pattern in patterns), strict=True)
    left, right = (min((s for s in side if s >= 0), default=-1) for side in sides)
    causal = any(pattern.causal for pattern in patterns)
    return Pattern(causal, (left, right), numbered[0] if numbered else None)


def _remapped(cells: dict[str, Any]) -> Pattern | None:
    """Positions within a packed sequence instead of places: their distances are the same."""
    return read(cells["mask_function"])


# What makes a mask function: what it captured says which.
_MAKERS: Final[dict[str, Callable[[dict[str, Any]], Pattern | None]]] = {
    "and_masks": _all_of,
    "sliding_window_overlay": lambda c: Pattern(False, (c["sliding_window"] - 1, -1)),
    "sliding_window_bidirectional_overlay": lambda c: Pattern(False, (c["sliding_window"],) * 2),
    "packed_sequence_mask_function": lambda c: Pattern(False, sequences=c["packed_sequence_mask"]),
    "remap_positions_for_packed_sequence": _remapped,
}
