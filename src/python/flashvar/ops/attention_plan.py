"""How one kind of attention call is carried out: checked, decided and prepared once, then run.

Calls repeat the same shapes, strides and options thousands of times; everything that these decide
is kept, so that a repeated call costs one look-up, the outputs and the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from flashvar.backends import Launch, backend
from flashvar.decide import choose
from flashvar.ops.attention_inputs import Problem, check_options, inspect
from flashvar.verdicts import Request, Verdict

# Lengths that grow token by token make a new plan each; forgetting them all now and then is cheap.
_PLANS_KEPT: Final = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem, who serves it, and the launch; None where there is nothing to compute."""

    problem: Problem
    verdict: Verdict
    launch: Launch | None

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Out, contiguous in the user's layout, and the log-sum-exp if it is wanted."""
        problem = self.problem
        out = q.new_empty(problem.out_shape)
        lse = q.new_empty(problem.lse_shape, dtype=problem.lse_dtype) if with_lse else None
        if self.launch is not None:
            self.launch(q, k, v, out, lse)
        else:
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
        return out, lse


_plans: dict[tuple[Any, ...], Plan] = {}


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    named: str,
) -> Plan:
    """The plan of a call; made, which checks every argument, the first time it is asked for.

    Raises:
        InvalidInputError: an argument is not what attention takes.
        BackendUnavailableError: nothing can serve the call.
    """
    # The key tells by equality: options of other types (1 for True, a tensor that changes) would
    # find the plan of another call, or could not be looked up at all.
    check_options(causal, scale, layout, named)
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        causal,
        scale,
        layout,
        named,
    )
    found = _plans.get(key)
    if found is None:
        found = _make(q, k, v, causal, scale, layout, named)
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        _plans[key] = found
    return found


def _make(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    named: str,
) -> Plan:
    problem = inspect(q, k, v, causal=causal, scale=scale, layout=layout, backend=named)
    request = Request("attention_fwd", problem.dtype, problem.device, problem.head_dim)
    verdict = _choose(request, named)
    launch = None
    if not problem.empty:
        launch = backend(verdict.backend).prepare_attention_fwd(problem, verdict)
    return Plan(problem, verdict, launch)


@cache
def _choose(request: Request, named: str) -> Verdict:
    return choose(request, named)
