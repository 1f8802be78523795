"""Run the Triton forward in Triton's interpreter, which replaces its compiler process-wide.

    TRITON_INTERPRET=1 python interpreted_attention.py

prints one JSON object, case -> "" or what was wrong. Float16 alone: the interpreter computes
bfloat16 on its raw bits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    head_dim: int
    lengths: tuple[int, int]
    causal: bool = False
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    scale: float | None = None
    layout: str = "bshd"
    aligned: bool = True

    def __str__(self) -> str:
        words = [f"d{self.head_dim}", f"{self.lengths[0]}x{self.lengths[1]}"]
        words += ["causal"] if self.causal else []
        words += [f"scale{self.scale}"] if self.scale is not None else []
        words += [self.layout] if self.layout != "bshd" else []
        words += [] if self.aligned else ["odd-strides"]
        return "-".join(words)


CASES = [
    Case(64, (65, 130), causal=True, heads=(4, 2), batch=2),
    Case(64, (130, 65), causal=True),
    Case(64, (1, 200)),
    Case(8, (5, 7)),
    Case(16, (64, 64), causal=True),
    Case(40, (33, 70), causal=True, scale=-0.3),
    Case(72, (65, 40), layout="bhsd"),
    Case(96, (33, 65), scale=0.0),
    Case(112, (20, 129), causal=True, aligned=False),
    Case(160, (17, 34), causal=True),
    Case(256, (17, 50), causal=True, heads=(2, 2)),
]


def run(case: Case) -> str:
    """What is wrong with the kernel's answer; empty when it is right."""
    import torch
    from oracle import Call, assert_right

    from flashvar.backends.triton import prepare_attention_fwd
    from flashvar.ops.attention_inputs import inspect
    from flashvar.verdicts import Verdict

    torch.manual_seed(0)

    def padded(length: int, heads: int) -> torch.Tensor:
        """Random values with NaN all around them."""
        odd = 0 if case.aligned else 1
        shape = (case.batch, length + 2, heads, case.head_dim + 8 + odd)
        view = torch.full(shape, torch.nan, dtype=torch.half)[:, 1:-1, :, odd : case.head_dim + odd]
        return view.copy_(torch.randn(view.shape))

    call = Call(
        padded(case.lengths[0], case.heads[0]),
        padded(case.lengths[1], case.heads[1]),
        padded(case.lengths[1], case.heads[1]),
        causal=case.causal,
        scale=case.scale,
    )
    heads_first = case.layout == "bhsd"
    inputs = [t.transpose(1, 2) if heads_first else t for t in (call.q, call.k, call.v)]
    problem = inspect(*inputs, causal=case.causal, scale=case.scale, layout=case.layout)
    out = torch.full(problem.out_shape, torch.nan, dtype=torch.half)
    lse = torch.full(problem.lse_shape, torch.nan)
    prepare_attention_fwd(problem, Verdict("triton", "triton", True, ""))(*inputs, out, lse)
    try:
        assert_right(call, problem.bshd(out), lse)
    except AssertionError as error:
        return str(error) or "wrong"
    return ""


if __name__ == "__main__":
    json.dump({str(case): run(case) for case in CASES}, sys.stdout)
