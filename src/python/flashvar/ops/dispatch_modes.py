"""Whether a call may skip torch's dispatcher.

Dispatch and function modes, transforms, traces and tensor subclasses intercept calls in the
dispatcher; calls of plain tensors without them may skip it. Autocast does not: an op that casts
does so before it is called.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def are_plain(*tensors: object) -> bool:
    """Whether they are plain tensors whose memory holds their values.

    The memory of a negated view holds the values before they are negated. A zero tensor has no
    memory, nor has a functional tensor, which wraps another.
    """
    for x in tensors:
        if type(x) not in PLAIN or x.is_neg() or x._is_zerotensor():  # type: ignore[attr-defined]
            return False
        if _is_functional(x):
            return False
    return True


def can_be_read(*tensors: torch.Tensor | None) -> bool:
    """Whether Python may read the values of these tensors, without waiting for a device.

    Values of a GPU would make the host wait. Tensors that are traced, faked or mapped have none.
    """
    if is_compiling() or _infra_mode(_PROXIES) is not None:
        return False
    return all(
        x is None or (type(x) in PLAIN and x.device.type == "cpu" and not _is_transformed(x))
        for x in tensors
    )


def have_values(*tensors: torch.Tensor | None) -> bool:
    """Whether Python may read the values of tensors on any device: not if traced, faked or mapped.

    Without tensors, True.
    """
    given = [x for x in tensors if x is not None]
    if not given:
        return True
    if is_compiling() or is_faking() or _infra_mode(_PROXIES) is not None:
        return False
    return all(type(x) in PLAIN and not is_mapped(x) for x in given)


def as_list(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()`, also inside of torch.func's derivatives.

    There tolist of torch 2.8 fails, of any tensor: it reads the memory of a wrapper.
    """
    if is_compiling():
        return tensor.tolist()
    inner = tensor
    while _is_tracked(inner):
        inner = _unwrapped(inner)
    if _is_transformed(inner):  # mapped, or made functional: torch knows what its values are
        return tensor.tolist()
    with _WithoutTransforms():
        return inner.tolist()


def in_transform() -> bool:
    """Whether a transform of torch.func is active. Not meaningful while torch.compile traces."""
    return _transforms() is not None


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether torch.vmap maps a tensor, also inside of other transforms."""
    while _is_transformed(tensor):
        if _is_batched(tensor):
            return True
        tensor = _unwrapped(tensor)
    return False


def is_faking() -> bool:
    """Whether operations make tensors without values, also of tensors that have some."""
    return _infra_mode(_FAKES) is not None


# Torch's own modes that handle flashvar's ops as any other op, or that affect only constructors.
_TRANSPARENT: Final = (
    "torch._dynamo.",
    "torch._export.",
    "torch._functorch.",
    "torch._subclasses.",
    "torch.export.",
    "torch.fx.",
    "torch.utils._device",
    "torch.utils.flop_counter",
)

# Bound once: looking up a module's attribute takes as long as the call.
is_compiling: Final = torch.compiler.is_compiling
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_transforms: Final = torch._C._functorch.peek_interpreter_stack
_infra_mode: Final = torch._C._get_dispatch_mode
_PROXIES: Final = torch._C._TorchDispatchModeKey.PROXY
_FAKES: Final = torch._C._TorchDispatchModeKey.FAKE
_is_functional: Final = torch._is_functional_tensor
_is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched: Final = torch._C._functorch.is_batchedtensor
_is_tracked: Final = torch._C._functorch.is_gradtrackingtensor
_WithoutTransforms: Final = torch._C._DisableFuncTorch
_unwrapped: Final = torch._C._functorch.get_unwrapped
_tracer: Final = torch._C._get_tracing_state
autocasts: Final = torch._C._is_any_autocast_enabled


def no_dispatch_mode_active() -> bool:
    """Whether calls of plain tensors may skip the dispatcher: nothing in torch intercepts them.

    Not meaningful while torch.compile traces.
    """
    return (
        not _dispatch_modes()
        and not _function_modes()
        and _transforms() is None
        and _tracer() is None
        and forward_ad._current_level < 0
    )


def active_mode() -> object | None:
    """An active mode that must see calls of torch's own functions; None without one."""
    modes = _get_current_function_mode_stack()
    if not is_compiling():  # while compiling, the dispatch modes are the compiler's
        modes = modes + _get_current_dispatch_mode_stack()
    for mode in modes:
        if not type(mode).__module__.startswith(_TRANSPARENT):
            return mode  # type: ignore[no-any-return]
    return None
