"""Does anything in torch but autograd need to know of a call?

Modes, transforms, traces, autocast and tensor subclasses do: what they watch goes through torch's
dispatcher. Everything else may skip it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

# Modes of torch's own that take flashvar's ops as they take others, or look at constructors alone.
_INDIFFERENT: Final = (
    "torch._dynamo.",
    "torch._export.",
    "torch._functorch.",
    "torch._subclasses.",
    "torch.export.",
    "torch.fx.",
    "torch.utils._device",
    "torch.utils.flop_counter",
)

# Looked up once: an attribute of a module costs as much as the call.
is_compiling: Final = torch.compiler.is_compiling
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_transforms: Final = torch._C._functorch.peek_interpreter_stack
_tracer: Final = torch._C._get_tracing_state
_autocasts: Final = torch._C._is_any_autocast_enabled


def nothing_watches() -> bool:
    """Whether calls of plain tensors may skip the dispatcher here; not for code being compiled."""
    return (
        not _dispatch_modes()
        and not _function_modes()
        and _transforms() is None
        and _tracer() is None
        and forward_ad._current_level < 0
        and not _autocasts()
    )


def mode_that_watches() -> object | None:
    """A mode that somebody entered to see calls of torch's own functions, None without one."""
    modes = _get_current_function_mode_stack()
    if not is_compiling():  # where they are the compiler's own
        modes = modes + _get_current_dispatch_mode_stack()
    for mode in modes:
        if not type(mode).__module__.startswith(_INDIFFERENT):
            return mode  # type: ignore[no-any-return]
    return None
