"""Times attention on a CUDA device: flashvar's choice and torch's own, in turns, on one input.

Between two calls the cache is overwritten; a rate is that of the median call.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashvar.cli import progress
from flashvar.cli.diagnosis import Report
from flashvar.cli.speed import (
    CELLS,
    DTYPE,
    OURS,
    PEERS,
    SECONDS,
    SEQLEN,
    Cell,
    Result,
    Speed,
    record_of,
)

Call = Callable[[], object]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Milliseconds of each contender's median call, given seconds to spend.
Timer = Callable[[dict[str, Call], float], dict[str, float]]

_SDPA: Final = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
_OPS: Final = {"forward": "attention_fwd", "backward": "attention_bwd"}
_NOTHING: Final = "nothing"
_WARM_UP_CALLS: Final = 3
_FEWEST_ROUNDS: Final = 5
_MOST_ROUNDS: Final = 300


def check(report: Report, number: int, *, quiet: bool, timer: Timer | None = None) -> Speed:
    """Time every cell on `cuda:number`, with whatever serves it there."""
    device = report.system.device(number)
    if device is None:
        return Speed(number, None, why=f"torch sees no cuda:{number}")
    record = record_of(device.name)
    results = []
    with torch.cuda.device(number):
        for cell in progress.follow(CELLS, lambda cell: cell.name, quiet=quiet):
            candidate = _candidate(report, number, cell)
            calls, failures = _calls(cell, candidate, torch.device("cuda", number))
            times = (timer or time)(calls, SECONDS / len(CELLS)) if calls else {}
            rates = {name: cell.operations / spent / 1e9 for name, spent in times.items()}
            results.append(Result(cell, candidate, rates, failures))
    return Speed(number, device.name, tuple(results), record)


def _candidate(report: Report, number: int, cell: Cell) -> str:
    """Who serves flashvar's calls."""
    asked = (_OPS[cell.direction], DTYPE, number, (cell.head_dim, cell.head_dim))
    for decision in report.decisions:
        request = decision.request
        if (request.op, request.dtype, request.device, request.dims) == asked and decision.chosen:
            return decision.chosen.candidate
    return _NOTHING


def time(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """On the current device; all take turns, so that all meet the card as warm as it is."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Twice the cache: writing it leaves nothing of the inputs there.
    flush = torch.empty(2 * properties.L2_cache_size, dtype=torch.int8, device="cuda")
    spent: dict[str, list[float]] = {name: [] for name in calls}
    once = 0.0
    for _ in range(_WARM_UP_CALLS):
        once = sum(_event(call, flush) for call in calls.values())
    rounds = int(1000 * seconds / max(once, 1e-3))
    for _ in range(min(max(rounds, _FEWEST_ROUNDS), _MOST_ROUNDS)):
        for name, call in calls.items():
            spent[name].append(_event(call, flush))
    return {name: float(median(times)) for name, times in spent.items()}


def _event(call: Call, flush: torch.Tensor) -> float:
    flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _calls(
    cell: Cell, candidate: str, device: torch.device
) -> tuple[dict[str, Call], dict[str, str]]:
    """What is timed, called once; and why the others are not."""
    shape = (cell.batch, SEQLEN, cell.heads, cell.head_dim)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4)]
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    # The reference would hold every score: minutes, and more memory than most cards have.
    if candidate in (_NOTHING, "reference"):
        failures[OURS] = f"{candidate} serves it"
    for name in (one for one in (OURS, *PEERS) if one not in failures):
        try:
            call = _call(_attention(name), cell, *tensors)
            call()
            calls[name] = call
        except Exception as error:  # what torch does not serve is an answer, not a failure
            failures[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return calls, failures


def _call(
    attention: Attention, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    grad_out: torch.Tensor,
) -> Call:  # fmt: skip
    if cell.direction == "forward":
        return lambda: attention(q, k, v)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def _attention(name: str) -> Attention:
    """For [batch, sequence, heads, head_dim]."""
    if name == OURS:
        from flashvar import attention

        return lambda q, k, v: attention(q, k, v, causal=True)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(_SDPA[name]):
            return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    return sdpa
