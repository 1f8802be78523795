"""Functions of `fla.modules.causal_conv1d` on flashvar's causal_conv1d.

Names, order and defaults are those of flash-linear-attention 0.6.0.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.compat.causal_conv1d.recorded_update import update
from flashvar.compat.fla.supported import parameters_of, require, unsupported_option
from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.arguments import check_strided
from flashvar.ops.causal_conv1d import api
from flashvar.ops.causal_conv1d.inputs import WIDTHS

__all__ = ["causal_conv1d", "causal_conv1d_update", "fast_causal_conv1d_fn"]

_BACKENDS: Final = ("triton", "cuda", "mix")


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: Any = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    *,
    seq_idx: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The convolution of x [batch, seqlen, dim], with states of as many columns as the filter.

    `cu_seqlens_cpu` and `chunk_indices` are not needed, and every `backend` is the same.
    """
    given = {**others, "x": x, "weight": weight, "cp_context": cp_context}
    require("causal_conv1d", unsupported(given))
    assert weight is not None
    if backend not in _BACKENDS:
        raise InvalidInputError(
            f"backend must be one of {', '.join(map(repr, _BACKENDS))}, found {backend!r}: leave "
            "it out, all are the same"
        )
    options: dict[str, Any] = {}
    if output_final_state:
        options["return_final_state"] = True
        options["state_len"] = weight.shape[-1] if initial_state is None else None
    tokens = x.flatten(2) if x.dim() > 3 else x
    found = api.causal_conv1d(
        tokens,
        weight,
        bias,
        activation=activation,
        residual=_residual(residual, x, tokens),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx if cu_seqlens is None else None,  # they name the same sequences
        **options,
    )
    y, state = found if isinstance(found, tuple) else (found, None)
    return y.contiguous().view(x.shape), None if state is None else state.to(x.dtype)


def fast_causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: Any = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `causal_conv1d`."""
    given = (x, weight, bias, residual, initial_state, output_final_state, activation)
    return causal_conv1d(*given, cu_seqlens=cu_seqlens, seq_idx=seq_idx)


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence, [N, dim], [1, N, dim] or [N, 1, dim]; the cache is written.

    It has derivatives where autograd recorded the cache.
    """
    require("causal_conv1d_update", unsupported({"x": x, "weight": weight}))
    assert weight is not None
    tokens = _one_each(x, weight)
    y = update(
        tokens,
        cache,
        weight,
        bias,
        activation,
        residual=_residual(residual, x, tokens),
        layout="btd",
    )
    return y.contiguous().view(x.shape), cache


def _residual(given: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
    """The residual in the shape of the tokens of x; it has that shape or the one of x."""
    if given is None:
        return None
    check_strided("residual", given)
    found, wanted = ([size for size in one.shape if size != 1] for one in (given, tokens))
    if given.shape != x.shape and found != wanted:
        raise ShapeError(
            f"residual must have the shape of x, {tuple(x.shape)}, found {tuple(given.shape)}: "
            "expand() or transpose it"
        )
    return given.reshape(tokens.shape)


def _one_each(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One token of each sequence as [N, dim]."""
    tokens = x.flatten(2) if x.dim() > 3 else x
    if tokens.dim() == 3 and tokens.shape[-1] != weight.shape[0]:
        tokens = tokens.flatten(1)  # [N, heads, head dim]
    if tokens.dim() == 2:
        return tokens
    if tokens.dim() != 3 or 1 not in tokens.shape[:2]:
        raise ShapeError(
            f"x must have one token of each sequence, [N, dim], [1, N, dim] or [N, 1, dim], found "
            f"{tuple(x.shape)}: pass one token at a time, or causal_conv1d an initial_state"
        )
    return tokens.squeeze(0) if tokens.shape[0] == 1 else tokens.squeeze(1)


def unsupported(options: dict[str, Any]) -> str | None:
    """Why the functions above do not run a call with these arguments; None where they do."""
    weight = options.get("weight")
    if weight is None:
        return "there is no weight"
    if weight.shape[-1] not in WIDTHS:
        return f"the filter has {weight.shape[-1]} taps"
    return unsupported_option(options, _SUPPORTED, options["x"])


_SUPPORTED: Final = parameters_of(causal_conv1d, causal_conv1d_update)
