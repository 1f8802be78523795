"""The backend that runs a forward: that of selection, or Triton where it is faster.

The compiled kernels do not divide the keys of calls with score modifiers, so that few queries leave
most of a GPU idle. Triton's kernels for few queries do: on an H200, of 702 such calls with softcap
or ALiBi they are 2.9 times as fast in the geometric mean, 0.87 at worst and 41 at best.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch

from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention.spec import FORWARD, HEAD_DIM_STEP
from flashvar.ops.backend_choice import choose_backend
from flashvar.selection.request import Overrides

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import Problem
    from flashvar.selection.candidates import CandidateResult

TRITON: Final = find_spec("triton") is not None


def choose_forward(
    q: torch.Tensor, backend: str, problem: Problem
) -> tuple[CandidateResult, ModuleType]:
    """As `choose_backend` for the forward of a problem.

    Raises:
        BackendUnavailableError: no candidate runs the call, or the named one does not.
    """
    chosen, module = choose_backend(FORWARD, q, backend, problem)
    if chosen.backend == "cuda" and _triton_is_faster(problem):
        return triton_if_allowed(q, problem, chosen) or (chosen, module)
    return chosen, module


def triton_if_allowed(
    q: torch.Tensor, problem: Problem, chosen: CandidateResult
) -> tuple[CandidateResult, ModuleType] | None:
    """Triton in place of the chosen candidate; None: the user has named another, or it lacks."""
    if chosen.backend != "triton":
        # FLASHVAR_FORCE_ARCH names a binary.
        named = chosen.explicit or Overrides.from_environment().kind is not None
        if named or chosen.backend == "reference":
            return None
    try:
        return choose_backend(FORWARD, q, "triton", problem)
    except BackendUnavailableError:
        return None


def _triton_is_faster(problem: Problem) -> bool:
    """Whether Triton computes a problem faster than the compiled kernels."""
    alibi, bias = problem.alibi_batch_stride is not None, problem.bias is not None
    modified = problem.softcap != 0.0 or alibi or bias
    if not (TRITON and modified) or problem.empty or problem.device is None:
        return False
    # Other rows would be copied first.
    strides = (*problem.q, *problem.k, *problem.v)
    if any(stride % HEAD_DIM_STEP for stride in strides):
        return False
    from flashvar.backends.triton.attention import few_rows, split_kv

    return few_rows.is_faster(problem, split_kv.machine_of(problem.device))
