"""Host time of one small call: what Python, torch and the launch cost.

Four ways to call attention are timed apart: eager without gradients, through torch's dispatcher
alone, with inputs that require gradients (the forward of a step), and such a forward with its
backward. Other ops are timed without gradients. Calls are enqueued in runs short enough for the
launch queue, without waiting inside a run, and contenders take turns. SDPA's backend choice is made
outside of the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Final, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import cases
from benchmarks.contender import heads_first
from benchmarks.names import HOST_OF_OP
from benchmarks.report import Options, Report, Row, chosen, reason
from flashvar.cli.speed import OURS, timed_ops
from flashvar.ops.dtypes import dtype_of

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
    tensors = [torch.randn(shape, dtype=dtype_of(case.dtype), device=device) for _ in range(3)]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    # Leaves, not views of leaves: those would add a step of their own to the graph.
    theirs = [view.detach() for view in heads_first(*tensors)]
    their_leaves = [view.detach().requires_grad_() for view in heads_first(*leaves)]
    grad_out, their_grad_out = tensors[0], theirs[0]

    def ours(backend: Literal["cuda", "triton"]) -> dict[str, Contender]:
        # The options of the op, as `attention` fills them in: no extras, no mask.
        extras = (None,) * 7
        options = (False, None, -1, -1, 0.0, 0.0, False, "bshd", backend, None, None)

        def forward(inputs: list[torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = attention(*inputs, backend=backend)
            return out

        def dispatched() -> object:
            return torch.ops.flashvar.attention_fwd.default(*tensors, *extras, *options)

        def step() -> object:
            return torch.autograd.grad(forward(leaves), leaves, grad_out)

        name = "flashvar" if backend == "cuda" else f"flashvar-{backend}"
        return {
            f"{name}-eager": Contender(lambda: forward(tensors)),
            f"{name}-dispatcher": Contender(dispatched),
            f"{name}-gradient": Contender(lambda: forward(leaves)),
            f"{name}-step": Contender(step),
        }

    def sdpa(name: str, backend: SDPBackend) -> dict[str, Contender]:
        def step() -> object:
            out = scaled_dot_product_attention(*their_leaves)
            return torch.autograd.grad(out, their_leaves, their_grad_out)

        return {
            f"sdpa-{name}-eager": Contender(lambda: scaled_dot_product_attention(*theirs), backend),
            f"sdpa-{name}-gradient": Contender(
                lambda: scaled_dot_product_attention(*their_leaves), backend
            ),
            f"sdpa-{name}-step": Contender(step, backend),
        }

    def flash_op() -> object:
        """The op behind SDPA: what is left without its choice of a backend."""
        return torch.ops.aten._scaled_dot_product_flash_attention.default(*theirs)

    return {
        **ours("cuda"),
        **ours("triton"),
        **sdpa("flash", SDPBackend.FLASH_ATTENTION),
        "sdpa-flash-dispatcher": Contender(flash_op),
        **sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        **_other_ops(torch.device(device)),
        "empty-like": Contender(lambda: torch.empty_like(tensors[0])),
    }


def _other_ops(device: torch.device) -> dict[str, Contender]:
    return {
        f"{HOST_OF_OP}{cell.name}": Contender(op.call(cell, OURS, device))
        for op in timed_ops().values()
        for cell in op.SMALL_CELLS
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
