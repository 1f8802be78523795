"""Does anything in torch but autograd need to know of a call?

Modes, transforms, traces, autocast and tensor subclasses do: what they watch goes through torch's
dispatcher. Everything else may skip it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.autograd import forward_ad

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

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
