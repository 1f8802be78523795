"""Host time of one small attention call: what Python, torch and the launch cost.

Calls are enqueued in runs short enough for the launch queue, without waiting inside a run, and
contenders take turns. SDPA's backend choice is made outside of the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases
from benchmarks.attention import DTYPES, heads_first
from benchmarks.report import Options, Report, Row, chosen, reason

_CALLS: Final = 200
_ROUNDS: Final = 30


@dataclass(frozen=True)
class Contender:
    """A call to time, and what SDPA is held to while it runs."""

    call: Callable[[], object]
    sdpa: SDPBackend | None = None


def run(options: Options) -> Report:
    """Times the chosen contenders on the current CUDA device.

    Raises:
        BenchmarkError: for an unknown contender.
    """
    contenders = _contenders("cuda")
    names = chosen(list(contenders), options.only)
    microseconds: dict[str, list[float]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            _time(contenders[name])
            microseconds[name] = []
        except Exception as error:  # a contender that this machine lacks is a result, not a failure
            skipped[name] = reason(error)
    for _ in range(_ROUNDS):
        for name, found in microseconds.items():
            found.append(_time(contenders[name]))
    rows: list[Row] = [
        {"contender": name, **_summary(microseconds[name])}
        if name in microseconds
        else {"contender": name, "skipped": skipped[name]}
        for name in names
    ]
    return Report(
        rows=rows,
        columns=("call (us)", "median", "low", "high"),
        lines=[
            (
                str(row["contender"]),
                *(f"{row[k]:.2f}" if k in row else "-" for k in ("median_us", "low_us", "high_us")),
            )
            for row in rows
        ],
    )


def _contenders(device: str) -> dict[str, Contender]:
    from flashvar import attention

    case = cases.host()
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    dtype = DTYPES[case.dtype]
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    q_grad, k_grad, v_grad = (tensor.clone().requires_grad_() for tensor in (q, k, v))

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        # Leaves, not views of leaves: those would add a step of their own to the graph.
        queries, keys, values = (
            view.detach().requires_grad_(view.requires_grad) for view in heads_first(q, k, v)
        )
        return lambda: scaled_dot_product_attention(queries, keys, values)

    def dispatched() -> object:
        return torch.ops.flashvar.attention_fwd(q, k, v, False, None, "bshd", "cuda")

    return {
        "flashvar-eager": Contender(lambda: attention(q, k, v, backend="cuda")),
        "flashvar-dispatcher": Contender(dispatched),
        "flashvar-gradient": Contender(lambda: attention(q_grad, k_grad, v_grad, backend="cuda")),
        "sdpa-flash": Contender(sdpa(q, k, v), SDPBackend.FLASH_ATTENTION),
        "sdpa-flash-gradient": Contender(sdpa(q_grad, k_grad, v_grad), SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": Contender(sdpa(q, k, v), SDPBackend.CUDNN_ATTENTION),
        "empty-like": Contender(lambda: torch.empty_like(q)),
    }


def _time(contender: Contender) -> float:
    """Microseconds of host time per call, over one run of calls that starts on an idle device."""
    call = contender.call
    with nullcontext() if contender.sdpa is None else sdpa_kernel(contender.sdpa):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(_CALLS):
            call()
        end = perf_counter()
        torch.cuda.synchronize()
    return 1e6 * (end - start) / _CALLS


def _summary(microseconds: list[float]) -> Row:
    fifths = quantiles(microseconds, n=5, method="inclusive")
    return {
        "median_us": median(microseconds),
        "low_us": fifths[0],
        "high_us": fifths[-1],
        "rounds": _ROUNDS,
        "calls": _CALLS,
    }
