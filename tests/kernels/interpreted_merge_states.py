"""Run the Triton kernels of merge_states in Triton's interpreter, beside the reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from interpreter import patch_once


@dataclass(frozen=True)
class Case:
    """Sizes of one call."""

    parts: int = 2
    head_dim: int = 64
    dtype: str = "half"
    form: str = "listed"  # or "stacked", "packed", "bhsd", "sliced"
    rows: tuple[int, int, int] = (2, 5, 3)
    grad_lse: bool = True

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join(words) or "plain"


CASES = [
    Case(),
    Case(parts=1),
    Case(parts=3, head_dim=40, dtype="float"),
    Case(parts=8, head_dim=7, grad_lse=False),
    Case(parts=9, head_dim=300),
    Case(parts=17, head_dim=96, form="stacked"),
    Case(parts=3, form="packed", rows=(1, 20, 2)),
    Case(parts=3, form="bhsd"),
    Case(parts=3, head_dim=16, form="sliced", dtype="float"),
    Case(head_dim=1, rows=(1, 1, 1)),
]


def made(case: Case) -> tuple[Any, Any]:
    """With rows that are absent in one part, absent in all, infinite and NaN."""
    batch, seqlen, heads = case.rows
    dtype = getattr(torch, case.dtype)
    outs = [torch.randn(batch, seqlen, heads, case.head_dim).to(dtype) for _ in range(case.parts)]
    lses = [3 * torch.randn(batch, heads, seqlen) for _ in range(case.parts)]
    if seqlen > 4:
        lses[0][-1, -1, 0] = -torch.inf
        outs[0][-1, 0, -1] = torch.nan
        lses[-1][-1, -1, 2] = torch.inf
        lses[-1][-1, -1, 3] = torch.nan
        for lse in lses:
            lse[-1, -1, 4] = -torch.inf
    if case.form == "packed":
        return [x[0] for x in outs], [x[0] for x in lses]
    if case.form == "bhsd":
        return [x.transpose(1, 2).contiguous() for x in outs], lses
    if case.form == "sliced":
        return [torch.cat((x, x), -1)[..., : case.head_dim] for x in outs], lses
    if case.form == "stacked":
        return torch.stack(outs), torch.stack(lses)
    return outs, lses


def wrong(case: Case) -> str:
    import flashvar

    torch.manual_seed(0)
    given = made(case)
    layout = "bhsd" if case.form == "bhsd" else "bshd"
    results = []
    for backend in ("triton", "reference"):
        if case.form == "stacked":
            leaves = [x.clone().requires_grad_() for x in given]
            arguments: tuple[Any, ...] = tuple(leaves)
        else:
            copies = [[x.detach().clone(memory_format=torch.preserve_format) for x in one]
                      for one in given]  # fmt: skip
            if case.form == "sliced":
                copies[0] = [x.detach() for x in given[0]]
            leaves = [x.requires_grad_() for one in copies for x in one]
            arguments = tuple(copies)
        out, lse = flashvar.merge_states(*arguments, layout=layout, backend=backend)
        torch.manual_seed(1)
        wanted = (out, lse) if case.grad_lse else (out,)
        grads = torch.autograd.grad(wanted, leaves, [torch.randn_like(x) for x in wanted])
        results.append((out.detach(), lse.detach(), *grads))
    tolerance = {"half": 2e-3, "float": 2e-6}[case.dtype]
    try:
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(
                found, expected, atol=4 * tolerance, rtol=tolerance, equal_nan=True
            )
    except AssertionError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    patch_once()
    print(json.dumps({str(case): wrong(case) for case in CASES}))
