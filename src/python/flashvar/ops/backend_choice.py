"""The backend that runs a call of an op: its request, the choice, and the backend's module.

Selection chooses by what binaries and devices are: function, dtype and axes. An op may know more of
a call that a backend cannot run, such as strides; then another backend runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from flashvar.backends import backend as backend_of
from flashvar.errors import BackendUnavailableError
from flashvar.ops.dtypes import DTYPES
from flashvar.selection.candidates import CandidateResult
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose, log_fallback


@dataclass(frozen=True)
class BackendFallback:
    """The backend that runs a call in place of the chosen one, and why that cannot."""

    backend: str
    reason: str
    fix: str  # what makes the chosen backend run such calls


def choose_backend(
    function: str,
    tensor: torch.Tensor,
    backend: str,
    call: object = None,
    fallback: Callable[[str], BackendFallback | None] = lambda chosen: None,
) -> tuple[CandidateResult, ModuleType]:
    """The candidate that runs a call on the dtype and device of `tensor`, and its module.

    `call` has an attribute for each of the op's axes. `fallback` is called with each backend that
    is chosen; None: it runs the call. The log says that another one does, and why.

    Raises:
        BackendUnavailableError: no candidate runs the call, or the named one does not; the
            message says why.
    """
    device = tensor.device.index if tensor.is_cuda else None
    request = Request.of_call(function, DTYPES[tensor.dtype], device, call)
    chosen = choose(request, backend)
    explicit = chosen.explicit
    while (found := fallback(chosen.backend)) is not None:
        if explicit:
            raise BackendUnavailableError(
                f"{function}: expected backend {chosen.backend!r} to run it, found that "
                f'{found.reason}: {found.fix}, leave backend out, or name "{found.backend}"'
            )
        other = choose(request, found.backend)
        log_fallback(request, other, chosen.candidate, found.reason, found.fix)
        chosen = other
    return chosen, backend_of(chosen.backend, request.spec.name)
