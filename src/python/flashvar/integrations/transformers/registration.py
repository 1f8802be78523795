"""Models of the package transformers on flashvar.

    from flashvar.integrations import transformers as transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashvar")

Nothing is registered by import alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, Final

from flashvar.errors import InvalidInputError
from flashvar.integrations.requirement import unmet

__all__ = ["register"]

# The first whose mask functions are told lengths and offsets.
_OLDEST: Final = "5.6"


def register(name: str = "flashvar") -> None:
    """Let models be loaded with `attn_implementation=name`, in this process.

    A second call does nothing. What flashvar does not serve, the model's own attention computes,
    after one warning; FLASHVAR_STRICT=1 makes it an error.

    Args:
        name: What models ask for. Transformers takes each name with "flash" in it for a flash
            attention, whose models leave masks to it and pass lengths of packed sequences.

    Raises:
        IntegrationError: transformers is missing, or too old.
        InvalidInputError: the name is one that transformers has given to something else.
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
    _check_models(modeling.PreTrainedModel)


_names: Final[set[str]] = set()


def _facts() -> tuple[Any, Any, Any]:
    """The modules of transformers that know attention functions, masks and kernels."""
    try:
        importlib.import_module("transformers")
        masking = importlib.import_module("transformers.masking_utils")
        modeling = importlib.import_module("transformers.modeling_utils")
        kernels = importlib.import_module("transformers.integrations.hub_kernels")
    except ImportError as error:
        raise unmet("transformers", _OLDEST, str(error)) from error
    if "q_length" not in inspect.signature(masking.sdpa_mask).parameters:
        raise unmet("transformers", _OLDEST, "its mask functions are not told lengths")
    return masking, modeling, kernels


def _check(name: object, known: set[str]) -> None:
    """Refuse names that would replace attention of somebody else, in every model of the process."""
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"name must be a word, got {name!r}: leave it out for 'flashvar'")
    if name in known - _names:
        raise InvalidInputError(
            f"name must be none that transformers uses already, got {name!r}: "
            "leave it out for 'flashvar', or choose another"
        )


def _offer_kernel(kernels: Any) -> None:
    """Answer transformers' loader for our names, which it takes for kernels to be downloaded."""
    load = kernels.load_and_register_attn_kernel
    if getattr(load, "offers", None) is _names:
        return

    def load_or_ours(implementation: str, *arguments: Any, **options: Any) -> Any:
        if implementation in _names:
            return importlib.import_module("flashvar.integrations.transformers.kernel")
        return load(implementation, *arguments, **options)

    load_or_ours.offers = _names  # type: ignore[attr-defined]
    kernels.load_and_register_attn_kernel = load_or_ours


def _allow_chunks(masking: Any) -> None:
    """Our masks say chunks, which transformers refuses for flash attentions, by their names."""
    requested = masking.is_flash_attention_requested
    if getattr(requested, "offers", None) is _names:
        return

    @functools.wraps(requested)
    def requested_of_others(config: Any = None, *others: Any, **options: Any) -> bool:
        if config is not None and config._attn_implementation in _names:
            return False
        answer: bool = requested(config, *others, **options)
        return answer

    requested_of_others.offers = _names  # type: ignore[attr-defined]
    masking.is_flash_attention_requested = requested_of_others


def _check_models(base: Any) -> None:
    """Look at each model that asks for our names: as it is made, and as it is told to take them."""
    adjust, tell = base._check_and_adjust_attn_implementation, base.set_attn_implementation
    if getattr(tell, "offers", None) is _names:
        return
    check: Any = importlib.import_module("flashvar.integrations.transformers.check")

    @functools.wraps(adjust)
    def adjust_ours(model: Any, implementation: Any, *others: Any, **options: Any) -> Any:
        if implementation not in _names:
            return adjust(model, implementation, *others, **options)
        if check.chooses_a_class(model):
            instead = adjust(model, None, *others, **options)
            check.refused(model, instead)
            return instead
        check.watch(model, _names)
        return implementation

    @functools.wraps(tell)
    def tell_and_check(model: Any, implementation: Any, *others: Any, **options: Any) -> None:
        tell(model, implementation, *others, **options)
        asked = isinstance(implementation, str) and implementation in _names
        if asked and model.config._attn_implementation != implementation:
            check.refused(model, model.config._attn_implementation)

    tell_and_check.offers = _names  # type: ignore[attr-defined]
    base._check_and_adjust_attn_implementation = adjust_ours
    base.set_attn_implementation = tell_and_check
