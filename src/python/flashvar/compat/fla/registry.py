"""flashvar as a backend in flash-linear-attention's own registry."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

import torch

from flashvar.compat.fla import convolution, delta_rule
from flashvar.compat.rebinding import words_of
from flashvar.errors import IntegrationError

__all__ = ["register_backends"]

_TYPE: Final = "flashvar"
_VARIABLE: Final = "FLA_FLASHVAR"
# Before FlashQLA, which has 3; after Ascend's, which has 0.
_PRIORITY: Final = 1


def causal_conv1d_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    dht: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, weight, bias, residual and the initial state."""
    rows = x.flatten(2)
    grad_x, grad_weight, grad_bias, grad_state = torch.ops.flashvar.causal_conv1d_bwd.default(
        *(dy.reshape(rows.shape), dht, rows, weight, bias, initial_state, cu_seqlens),
        *(activation is not None, "btd", "auto"),
    )
    return (
        grad_x.reshape(x.shape),
        grad_weight,
        None if bias is None else grad_bias,
        None if residual is None else dy.reshape(residual.shape),
        None if initial_state is None else grad_state,
    )


# Their names in the signatures of these functions, for arguments without one.
_CONVOLUTION: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "causal_conv1d_fwd": (
        convolution.causal_conv1d,
        ("x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation"),
    ),
    "causal_conv1d_bwd": (
        causal_conv1d_bwd,
        ("x", "dy", "dht", "weight", "bias", "residual", "initial_state", "activation"),
    ),
    "causal_conv1d_update": (
        convolution.causal_conv1d_update,
        ("x", "cache", "residual", "weight", "bias", "activation"),
    ),
}
# How flash-linear-attention's kernels are launched.
_OF_KERNELS: Final = ("chunk_size", "BT", "layout_fallback", "cu_seqlens_cpu", "chunk_indices")


def register_backends() -> None:
    """Add flashvar to the registry of the installed flash-linear-attention.

    Raises:
        IntegrationError: it is not installed, or has no registry.
    """
    try:
        importlib.import_module("fla.modules.convolution")
        importlib.import_module("fla.ops.gated_delta_rule")
        if importlib.util.find_spec("fla.backends") is not None:
            _register(importlib.import_module("fla.backends"))
        else:
            _register_before_0_6(importlib.import_module("fla.ops.backends"))
    except (ImportError, AttributeError) as error:
        raise IntegrationError(
            "register() needs flash-linear-attention 0.5.1 or newer, found "
            f"{words_of(error, 'fla')}: pip install --upgrade flash-linear-attention"
        ) from error


def _register(fla: Any) -> None:
    fla.register("gated_delta_rule")(_backend(fla.BaseBackend, ("chunk_gated_delta_rule",)))
    module = importlib.import_module("fla.modules.causal_conv1d")
    for name in _CONVOLUTION:
        methods = _backend(fla.BaseBackend, (name,))
        fla.register(getattr(module, name))(methods)


def _register_before_0_6(fla: Any) -> None:
    """Of the functions of 0.5.1 only those of the convolution are dispatched."""
    fla.BackendRegistry.ensure_initialized("modules")
    registry = fla.BackendRegistry._registries["modules"]
    registry.register(_backend(fla.BaseBackend, tuple(_CONVOLUTION))())


def _backend(base: type, functions: tuple[str, ...]) -> Any:
    """A class of backend that has these functions, and for each of them a verifier."""
    methods: dict[str, Any] = {
        "backend_type": _TYPE,
        "env_var": _VARIABLE,
        "priority": _PRIORITY,
    }
    for name in functions:
        if name in _CONVOLUTION:
            methods[name], methods[f"{name}_verifier"] = _convolution_methods(name)
        else:
            methods[name] = staticmethod(getattr(delta_rule, name))
            methods[f"{name}_verifier"] = staticmethod(_verifies_delta_rule)
    return type("FlashvarBackend", (base,), methods)


def _verifies_delta_rule(*arguments: Any, **options: Any) -> tuple[bool, str | None]:
    names = ("q", "k", "v", "g", "beta")
    reason = delta_rule.unsupported({**dict(zip(names, arguments, strict=False)), **options})
    return reason is None, reason


def _convolution_methods(name: str) -> tuple[Any, Any]:
    ours, names = _CONVOLUTION[name]

    def given(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        found = {**dict(zip(names, arguments, strict=False)), **options}
        return {key: value for key, value in found.items() if key not in _OF_KERNELS}

    def method(*arguments: Any, **options: Any) -> Any:
        return ours(**given(arguments, options))

    def verifier(*arguments: Any, **options: Any) -> tuple[bool, str | None]:
        found = given(arguments, options)
        if len(arguments) > len(names):
            return False, "there are more arguments without a name than flashvar knows"
        for only_backward in ("dy", "dht"):
            found.pop(only_backward, None)
        reason = convolution.unsupported(found)
        return reason is None, reason

    return staticmethod(method), staticmethod(verifier)
