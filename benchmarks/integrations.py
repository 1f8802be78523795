"""What the integrations cost: registering, and each call beside flashvar's own.

    PYTHONPATH=src/python python benchmarks/integrations.py --json out.json

On a CUDA device, or on the CPU where there is none: the same tensors, with as many heads and rows
as leave little to compute. Contenders take turns. The JSON file: schema, benchmark, environment and
rows; of registering and of each way of a call median_us, low_us, high_us (20th and 80th
percentile), rounds and calls (per round); added_us is the median less that of calling
`flashvar.attention` with [batch, sequence, heads, head_dim] directly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Final

if __name__ == "__main__":
    # Run as a file, Python searches this folder: `build` would hide others.
    sys.path.pop(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import environment

_CALLS: Final = 200
_ROUNDS: Final = 40


def main() -> int:
    """Command line; 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--calls", type=int, default=_CALLS, help="per round")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    options = parser.parse_args()
    on_device = torch.cuda.is_available()
    rows = measure("cuda" if on_device else "cpu", options.calls, options.rounds)
    document = {
        "schema": 1,
        "benchmark": "integrations",
        "environment": environment.gather(device=on_device),
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        added = f"{row['added_us']:+8.2f} us" if "added_us" in row else ""
        print(f"{row['way']:32} {row['median_us']:9.2f} us {added}")
    return 0


def measure(device: str, calls: int, rounds: int) -> list[dict[str, Any]]:
    """Times of registering once more, and of the ways of a call."""
    from transformers.modeling_utils import AttentionInterface

    from flashvar.integrations import torch as sdpa
    from flashvar.integrations import transformers

    rows = []
    for name, register in {
        "transformers": transformers.register,
        "torch": lambda: sdpa.activate().__exit__(None, None, None),
    }.items():
        register()
        registering = [_time(register, 1, "cpu") for _ in range(rounds)]
        rows.append({"way": f"register, {name}", **_summary(registering, 1)})
    attention = AttentionInterface()["flashvar"]
    sdpa.activate("auto" if device == "cuda" else "reference")
    for name, wants_gradients in (("no-gradient", False), ("gradient", True)):
        ways = _ways(device, attention, wants_gradients) | _torchs_ways(device, wants_gradients)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for call in ways.values():
            _time(call, calls, device)
        for _ in range(rounds):
            for way, call in ways.items():
                found[way].append(_time(call, calls, device))
        direct = median(found["direct"])
        rows += [
            {
                "way": f"{way}, {name}",
                **_summary(times, calls),
                "added_us": median(times) - direct,
            }
            for way, times in found.items()
        ]
    return rows


def _ways(device: str, attention: Any, wants_gradients: bool) -> dict[str, Callable[[], object]]:
    import flashvar

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


def _summary(microseconds: list[float], calls: int) -> dict[str, Any]:
    fifths = quantiles(microseconds, n=5, method="inclusive")
    return {
        "median_us": median(microseconds),
        "low_us": fifths[0],
        "high_us": fifths[-1],
        "rounds": len(microseconds),
        "calls": calls,
    }


if __name__ == "__main__":
    sys.exit(main())
