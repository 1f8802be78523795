"""The mask function of models that use flashvar: the mask of eager attention, evaluated lazily.

A model creates its mask once per forward, from a function of four indices, and passes it to all
layers. The mask is never None, because a layer would then use its own flag `is_causal`. Mask
functions that transformers composed are recognized: their masks carry a visibility for flashvar,
and are evaluated only if other code reads them. Masks of other functions are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
)
from transformers.utils.import_utils import is_tracing

from flashvar.integrations.transformers.lazy_masks import LazyMask, attach
from flashvar.integrations.transformers.visibility import (
    Visibility,
    bounded_window,
    packed_visibility,
    padding_visibility,
)
from flashvar.ops.dispatch_modes import have_values


class Pattern(NamedTuple):
    """The keys that a query sees, apart from padding."""

    causal: bool
    window: tuple[int, int] = (-1, -1)  # as `window_size`
    sequences: torch.Tensor | None = None  # [batch, seqlen], the sequence number of each row


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> torch.Tensor:
    """The mask function that is registered with transformers, with the arguments of its own.

    Returns:
        [batch, 1, q_length, kv_length] in the dtype, to be added to the scores: 0 for visible keys,
        else the lowest number.
    """
    pattern = read(mask_function)
    compiling = torch.compiler.is_compiling()
    static = isinstance(q_offset, torch.Tensor)
    requested: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "dtype": dtype,
        "use_vmap": use_vmap,
        "device": device,
    }
    visibility = None
    known = not static if compiling else not is_tracing(attention_mask)
    if pattern is not None and known and _has_values(pattern, attention_mask):
        # The cache increments q_offset in place, so its current value is read.
        requested["q_offset"] = int(q_offset) if static else q_offset
        visibility = _visibility(pattern, requested)
    if visibility is not None and not compiling and not (static and q_length == 1):
        if attention_mask is not None:  # the caller may write to it before the evaluation
            requested["attention_mask"] = attention_mask.clone()
        shape = (batch_size, 1, q_length, kv_length)
        return LazyMask(visibility, lambda: _evaluated(requested), shape, dtype, device)
    # A decoding step with a static cache is evaluated: generate() compiles the model, which gets
    # the mask.
    mask = _evaluated(requested)
    return mask if visibility is None else attach(mask, visibility)


def _has_values(pattern: Pattern, padding: torch.Tensor | None) -> bool:
    """Whether the rows of sequences can be found; while compiling they are not looked for."""
    return torch.compiler.is_compiling() or have_values(pattern.sequences, padding)


def _evaluated(requested: dict[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = eager_mask(**requested, allow_is_bidirectional_skip=False)
    return mask


def _visibility(pattern: Pattern, requested: dict[str, Any]) -> Visibility | None:
    """The visibility of the mask that a model requests; None if the kernels do not support it."""
    q_length, kv_length, kv_offset = (
        requested["q_length"],
        requested["kv_length"],
        requested["kv_offset"],
    )
    # The rest of a static cache is not filled yet.
    keys = requested["q_offset"] + q_length - kv_offset if pattern.causal else kv_length
    window = bounded_window(pattern.window, keys)
    packed = pattern.sequences is not None
    # Kernels align the last query with the last key. Causal masks are aligned so anyway.
    aligned = packed or (window != (-1, -1) and not pattern.causal)
    if not 0 < keys <= kv_length or (aligned and q_length != keys):
        return None
    padding, seen = requested["attention_mask"], None
    if padding is not None:
        seen = padding[:, kv_offset : kv_offset + keys].int()
        seen = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]))
    visibility: Visibility | None = Visibility(pattern.causal, window, keys)
    if pattern.sequences is not None:
        sequences = pattern.sequences.expand(requested["batch_size"], -1)
        visibility = packed_visibility(sequences, seen, pattern.causal, window)
    elif seen is not None:
        visibility = padding_visibility(seen, q_length, pattern.causal, window)
    if visibility is None:
        return None
    whole = keys == kv_length and window == (-1, -1)
    return visibility._replace(
        plain=whole and visibility.rows is visibility.bias is None, by_mask=padding is not None
    )


def read(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function that transformers composed; None for other functions.

    While a graph is traced, the closure of a function cannot be read.
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
    except KeyError:  # another version of transformers uses other names
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
    """The pattern of the inner function: positions in a packed sequence keep their distances."""
    return read(cells["mask_function"])


# Functions of transformers that make mask functions -> the pattern, from the captured variables.
_MAKERS: Final[dict[str, Callable[[dict[str, Any]], Pattern | None]]] = {
    "and_masks": _all_of,
    "sliding_window_overlay": lambda c: Pattern(False, (c["sliding_window"] - 1, -1)),
    "sliding_window_bidirectional_overlay": lambda c: Pattern(False, (c["sliding_window"],) * 2),
    "packed_sequence_mask_function": lambda c: Pattern(False, sequences=c["packed_sequence_mask"]),
    "remap_positions_for_packed_sequence": _remapped,
}
