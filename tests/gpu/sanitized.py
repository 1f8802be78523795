"""Run a representative set of calls under NVIDIA's compute-sanitizer: all of its four tools.

    python tests/gpu/sanitized.py                        # every op, cuda and triton, every tool
    python tests/gpu/sanitized.py --tool racecheck --backend cuda --op gated_delta_rule

Forward and backward of each call, on memory that torch's allocator does not cache, so that an
access beyond a tensor is one beyond an allocation. Results are not compared here. Ends with 1 where
a tool found something, 2 where it is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_HERE = Path(__file__).parent
_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_FOUND = 7  # exit code that compute-sanitizer is told to use
# Together they take every path of a kernel that differs in its memory accesses or barriers.
_FEATURES = (
    "causal-more-queries",
    "window-both",
    "softcap",
    "mqa-causal",
    "bias-that-hides",
    "dropout-causal",
    "head-dim-v",
    "sinks-causal",
    "deterministic",
    "packed-zero-lengths",
    "packed-offset",
    "packed-cache",
    "packed-extras",
)
# Of sequences of one key tile, and the lengths: one small tile, and a large one.
_SHORT = (
    "causal",
    "all-modifiers",
    "bias",
    "dropout-full",
    "deterministic",
    "packed",
    "cache-causal",
)
_SHORT_LENGTHS = ((150, 40), (200, 128))
_FEW_KEY_TILES = (
    "bias-one-key-tile",
    "packed-one-key-tile",
    "packed-deterministic",
    "packed-extras",
)
_IN_LARGE_TILES = ("packed-offset", "packed-causal", "packed-cache", "packed-extras")
_HEAD_DIMS = (40, 64, 80, 128, 192, 256)


def main() -> int:
    """Under the sanitizer (`--calls`) make the calls; else start it, tool by tool."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tool", action="append", choices=_TOOLS, help="all four by default")
    parser.add_argument("--backend", action="append", help="cuda and triton by default")
    parser.add_argument("--op", action="append", choices=_CALLS, help="all by default")
    parser.add_argument(
        "--head-dim", type=int, action="append", help=f"of attention: {_HEAD_DIMS} by default"
    )
    parser.add_argument("--calls", action="store_true", help="make the calls, without a sanitizer")
    options = parser.parse_args()
    backends = options.backend or ["cuda", "triton"]
    head_dims = options.head_dim or list(_HEAD_DIMS)
    ops = options.op or list(_CALLS)
    if options.calls:
        _make_calls(ops, backends, head_dims)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("expected compute-sanitizer of the CUDA toolkit on the PATH, found none: install it")
        return 2
    again = [sys.executable, __file__, "--calls", *(f"--backend={name}" for name in backends)]
    again += [f"--head-dim={head_dim}" for head_dim in head_dims]
    again += [f"--op={op}" for op in ops]
    subprocess.run(again, check=True)  # Triton compiles outside of the sanitizer
    return max([_run(tool, again) for tool in options.tool or _TOOLS])


