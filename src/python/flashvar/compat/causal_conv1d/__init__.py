"""The functions of the package causal-conv1d, computed by flashvar.

    import flashvar.compat.causal_conv1d

    flashvar.compat.causal_conv1d.install()  # replace functions of the package
    flashvar.compat.causal_conv1d.provide()  # or stand in for it if not installed

Importing the module changes nothing. Call one of these before the models that use the functions are
imported: transformers looks the functions up once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import torch

from flashvar.compat.causal_conv1d.recorded_update import update
from flashvar.compat.distribution import Finder
from flashvar.compat.not_provided import MissingModuleFinder
from flashvar.compat.rebinding import Rebinding, rebindable, words_of
from flashvar.compat.stand_in import StandIn, modules_of
from flashvar.errors import IntegrationError, ShapeError
from flashvar.ops.arguments import as_bool, check_tensor, count
from flashvar.ops.causal_conv1d import api
from flashvar.ops.causal_conv1d.sequence_ids import check_packed, last_tokens
from flashvar.ops.dispatch_modes import as_list, can_be_read
from flashvar.ops.sequences import check_ends
from flashvar.ops.unknown_sizes import differ

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "install",
    "provide",
    "uninstall",
]

# The version whose functions these are.
__version__ = "1.6.1+flashvar"

_NAME: Final = "causal_conv1d"


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: Any = None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
) -> Any:
    """Convolve x [batch, dim, seqlen] of any strides, with gradients.

    Args:
        x: The input.
        weight: [dim, width].
        bias: [dim].
        seq_idx: The sequence of each token, [batch, seqlen]; negative: padding, whose output is 0.
        initial_states: [batch, dim, width - 1]; with seq_idx before the first sequence of each
            batch entry.
        return_final_states: Whether to return the states after it too.
        final_states_out: Where to write them.
        activation: None, "silu" or "swish".
        cu_seq_lens_q: Offsets of packed sequences, which models of transformers pass under this
            name. Ignored if `seq_idx` covers all of x. If the offsets cover fewer tokens than x,
            they count from the end: the first tokens of x are the columns of a cache.

    Returns:
        The output, in the shape and dtype of x. With return_final_states a tuple of it and the
        states after x.

    Raises:
        InvalidInputError, BackendUnavailableError: as `flashvar.causal_conv1d`.
    """
    options: dict[str, Any] = {"activation": activation, "layout": "bdt"}
    if seq_idx is not None:
        check_tensor("seq_idx", seq_idx)
    # The columns of a cache in front of x are no tokens of the seq_idx that came with the tokens.
    if seq_idx is not None and (cu_seq_lens_q is None or seq_idx.shape[-1] >= x.shape[-1]):
        options["seq_idx"] = seq_idx
    elif cu_seq_lens_q is not None:
        options["cu_seqlens"] = _offsets_from_the_end(x, cu_seq_lens_q)
    found = api.causal_conv1d(
        x,
        weight,
        bias,
        initial_state=initial_states,
        return_final_state=as_bool("return_final_states", return_final_states),
        **options,
    )
    if not isinstance(found, tuple):
        return found
    y, final = found
    if final_states_out is None:
        return y, final.to(x.dtype)
    check_tensor("final_states_out", final_states_out)
    if differ(final_states_out.shape, final.shape):  # it would be broadcast
        raise ShapeError(
            f"final_states_out must have the shape of the final states, {tuple(final.shape)}, "
            f"found {tuple(final_states_out.shape)}: pass a tensor of that shape"
        )
    return y, final_states_out.copy_(final)


def _offsets_from_the_end(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The offsets of the last tokens of x as those of all: the others belong to the first."""
    check_tensor("cu_seq_lens_q", offsets)
    if offsets.dim() == 1 and offsets.shape[0] and can_be_read(offsets):
        given = as_list(offsets)
        check_ends("cu_seq_lens_q", given, min(x.shape[-1], given[-1]))
    ends = offsets + (x.shape[-1] - offsets[-1:])
    return torch.cat((torch.zeros_like(ends[:1]), ends[1:]))


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve the next tokens, [batch, dim] or [batch, dim, seqlen], and write the states.

    It has derivatives where autograd recorded conv_state and there are neither cache_seqlens nor
    conv_state_indices.

    Args:
        x: The tokens.
        conv_state: [batch, dim, columns], width - 1 columns or more.
        weight: [dim, width].
        bias: [dim].
        activation: None, "silu" or "swish".
        cache_seqlens: How many tokens each sequence has seen, if states are circular buffers.
        conv_state_indices: The state of each sequence in a pool; negative: it has none, and gives
            0.
    """
    return update(
        x,
        conv_state,
        weight,
        bias,
        activation,
        state_indices=conv_state_indices,
        state_positions=cache_seqlens,
        layout="bdt",
    )


def causal_conv1d_varlen_states(
    x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int
) -> torch.Tensor:
    """The last tokens of each packed sequence.

    Args:
        x: [total, dim], the sequences one after the other.
        cu_seqlens: The offsets of the sequences, [sequences + 1], int32 or int64.
        state_len: The number of tokens of each.

    Returns:
        [sequences, dim, state_len] in the dtype of x, the newest token last; zeros where a sequence
        has fewer tokens.
    """
    check_packed(x, cu_seqlens)
    state_len = count("state_len", state_len)
    return last_tokens(x, cu_seqlens, state_len)


_FUNCTIONS: Final = {
    f.__name__: f for f in (causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states)
}
_INTERFACE: Final = ("causal_conv1d_fn", "causal_conv1d_update")
_VARLEN: Final = ("causal_conv1d_varlen_states",)
_REBINDING: Final = Rebinding()
_STAND_IN: Final = StandIn(
    _NAME,
    Finder(("causal-conv1d",), _NAME, __version__),
    MissingModuleFinder(
        _NAME, {}, "causal_conv1d_fn and causal_conv1d_update, or the package causal-conv1d"
    ),
)


def install() -> None:
    """Replace the functions of the installed causal-conv1d, wherever they are bound by name.

    Raises:
        IntegrationError: causal-conv1d is not installed; also after `provide`, whose functions
            are flashvar's without it.
    """
    _STAND_IN.refuse("install", "causal-conv1d")
    _REBINDING.replace(_replacements())


def _replacements() -> Iterator[tuple[Any, Any]]:
    for part, names in (("interface", _INTERFACE), ("varlen", _VARLEN)):
        try:
            module = importlib.import_module(f"{_NAME}.{_NAME}_{part}")
        except ImportError as error:
            raise IntegrationError(
                f"install() needs causal-conv1d 1.4 or newer, found {words_of(error, _NAME)}: call "
                "provide(), which needs no such package"
            ) from error
        for name in names:
            original = getattr(module, name)
            yield original, rebindable(_FUNCTIONS[name], original)


def provide() -> None:
    """Let `import causal_conv1d` find these functions, where the package is not installed.

    Raises:
        ConfigurationError: causal-conv1d is installed.
    """
    _STAND_IN.put_where_absent("causal-conv1d", _modules)


def _modules() -> dict[str, ModuleType]:
    interface: dict[str, Any] = {name: _FUNCTIONS[name] for name in _INTERFACE}
    varlen: dict[str, Any] = {name: _FUNCTIONS[name] for name in _VARLEN}
    below = importlib.import_module(f"{__name__}.cpp_functions")
    reference = importlib.import_module(f"{__name__}.torch_reference")
    of_interface = _of(below) | _of(reference)
    of_varlen = of_interface.pop("causal_conv1d_varlen_states_ref")
    contents = {
        _NAME: {**interface, "__version__": __version__},
        f"{_NAME}.{_NAME}_interface": interface | of_interface,
        f"{_NAME}.{_NAME}_varlen": varlen | {of_varlen.__name__: of_varlen},
        f"{_NAME}.cpp_functions": _of(below),
    }
    return modules_of(contents)


def _of(module: ModuleType) -> dict[str, Any]:
    """The public functions of a module."""
    return {name: getattr(module, name) for name in module.__all__}


def uninstall() -> None:
    """Undo `install` and `provide`; nothing without them."""
    _REBINDING.restore()
    _STAND_IN.remove()
