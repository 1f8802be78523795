"""A drop-in replacement for the module `flash_attn` (FlashAttention 2).

    import flashvar.compat.flash_attn
    flashvar.compat.flash_attn.install()

From then on `import flash_attn` imports this module, in this process. It has what other packages
import: the public functions, `bert_padding`, rotary embeddings, collectives with gradients, the
forward and backward below autograd, and the metadata of a distribution. Importing any other part of
FlashAttention raises `NotProvidedError`, an ImportError, which suggests what to use instead;
`importlib.util.find_spec` finds nothing for such parts. `__version__` is the version of
FlashAttention 2 with the same behavior, with a local label, for packages that compare versions.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from flashvar.compat.distribution import Finder
from flashvar.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashvar.compat.not_provided import NOT_PROVIDED, MissingModuleFinder
from flashvar.compat.stand_in import StandIn
from flashvar.errors import ConfigurationError

__version__ = "2.8.3+flashvar"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

_NAME: Final = "flash_attn"
_PARTS: Final = (
    "",
    ".flash_attn_interface",
    ".bert_padding",
    ".layers",
    ".layers.rotary",
    ".ops",
    ".ops.triton",
    ".ops.triton.rotary",
    ".utils",
    ".utils.distributed",
)
_STAND_IN: Final = StandIn(
    _NAME,
    Finder(("flash-attn",), _NAME, __version__),
    MissingModuleFinder(
        _NAME,
        NOT_PROVIDED,
        "what the table in flashvar's docs/api/flash-attn.md names, or the package flash-attn, "
        "without flashvar.compat.flash_attn.install()",
    ),
)


def install(*, replace: bool = False) -> None:
    """Make `import flash_attn` import this module; a second call does nothing.

    Args:
        replace: Also replace another `flash_attn` that is already imported. Code that imported
            functions from it keeps them.

    Raises:
        ConfigurationError: another `flash_attn` is imported, and `replace` is False.
    """
    found = sys.modules.get(_NAME)
    if found is not None and not (replace or _STAND_IN.stands):
        where = getattr(found, "__file__", None) or "an unknown place"
        raise ConfigurationError(
            f"install() must come before flash_attn is imported, found it imported from {where}: "
            "call it earlier, or pass replace=True"
        )
    _STAND_IN.put({_NAME + part: importlib.import_module(__name__ + part) for part in _PARTS})


def uninstall() -> None:
    """Undo `install`; does nothing without it."""
    _STAND_IN.remove()