def _run(tool: str, command: list[str]) -> int:
    start = time.monotonic()
    sanitizer = ["compute-sanitizer", f"--tool={tool}", f"--error-exitcode={_FOUND}"]
    done = subprocess.run(
        [*sanitizer, "--print-limit=5", *command],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    print(f"{tool}: {said[-1] if said else 'no word'} in {time.monotonic() - start:.0f} s")
    if done.returncode:
        print("\n".join(said[:40]) or done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    return int(done.returncode != 0)


def _make_calls(ops: list[str], backends: list[str], head_dims: list[int]) -> None:
    sys.path[:0] = [str(_HERE), str(_HERE.parent)]
    import torch
    from device_call import DEVICE

    torch.manual_seed(0)
    for op in ops:
        for backend in backends:
            _CALLS[op](backend, head_dims)
            if DEVICE == "cuda":
                torch.cuda.synchronize()


def _attend(backend: str, head_dims: list[int]) -> None:
    """Calls of attention: features, blocks that take several tiles, divided keys and queries."""
    import torch
    from device_call import DEVICE, replace_inputs, run
    from features import FEATURES, Case, dense, many_sequences, packed
    from test_attention_few_key_tiles import FEATURES as FEW
    from test_attention_rows_inside_lines import call_of
    from test_attention_short_sequences import FEATURES as SHORT

    blocks = 3
    if DEVICE == "cuda":
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
    kinds = [FEATURES[name] for name in _FEATURES]
    # Blocks that take a second tile of a counter: of keys, and of queries where dQ is by itself.
    for deterministic in (False, True):
        kinds.append(
            lambda d, t, deterministic=deterministic: Case(
                many_sequences(d, t, 2 * blocks + 1, causal=True), deterministic=deterministic
            )
        )
    for heads, lengths, causal in (
        ((8, 2), (1, 1500), False),
        ((2, 2), (70, 1500), True),
        ((8, 1), (300, 300), True),
        ((6, 2), (5, 1500), True),
        ((2, 2), (256, 256), False),  # as many small tiles as large ones hold
        ((2, 2), (700, 77), False),
        ((2, 2), (900, 300), False),
    ):
        kinds.append(
            lambda d, t, heads=heads, lengths=lengths, causal=causal: Case(
                dense(d, t, lengths, heads=heads, batch=1, causal=causal)
            )
        )
    # Packed groups of packed queries.
    kinds.append(
        lambda d, t: Case(
            packed(d, t, (1, 0, 1, 1), (1500, 40, 0, 700), heads=(8, 2), outside=(2, 3))
        )
    )
    for name in _SHORT:
        for lengths in _SHORT_LENGTHS:
            kinds.append(lambda d, t, name=name, n=lengths: SHORT[name](d, t, n))
    kinds += [FEW[name] for name in _FEW_KEY_TILES]
    # With a bound of long sequences: calls of short ones have small tiles on 9.0.
    for name in _IN_LARGE_TILES:
        kinds.append(
            lambda d, t, name=name: dataclasses.replace(FEATURES[name](d, t), max_seqlen=2000)
        )
    # Rows that start inside a line of 128 bytes, which are moved between head dims 64 and 128.
    for queries, causal in ((1, False), (5, True)):
        kinds.append(
            lambda d, _, queries=queries, causal=causal: Case(
                call_of(d, queries, (8, 40), heads=(16, 8), apart=24, causal=causal)
            )
        )
    for number, kind in enumerate(kinds):
        for head_dim in head_dims:
            dtype = (torch.bfloat16, torch.float16)[number % 2]
            case = kind(head_dim, dtype)
            named = {n: getattr(case.call, n) for n in ("q", "k", "v", "bias")}
            leaves = {
                n: tensor.detach().requires_grad_()
                for n, tensor in named.items()
                if tensor is not None
            }
            out, lse = run(
                replace_inputs(case.call, leaves),
                backend,
                case.layout,
                case.max_seqlen,
                case.deterministic,
            )
            ones = (torch.ones_like(out), torch.ones_like(lse))
            torch.autograd.grad((out, lse), list(leaves.values()), ones)


def _merge(backend: str, head_dims: list[int]) -> None:
    """Calls of merge_states: rows without keys among the others."""
    import torch
    from merge_states_parts import made

    import flashvar

    for head_dim in head_dims:
        outs, lses = made(3, (2, 37, 3), head_dim, torch.bfloat16)
        lses[0][:, :, ::5] = -torch.inf
        leaves = [one.requires_grad_() for one in (*outs, *lses)]
        merged = flashvar.merge_states(outs, lses, backend=backend)
        torch.autograd.grad(merged, leaves, [torch.ones_like(one) for one in merged])


def _follow_states(backend: str, _: list[int]) -> None:
    """Calls of gated_delta_rule: chunks of every kind, packed, in segments, and of few tokens."""
    import torch
    from device_call import DEVICE
    from gated_delta_rule_compared import made

    from flashvar import gated_delta_rule

    packed = (0, 100, 1, 0, 640, 65, 0)
    for dims in ((64, 64), (128, 128), (40, 24), (72, 136)):
        of_tokens, careful = made(200, (1, 2), dims, fused=False), made(200, (1, 2), dims)
        for given, beta in ((of_tokens, 2.0), (careful, 1.6)):  # equal keys: updates grow
            given["k"] = given["k"][:, :1].expand_as(given["q"]).contiguous()
            given.update(beta=torch.full_like(given["beta"], beta), beta_sigmoid=False)
            given["allow_neg_eigval"] = False
        long = made(2000, (1, 1), dims, batch=1)  # in segments
        for given in (made(300, (2, 6), dims), made(0, (1, 2), dims, packed=packed)):
            _differentiate(given, backend)
        for given in (of_tokens, careful, long):
            _differentiate(given, backend)
        if backend == "cuda" and any(dim % 32 for dim in dims):
            continue
        for tokens in (1, 3):
            given = made(tokens, (2, 4), dims)
            pool = torch.randn(9, *given.pop("initial_state").shape[1:], device=DEVICE)
            slots = torch.tensor([8, -1], device=DEVICE)
            gated_delta_rule(**given, initial_state=pool, state_indices=slots, backend=backend)


def _differentiate(given: dict[str, Any], backend: str) -> None:
    import torch

    from flashvar import gated_delta_rule

    leaves = {
        name: x.detach().requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    found = gated_delta_rule(**{**given, **leaves}, return_final_state=True, backend=backend)
    torch.autograd.grad(found, list(leaves.values()), [torch.ones_like(one) for one in found])


def _convolve(backend: str, _: list[int]) -> None:
    """Calls of causal_conv1d: packed and not, along channels and tokens, aligned and not."""
    import torch
    from device_call import DEVICE

    import flashvar

    # Rows of 700 tokens; of 765, which begin anywhere and of which some have an empty last tile; of
    # views from token 1 on, whose results begin elsewhere than they do.
    for dim, length, first in ((64, 700, 0), (33, 765, 0), (33, 700, 1)):
        ends = torch.tensor([0, 0, 1, 300, length], dtype=torch.int32, device=DEVICE)
        for layout in ("btd", "bdt"):
            for cu_seqlens in (None, ends):
                x = torch.randn(1, dim, length + first, device=DEVICE, dtype=torch.bfloat16)
                x = x[..., first:]
                if layout == "btd":
                    x = x.mT.contiguous()
                count = 1 if cu_seqlens is None else 4
                given = {
                    "x": x,
                    "weight": torch.randn(dim, 4, device=DEVICE),
                    "bias": torch.randn(dim, device=DEVICE),
                    "residual": torch.randn_like(x),
                    "initial_state": torch.randn(count, dim, 3, device=DEVICE),
                }
                leaves = [one.requires_grad_() for one in given.values()]
                y, final = flashvar.causal_conv1d(
                    **given, activation="silu", return_final_state=True, cu_seqlens=cu_seqlens,
                    layout=layout, backend=backend,
                )  # fmt: skip
                torch.autograd.grad((y, final), leaves, (y.detach(), final.detach()))
        pool = torch.randn(9, dim, 3, device=DEVICE)
        tokens, weight = torch.randn(4, dim, device=DEVICE), torch.randn(dim, 4, device=DEVICE)
        slots = torch.tensor([8, -1, 0, 100], device=DEVICE)
        flashvar.causal_conv1d_update(
            tokens, pool, weight, activation="silu", state_indices=slots, backend=backend
        )


_CALLS: Final[dict[str, Callable[[str, list[int]], None]]] = {
    "attention": _attend,
    "merge_states": _merge,
    "gated_delta_rule": _follow_states,
    "causal_conv1d": _convolve,
}


if __name__ == "__main__":
    sys.exit(main())
