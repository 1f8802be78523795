"""flash-linear-attention's functions on flashvar.

    import flashvar.compat.fla

    flashvar.compat.fla.install()   # over the installed flash-linear-attention
    flashvar.compat.fla.register()  # or as a backend in its own registry
    flashvar.compat.fla.provide()   # or in its place, where it is not installed

Importing the module changes nothing. All of them come before the models that use the functions are
imported: transformers looks them up once.
"""

from __future__ import annotations

from typing import Final

from flashvar.compat.fla.rebound import replacements
from flashvar.compat.rebinding import Rebinding

__all__ = ["install", "uninstall"]

_REBINDING: Final = Rebinding()


def install(strict: bool = False) -> None:
    """Replace functions of the installed flash-linear-attention, wherever they are bound by name.

    These are `chunk_gated_delta_rule` (also as `chunk_gdn`), `fused_recurrent_gated_delta_rule`,
    `chunk_delta_rule`, `fused_recurrent_delta_rule`, `causal_conv1d` and `causal_conv1d_update`;
    its layers and models call them by name. Another call changes `strict`, else nothing.

    Args:
        strict: Raise where flashvar does not serve a call, which else goes to
            flash-linear-attention's own function, with the reason once in the log.

    Raises:
        IntegrationError: flash-linear-attention is not installed, or too old.
    """
    _REBINDING.replace(replacements(strict))


def uninstall() -> None:
    """Undo `install`; nothing without it."""
    _REBINDING.restore()
