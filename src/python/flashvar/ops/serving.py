"""The backend that serves a call of an op: its request, the choice, and the backend's module.

Selection chooses by what binaries and devices are: function, dtype and axes. An op may know more of
a call that a backend does not serve, such as strides; then another backend takes over.
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
from flashvar.selection.resolve import choose, report_takeover


@dataclass(frozen=True)
class Takeover:
    """The backend that serves a call in place of the chosen one, and why that does not."""

    backend: str
    reason: str
    fix: str  # what makes the chosen backend serve such calls


def serving(
    function: str,
    tensor: torch.Tensor,
    backend: str,
    call: object = None,
    takeover: Callable[[str], Takeover | None] = lambda chosen: None,
) -> tuple[CandidateResult, ModuleType]:
    """The candidate that serves a call on the dtype and device of `tensor`, and its module.

    `call` has an attribute for each of the op's axes. `takeover` is asked of each backend that is
    chosen; None: it serves the call. The log says that another one does, and why.

    Raises:
        BackendUnavailableError: no candidate serves the call, or the named one does not; the
            message says why.
    """
    device = tensor.device.index if tensor.is_cuda else None
    request = Request.of_call(function, DTYPES[tensor.dtype], device, call)
    chosen = choose(request, backend)
    explicit = chosen.explicit
    while (found := takeover(chosen.backend)) is not None:
        if explicit:
            raise BackendUnavailableError(
                f"{function}: expected backend {chosen.backend!r} to run it, found that "
                f'{found.reason}: {found.fix}, leave backend out, or name "{found.backend}"'
            )
        other = choose(request, found.backend)
        report_takeover(request, other, chosen.candidate, found.reason, found.fix)
        chosen = other
    return chosen, backend_of(chosen.backend, request.spec.name)
