"""Events of torch.profiler for calls that skip the dispatcher, which would make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

_profiling: Final = torch._C._autograd._profiler_enabled


def recorded(function: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`; where a profiler is on, within an event with the name of the op's function."""
    if not _profiling():
        return call

    def within_event(*arguments: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(f"flashvar::{function}"):
            return call(*arguments)

    return within_event
