"""What do the layers of a model do with the mask that it asks for?

Masks as `transformers_mask` makes them are only for our attention function. A model says in its
file whether anything else touches them: nothing here runs the model.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Final, Literal

__all__ = ["Use", "use_of_masks"]

# "hands on": to the attention function, as they are, and None where causal or not says it all.
# "reads": the numbers in them.
# "own attention": reads them, and never calls an attention function.
Use = Literal["hands on", "reads", "own attention"]

# Who calls transformers' choice of an attention function has this name.
_INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"
# Who reads masks forbids transformers to skip them, or hands them to a module of torch's.
_READING: Final = (
    "allow_is_causal_skip",
    "allow_is_bidirectional_skip",
    "attn_mask=attention_mask",
)
_CONFIGURATION: Final = "configuration_"

_kept: dict[type, Use] = {}


def use_of_masks(configuration: type) -> Use:
    """What models with such a configuration do with masks; "reads" where nothing is known."""
    if configuration not in _kept:
        _kept[configuration] = _read(_modeling(configuration))
    return _kept[configuration]


# While a graph is traced, the answer is a constant of it.
use_of_masks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _read(module: ModuleType | None) -> Use:
    try:
        source = "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        source = ""
    if not source:
        return "reads"
    if _INTERFACE not in source:
        return "own attention"
    if any(word in source for word in _READING):
        return "reads"
    # Only where sdpa or a flash attention serves, layers know whether they are causal.
    served = ("_supports_sdpa", "_supports_flash_attn")
    knows = any(getattr(one, flag, False) for one in vars(module).values() for flag in served)
    return "hands on" if knows else "reads"


def _modeling(configuration: type) -> ModuleType | None:
    """The file of the models; that of a base, where somebody made a configuration from another."""
    for one in configuration.__mro__:
        package, _, name = one.__module__.rpartition(".")
        if name.startswith(_CONFIGURATION):
            return sys.modules.get(f"{package}.modeling_{name.removeprefix(_CONFIGURATION)}")
    return None
