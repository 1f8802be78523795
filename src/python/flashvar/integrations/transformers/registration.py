"""Registers flashvar as an attention implementation of the package transformers.

    import flashvar.integrations.transformers

    flashvar.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashvar")

Importing the module registers nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, Final

from flashvar.errors import InvalidInputError
from flashvar.integrations.requirement import unmet

__all__ = ["register"]

# The first version that passes lengths and offsets to mask functions.
_OLDEST: Final = "5.6"


def register(name: str = "flashvar") -> None:
    """Let models be loaded with `attn_implementation=name`, in this process.

    A second call does nothing. Calls that flashvar does not support fall back to the model's own
    attention, with one warning; FLASHVAR_STRICT=1 makes a fallback an error.

    Args:
        name: The name of the implementation. Transformers treats every name that contains "flash"
            as a flash attention: models then create no masks and pass lengths of packed sequences.

    Raises:
        IntegrationError: transformers is missing, or too old.
        InvalidInputError: transformers already uses the name for another implementation.
    """
    masking, modeling, kernels = _facts()
    _check(name, {"eager", *modeling.AttentionInterface(), *masking.AttentionMaskInterface()})
    ours: Any = importlib.import_module("flashvar.integrations.transformers.attention")
    mask: Any = importlib.import_module("flashvar.integrations.transformers.mask")
    modeling.AttentionInterface.register(name, ours.attention)
    masking.AttentionMaskInterface.register(name, mask.attention_mask)
    _names.add(name)
    _offer_kernel(kernels)
    _allow_chunks(masking)
    _add_masks_of_callers(masking)
    _check_models(modeling.PreTrainedModel)


_names: Final[set[str]] = set()


def _facts() -> tuple[Any, Any, Any]:
    """The modules of transformers that register masks, attention functions and kernels."""
    try:
        importlib.import_module("transformers")
        masking = importlib.import_module("transformers.masking_utils")
        modeling = importlib.import_module("transformers.modeling_utils")
        kernels = importlib.import_module("transformers.integrations.hub_kernels")
    except ImportError as error:
        raise unmet("transformers", _OLDEST, str(error)) from error
    if "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
        raise unmet("transformers", _OLDEST, "its mask functions get no lengths")
    return masking, modeling, kernels


def _check(name: object, known: set[str]) -> None:
    """Refuse a name that would replace another implementation in every model of the process."""
    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            f"name must be a non-empty string, found {name!r}: leave it out for 'flashvar'"
        )
    if name in known - _names:
        raise InvalidInputError(
            f"name must be one that transformers does not use, found {name!r}: "
            "leave it out for 'flashvar', or choose another"
        )


def _offer_kernel(kernels: Any) -> None:
    """Make transformers' kernel loader return our module for our names, instead of a download."""
    load = kernels.load_and_register_attn_kernel
    if getattr(load, "names", None) is _names:
        return

    @functools.wraps(load)
    def load_or_ours(attn_implementation: str, *arguments: Any, **options: Any) -> Any:
        if attn_implementation in _names:
            return importlib.import_module("flashvar.integrations.transformers.kernel")
        return load(attn_implementation, *arguments, **options)

    load_or_ours.names = _names  # type: ignore[attr-defined]
    kernels.load_and_register_attn_kernel = load_or_ours


def _allow_chunks(masking: Any) -> None:
    """Allow chunked masks for our names; transformers refuses them for flash attentions."""
    requested = masking.is_flash_attention_requested
    if getattr(requested, "names", None) is _names:
        return

    @functools.wraps(requested)
    def requested_of_others(config: Any = None, *others: Any, **options: Any) -> bool:
        if config is not None and config._attn_implementation in _names:
            return False
        answer: bool = requested(config, *others, **options)
        return answer

    requested_of_others.names = _names  # type: ignore[attr-defined]
    masking.is_flash_attention_requested = requested_of_others


def _add_masks_of_callers(masking: Any) -> None:
    """For our names, change what transformers takes from a caller for the masks of a model.

    A bool mask of 4 dimensions becomes one that is added to the scores. Transformers passes such
    masks on as they are; models that join them to masks of our mask function, or add them to
    scores, would count True as 1.

    Positions of packed sequences are read also where there is a cache, if it is empty. Our layers
    read them for other masks; a mask of chunks has to have them.
    """
    preprocess = masking._preprocess_mask_arguments
    if getattr(preprocess, "names", None) is _names:
        return
    visibility: Any = importlib.import_module("flashvar.integrations.transformers.visibility")

    # The name of the argument for the cache: transformers 5.24 changed it.
    cache = list(inspect.signature(preprocess).parameters)[3]

    @functools.wraps(preprocess)
    def preprocess_ours(
        config: Any, inputs_embeds: Any, attention_mask: Any, *others: Any, **options: Any
    ) -> Any:
        mask = attention_mask
        if config._attn_implementation in _names:
            mask = visibility.added(mask, inputs_embeds.dtype)
            one_row = mask is None and len(inputs_embeds) == 1
            if one_row and _has_chunks(config):
                if others and _is_empty(others[0]):
                    others = (None, *others[1:])
                elif _is_empty(options.get(cache)):
                    options[cache] = None
        return preprocess(config, inputs_embeds, mask, *others, **options)

    preprocess_ours.names = _names  # type: ignore[attr-defined]
    masking._preprocess_mask_arguments = preprocess_ours


def _has_chunks(config: Any) -> bool:
    return getattr(config, "attention_chunk_size", None) is not None


def _is_empty(cache: Any) -> bool:
    """Whether a cache grows with its keys, and has none."""
    return (
        cache is not None
        and not getattr(cache, "is_compileable", False)
        and cache.get_seq_length() == 0
    )


def _check_models(base: Any) -> None:
    """Check each model that selects one of our names, when it is made and when it is changed."""
    adjust = base._check_and_adjust_attn_implementation
    set_implementation = base.set_attn_implementation
    if getattr(set_implementation, "names", None) is _names:
        return
    check: Any = importlib.import_module("flashvar.integrations.transformers.model_check")
    dicts: Any = importlib.import_module("flashvar.integrations.transformers.mask_dicts")

    @functools.wraps(adjust)
    def adjust_ours(model: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        if attn_implementation not in _names:
            return adjust(model, attn_implementation, *others, **options)
        if check.has_class_table(model):
            instead = adjust(model, None, *others, **options)
            check.report_refused(model, instead)
            return instead
        check.watch(model, _names)
        dicts.watch(model, _names)
        return attn_implementation

    @functools.wraps(set_implementation)
    def set_and_check(model: Any, attn_implementation: Any, *others: Any, **options: Any) -> None:
        set_implementation(model, attn_implementation, *others, **options)
        asked = isinstance(attn_implementation, str) and attn_implementation in _names
        if asked and model.config._attn_implementation != attn_implementation:
            check.report_refused(model, model.config._attn_implementation)

    set_and_check.names = _names  # type: ignore[attr-defined]
    base._check_and_adjust_attn_implementation = adjust_ours
    base.set_attn_implementation = set_and_check
