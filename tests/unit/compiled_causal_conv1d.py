"""Compile the Triton kernels of causal_conv1d for a device that is not here.

    python compiled_causal_conv1d.py 90

prints one JSON object: call -> kernel -> instruction that moves memory -> how often it occurs.
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
from flashvar.ops.causal_conv1d.problem import Convolution, Gradients

KERNELS = ("fwd_kernel", "final_kernel", "update_kernel", "bwd_kernel", "bwd_state_kernel")


class Compiled:
    """Stands for a kernel: compiles it where it would be launched."""

    def __init__(self, name: str, moves: dict[str, dict[str, int]]) -> None:
        self.name, self.moves = name, moves
        self.kernel = getattr(causal_conv1d, name)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def start(*given: Any, **constants: Any) -> None:
            code = self.kernel.warmup(*given, grid=grid, **constants).asm["ptx"]
            self.moves[self.name] = Counter(re.findall(r"(?:ld|st)\.global\S*", code))

        return start


def call(layout: str, packed: bool) -> None:
    x = torch.zeros(1, 64, 256, dtype=torch.bfloat16)
    if layout == "bdt":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = torch.zeros(256, 4), torch.zeros(256) if packed else None
    final = torch.zeros(2 if packed else 1, 256, 4)
    state = final if packed else None
    ends = torch.zeros(3, dtype=torch.int32) if packed else None
    conv = Convolution(x, weight, bias, state, ends, True)
    causal_conv1d.forward(None, conv, x if packed else None, x, final)
    causal_conv1d.backward(None, conv, x, state, Gradients(x, weight, bias, state))
    if ends is not None:
        for positions in (None, ends[:1]):
            causal_conv1d.update(None, conv, None, ends[:1], positions, x)


if __name__ == "__main__":
    number = int(sys.argv[1])
    set_target((number // 10, number % 10))
    answers = {}
    plain = {name: getattr(causal_conv1d, name) for name in KERNELS}
    for layout in ("btd", "bdt"):
        for packed in (False, True):
            moves: dict[str, dict[str, int]] = {}
            for name in KERNELS:
                setattr(causal_conv1d, name, plain[name])
                setattr(causal_conv1d, name, Compiled(name, moves))
            call(layout, packed)
            answers[f"{layout} {'packed' if packed else 'batch'}"] = moves
    print(json.dumps(answers))
