"""flash-linear-attention's functions on flashvar.

    import flashvar.compat.fla

    flashvar.compat.fla.install()   # over the installed flash-linear-attention
    flashvar.compat.fla.register()  # or as a backend in its own registry
    flashvar.compat.fla.provide()   # or in its place, where it is not installed

Importing the module changes nothing. All of them come before the models that use the functions are
imported: transformers looks them up once.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from flashvar.compat.distribution import Finder
from flashvar.compat.fla.rebound import replacements
from flashvar.compat.fla.registry import register_backends
from flashvar.compat.fla.shared_memory import check_shared_mem
from flashvar.compat.not_served import Refusal
from flashvar.compat.rebinding import Rebinding
from flashvar.compat.stand_in import StandIn

__all__ = ["check_shared_mem", "install", "provide", "register", "uninstall"]

# The version whose functions `provide` stands in with.
__version__ = "0.6.0+flashvar"

_NAME: Final = "fla"
_REBINDING: Final = Rebinding()
_STAND_IN: Final = StandIn(
    _NAME,
    Finder(("flash-linear-attention", "fla-core"), _NAME, __version__),
    Refusal(_NAME, {}, "flash-linear-attention itself, with install() in the place of provide()"),
)


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


def register() -> None:
    """Add flashvar to flash-linear-attention's registry of backends, before its others.

    Of 0.6.0 it then serves `chunk_gated_delta_rule` and the convolution, of 0.5.1 the convolution;
    `install` serves all functions, in every version. FLA_FLASHVAR=0 switches it off, and what it
    does not serve goes to the next backend. Another call does nothing.

    Raises:
        IntegrationError: flash-linear-attention is not installed, or too old.
    """
    register_backends()


def provide() -> None:
    """Let `import fla` find these functions and layers, where the package is not installed.

    It is what models of transformers ask for. Importing any other part of flash-linear-attention is
    a NotServedError, an ImportError.

    Raises:
        ConfigurationError: flash-linear-attention is installed.
    """
    _STAND_IN.put_where_absent("flash-linear-attention", _modules)


def _modules() -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = importlib.import_module(f"{__name__}.provided").modules()
    return made


def uninstall() -> None:
    """Undo `install` and `provide`; nothing without them."""
    _REBINDING.restore()
    _STAND_IN.remove()
