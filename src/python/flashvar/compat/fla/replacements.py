"""Which functions of flash-linear-attention `install` replaces, and how a call is handed on."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

from flashvar.compat.fla import convolution, delta_rule
from flashvar.compat.rebinding import take_place_of, words_of
from flashvar.errors import BackendUnavailableError, IntegrationError
from flashvar.integrations.fallback import report_fallback
from flashvar.ops.dispatch_modes import is_compiling

__all__ = ["replacements"]

# Module of flash-linear-attention -> our module of the same functions.
_OPS: Final = {
    "fla.ops.gated_delta_rule": (
        delta_rule, ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    ),
    "fla.ops.delta_rule": (delta_rule, ("chunk_delta_rule", "fused_recurrent_delta_rule")),
    "fla.modules.convolution": (convolution, ("causal_conv1d", "causal_conv1d_update")),
}  # fmt: skip
# The part of `backend="mix"` that some versions also have as a function.
_FAST: Final = "fast_causal_conv1d_fn"


def replacements(strict: bool) -> Iterator[tuple[Any, Any]]:
    """Each function of the installed flash-linear-attention, and what takes its place.

    Raises:
        IntegrationError: flash-linear-attention cannot be imported, or has no such functions.
    """
    for name, (ours, functions) in _OPS.items():
        try:
            module = importlib.import_module(name)
            named = (*functions, _FAST) if hasattr(module, _FAST) else functions
            theirs = [getattr(module, function) for function in named]
        except (ImportError, AttributeError) as error:
            raise IntegrationError(
                "install() needs flash-linear-attention 0.5.1 or newer, found "
                f"{words_of(error, 'fla')}: pip install --upgrade flash-linear-attention, or call "
                "provide(), which needs no such package"
            ) from error
        for function, original in zip(named, theirs, strict=True):
            yield (
                original,
                with_fallback(original, getattr(ours, function), ours.unsupported, strict),
            )


def with_fallback(
    original: Callable[..., Any],
    ours: Callable[..., Any],
    unsupported: Callable[[dict[str, Any]], str | None],
    strict: bool,
) -> Callable[..., Any]:
    """Our function, with the order of the original's arguments, and the original behind it."""
    ordered = [
        parameter
        for parameter in inspect.signature(original).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    names = tuple(parameter.name for parameter in ordered)
    required = [parameter.name for parameter in ordered if parameter.default is parameter.empty]

    @functools.wraps(ours)
    def rebound(*arguments: Any, **options: Any) -> Any:
        # Of one length, which torch 2.8 compiles.
        known = min(len(names), len(arguments))
        given = {**dict(zip(names[:known], arguments[:known], strict=True)), **options}
        bound = len(given) == len(arguments) + len(options)
        if not bound or not all(name in given for name in required):
            return original(*arguments, **options)  # raises TypeError
        reason = unsupported(given)
        if reason is None:
            return ours(**given)
        if strict:
            raise BackendUnavailableError(
                f"{ours.__name__}: expected a call that flashvar supports (install(strict=True)), "
                f"found that {reason}: leave strict out for flash-linear-attention's own function"
            )
        if not is_compiling():
            report_fallback(ours.__name__, reason, "flash-linear-attention's own function")
        return original(*arguments, **options)

    take_place_of(original, rebound)
    rebound.__signature__ = _signature(ordered, ours)  # type: ignore[attr-defined]
    return rebound


def _signature(ordered: list[inspect.Parameter], ours: Callable[..., Any]) -> inspect.Signature:
    """The original's parameters, and by name what it takes behind **kwargs."""
    known = {parameter.name for parameter in ordered}
    by_name = [
        parameter if parameter.kind is parameter.VAR_KEYWORD
        else parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(ours).parameters.values()
        if parameter.name not in known
    ]  # fmt: skip
    return inspect.Signature([*ordered, *by_name])
