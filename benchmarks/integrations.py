"""What the integrations cost: registering once more, and each call beside flashvar's own.

On a CUDA device, or on the CPU where there is none: the same tensors, with as many heads and rows
as leave little to compute. Contenders take turns. The first registration of a process also loads
flashvar's operations, which the first call would load otherwise: that is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter
from typing import Final

import torch

from benchmarks.environment import has_device
from benchmarks.report import BenchmarkError, Options, Report, Row, chosen

_ROUNDS: Final = 40
# As many as fit in the launch queue, so that none of them waits for the device.
_MOST_CALLS: Final = 200
_FEWEST_CALLS: Final = 2


def run(options: Options) -> Report:
    """Times registering, and the chosen ways of a call without and with gradients.

    Raises:
        BenchmarkError: for an unknown way, or where transformers is missing.
    """
    from flashvar.integrations import torch as sdpa

    device = "cuda" if has_device() else "cpu"
    registering, calls = _registering(), {}
    sdpa.activate("auto" if device == "cuda" else "reference")
    for kind, wants_gradients in (("no-gradient", False), ("gradient", True)):
        ways = _ways(device, wants_gradients) | _torchs_ways(device, wants_gradients)
        calls[kind] = {f"{way}, {kind}": call for way, call in ways.items()}
    names = [*registering, *(way for ways in calls.values() for way in ways)]
    wanted = chosen(names, options.only)
    rows: list[Row] = []
    for way, register in registering.items():
        if way in wanted:
            rows.append(
                {"way": way, **_summary([_time(register, 1, "cpu") for _ in range(_ROUNDS)], 1)}
            )
    for kind, ways in calls.items():
        direct = f"direct, {kind}"
        mine = {way: ways[way] for way in ways if way in wanted or way == direct}
        if len(mine) > 1 or direct in wanted:
            rows += _beside(direct, mine, device, options.seconds)
    sdpa.deactivate()
    return Report(
        rows=rows,
        columns=("way (us)", "median", "low", "high", "added"),
        lines=[
            (
                str(row["way"]),
                *(f"{row[key]:.2f}" for key in ("median_us", "low_us", "high_us")),
                f"{row['added_us']:+.2f}" if "added_us" in row else "-",
            )
            for row in rows
        ],
    )


def _registering() -> dict[str, Callable[[], object]]:
    """What registers, done once already."""
    from flashvar.errors import IntegrationError
    from flashvar.integrations import torch as sdpa
    from flashvar.integrations import transformers as transformers

    try:
        transformers.register()
    except IntegrationError as error:
        raise BenchmarkError(str(error)) from None
    return {
        "register, transformers": transformers.register,
        "register, torch": lambda: sdpa.activate().__exit__(None, None, None),
    }


def _beside(
    direct: str, ways: dict[str, Callable[[], object]], device: str, seconds: float
) -> list[Row]:
    """Rows of ways that take turns, with what each adds to the direct one."""
    for call in ways.values():  # what the first call loads is not timed
        _time(call, _FEWEST_CALLS, device)
    once = max(_time(call, _FEWEST_CALLS, device) for call in ways.values())
    calls = min(max(int(1e6 * seconds / _ROUNDS / once), _FEWEST_CALLS), _MOST_CALLS)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(_ROUNDS):
        for way, call in ways.items():
            found[way].append(_time(call, calls, device))
    least = median(found[direct])
    return [
        {"way": way, **_summary(times, calls), "added_us": median(times) - least}
        for way, times in found.items()
    ]


def _ways(device: str, wants_gradients: bool) -> dict[str, Callable[[], object]]:
    from transformers.modeling_utils import AttentionInterface

    import flashvar

    attention = AttentionInterface()["flashvar"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    module = torch.nn.Module()
    module.is_causal = True
    # As layers have them: rows first in memory, heads first in shape.
    rows = [torch.randn((2, 16, 2, 64), dtype=dtype, device=device) for _ in range(3)]
    views = [tensor.transpose(1, 2).detach() for tensor in rows]
    for tensor in (*rows, *views):
        tensor.requires_grad_(wants_gradients)

    def transposed() -> object:
        q, k, v = (view.transpose(1, 2) for view in views)
        return flashvar.attention(q, k, v, causal=True, scale=0.125)

    # A batch of one row is looked at for packed sequences, once for all layers.
    single = [view[:1].detach().requires_grad_(wants_gradients) for view in views]
    positions = torch.arange(16, device=device)[None]
    options = {"dropout": 0.0, "scaling": 0.125, "position_ids": positions}
    return {
        "direct": lambda: flashvar.attention(*rows, causal=True, scale=0.125),
        "direct and three transposes": transposed,
        "transformers": lambda: attention(module, *views, None, **options),
        "transformers, one row": lambda: attention(module, *single, None, **options),
    }


def _torchs_ways(device: str, wants_gradients: bool) -> dict[str, Callable[[], object]]:
    from flashvar.integrations.attend import Attend
    from flashvar.integrations.xformers import memory_efficient_attention

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows, heads = (
        [torch.randn(shape, dtype=dtype, device=device) for _ in range(3)]
        for shape in ((2, 16, 2, 64), (2, 2, 16, 64))
    )
    views = [tensor.transpose(1, 2).detach() for tensor in rows]
    for tensor in (*rows, *heads, *views):
        tensor.requires_grad_(wants_gradients)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    attend = Attend(flash=True, backend="auto" if device == "cuda" else "reference")
    return {
        "sdpa": lambda: sdpa(*heads, is_causal=True),
        "sdpa, rows first in memory": lambda: sdpa(*views, is_causal=True),
        "Attend": lambda: attend(*heads),
        "xformers": lambda: memory_efficient_attention(*rows),
    }


def _time(call: Callable[[], object], calls: int, device: str) -> float:
    """Microseconds of host time per call, of a run that starts on an idle device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (perf_counter() - start) / calls


def _summary(microseconds: list[float], calls: int) -> Row:
    fifths = quantiles(microseconds, n=5, method="inclusive")
    return {
        "median_us": median(microseconds),
        "low_us": fifths[0],
        "high_us": fifths[-1],
        "rounds": len(microseconds),
        "calls": calls,
    }
