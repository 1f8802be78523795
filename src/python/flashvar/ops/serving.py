"""The backend that serves a call of an op: its request, the choice, and the backend's module."""

from __future__ import annotations

from types import ModuleType

import torch

from flashvar.backends import backend as backend_of
from flashvar.ops.dtypes import DTYPES
from flashvar.selection.candidates import CandidateResult
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose


def serving(
    function: str, tensor: torch.Tensor, backend: str, call: object = None
) -> tuple[CandidateResult, ModuleType]:
    """The candidate that serves a call on the dtype and device of `tensor`, and its module.

    `call` has an attribute for each of the op's axes.

    Raises:
        BackendUnavailableError: no candidate serves the call; the message lists them all.
    """
    device = tensor.device.index if tensor.is_cuda else None
    request = Request.of_call(function, DTYPES[tensor.dtype], device, call)
    chosen = choose(request, backend)
    return chosen, backend_of(chosen.backend, request.spec.name)
