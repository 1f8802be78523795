"""flash-linear-attention's functions, computed by flashvar.

    import flashvar.compat.fla

    flashvar.compat.fla.install()   # replace functions of the installed package
    flashvar.compat.fla.register()  # or add flashvar to its own registry of backends
    flashvar.compat.fla.provide()   # or stand in for it if not installed

Importing the module changes nothing. Call one of these before the models that use the functions are
imported: transformers looks the functions up once.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from flashvar.compat.distribution import Finder
from flashvar.compat.fla.registry import register_backends
from flashvar.compat.fla.replacements import replacements
from flashvar.compat.fla.shared_memory import check_shared_mem
from flashvar.compat.not_provided import MissingModuleFinder
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
    MissingModuleFinder(
        _NAME, {}, "flash-linear-attention itself, with install() instead of provide()"
    ),
)


def install(strict: bool = False) -> None:
    """Replace functions of the installed flash-linear-attention, in every module that has them.

    These are `chunk_gated_delta_rule` (also as `chunk_gdn`), `fused_recurrent_gated_delta_rule`,
    `chunk_delta_rule`, `fused_recurrent_delta_rule`, `causal_conv1d`, `causal_conv1d_update` and,
    where it has one, `fast_causal_conv1d_fn`; its layers and models call them by name. A second
    call changes `strict` and nothing else.

    Args:
        strict: Raise an error in a call that flashvar does not support. By default such a call goes
            to flash-linear-attention's own function, and the reason is logged once.

    Raises:
        IntegrationError: flash-linear-attention is not installed, or too old; also after
            `provide`, whose functions are flashvar's without it.
    """
    _STAND_IN.refuse("install", "flash-linear-attention")
    _REBINDING.replace(replacements(strict))


def register() -> None:
    """Add flashvar to flash-linear-attention's registry of backends, before the others.

    In version 0.6.0 the registry asks it for `chunk_gated_delta_rule` and the convolution, in 0.5.1
    for the convolution only; `install` replaces all functions in every version. FLA_FLASHVAR=0
    switches it off. Calls that it does not support go to the next backend. A second call does
    nothing.

    Raises:
        IntegrationError: flash-linear-attention is not installed, or too old; also after
            `provide`.
    """
    _STAND_IN.refuse("register", "flash-linear-attention")
    register_backends()


def provide() -> None:
    """Let `import fla` find these functions and layers if the package is not installed.

    They are the parts that transformers' models import. Importing any other part raises
    NotProvidedError, which is an ImportError.

    Raises:
        ConfigurationError: flash-linear-attention is installed.
    """
    _STAND_IN.put_where_absent("flash-linear-attention", _modules)


def _modules() -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = importlib.import_module(f"{__name__}.provided").modules()
    return made


def uninstall() -> None:
    """Undo `install` and `provide`; without them it does nothing."""
    _REBINDING.restore()
    _STAND_IN.remove()
