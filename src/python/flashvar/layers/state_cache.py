"""The states of layers between calls, stored as in flash-linear-attention's caches."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from flashvar.errors import InvalidInputError
from flashvar.ops.arguments import count


class StateCache:
    """A dictionary of states for each layer: `recurrent_state`, `conv_state` and others.

    flash-linear-attention's Cache, which transformers' models use, works in its place.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self._states[layer_idx]

    def update(self, layer_idx: int = 0, offset: int = 1, **states: Any) -> dict[str, Any]:
        """Replace states of a layer after `offset` tokens; a state that is None is kept."""
        layer_idx, offset = count("layer_idx", layer_idx), count("offset", offset)
        while len(self._states) <= layer_idx:
            self._states.append({"recurrent_state": None, "conv_state": None})
            self._tokens.append(0)
        self._tokens[layer_idx] += offset
        self._states[layer_idx].update(
            {name: state for name, state in states.items() if state is not None}
        )
        return self._states[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens that a layer has seen."""
        return self._tokens[layer_idx] if layer_idx < len(self) else 0

    def reset(self) -> None:
        """Clear all states."""
        self._states.clear()
        self._tokens.clear()


def check_cache(states: object) -> None:
    """Refuse what does not store states, such as transformers' caches of keys and values.

    Raises:
        InvalidInputError: its `update` does not take states by name.
    """
    kind: Any = type(states)
    if not _stores_states(kind):
        raise InvalidInputError(
            "past_key_values must be a StateCache or flash-linear-attention's Cache, which store "
            f"states by name, found {kind.__name__}: pass a flashvar.layers.StateCache()"
        )


@cache  # a layer asks at every call
def _stores_states(kind: Any) -> bool:
    """Whether objects of a class have the `update` that layers call."""
    given = {"layer_idx": 0, "recurrent_state": None, "conv_state": None, "offset": 1}
    try:
        inspect.signature(kind.update).bind(None, **given)  # None: self
    except (AttributeError, TypeError, ValueError):
        return False
    return True
