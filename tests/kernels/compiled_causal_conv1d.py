"""Compile the Triton kernels of causal_conv1d for a device that is not here.

    python compiled_causal_conv1d.py 90 "btd batch" "bdt packed"

compiles the kernels of these calls, and prints one JSON object: call -> kernel -> instruction that
moves memory -> how often it occurs.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import torch

from flashvar.backends.triton import causal_conv1d
from flashvar.backends.triton.absent_device import set_target
from flashvar.backends.triton.launch_or_compile import Begin
from flashvar.ops.causal_conv1d.problem import Convolution, Gradients


def compiling(moves: dict[str, dict[str, int]]) -> Begin:
    """Compiles kernels where they would be launched."""

    def begin(kernel: Any, grid: tuple[int, ...]) -> Any:
        def compiled(*given: Any, **constants: Any) -> None:
            code = kernel.warmup(*given, grid=grid, **constants).asm["ptx"]
            moves[kernel.__name__] = Counter(re.findall(r"(?:ld|st)\.global\S*", code))

        return compiled

    return begin


def call(layout: str, packed: bool, begin: Begin) -> None:
    x = torch.zeros(1, 64, 256, dtype=torch.bfloat16)
    if layout == "bdt":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = torch.zeros(256, 4), torch.zeros(256) if packed else None
    final = torch.zeros(2 if packed else 1, 256, 4)
    state = final if packed else None
    ends = torch.zeros(3, dtype=torch.int32) if packed else None
    conv = Convolution(x, weight, bias, state, ends, True)
    causal_conv1d.forward(None, conv, x if packed else None, x, final, begin)
    causal_conv1d.backward(None, conv, x, state, Gradients(x, weight, bias, state), begin)
    if ends is not None:
        for positions in (None, ends[:1]):
            causal_conv1d.update(None, conv, None, ends[:1], positions, x, begin)


if __name__ == "__main__":
    number = int(sys.argv[1])
    set_target((number // 10, number % 10))
    answers: dict[str, dict[str, dict[str, int]]] = {name: {} for name in sys.argv[2:]}
    for name, moves in answers.items():
        layout, kind = name.split()
        call(layout, kind == "packed", compiling(moves))
    print(json.dumps(answers))
