"""Run the Triton kernels of causal_conv1d in Triton's interpreter, beside the reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from interpreter import patch_once


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call."""

    dim: int = 20
    seqlen: int = 37
    width: int = 4
    dtype: str = "half"
    layout: str = "btd"
    ends: tuple[int, ...] = ()
    columns: int = 3  # 0: neither state
    rest: bool = True  # bias and residual
    silu: bool = True
    sliced: bool = False
    slots: tuple[int, ...] = ()  # an update with a pool of 5 states
    positions: tuple[int, ...] = ()  # of its states, which are circular buffers

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join(words) or "plain"


ENDS = (0, 0, 2, 3, 17, 20, 20, 37, 37)
CASES = [
    Case(),
    Case(width=2, columns=1, rest=False),
    Case(width=3, columns=5, silu=False, dtype="float"),
    Case(dim=9, seqlen=300, columns=0, dtype="float"),
    Case(dim=150, seqlen=3, columns=0),
    Case(dim=1, seqlen=1),
    Case(layout="bdt", dim=12, seqlen=140, columns=4, dtype="float"),
    Case(layout="bdt", ends=ENDS, columns=4),
    Case(ends=ENDS, dtype="float"),
    Case(ends=ENDS, columns=0, rest=False, width=2),
    Case(ends=(0, *range(0, 80, 9), 290), seqlen=290, dim=3, columns=9, dtype="float"),
    Case(sliced=True, width=3, columns=2, dtype="float"),
    Case(seqlen=2, columns=7, dtype="float"),
]
UPDATES = [
    Case(seqlen=1, slots=(3, 0)),
    Case(seqlen=1, slots=(4, -1, 2), columns=4, dtype="float", silu=False),
    Case(seqlen=6, slots=(1,), columns=9, dim=150, layout="bdt"),
    Case(seqlen=3, slots=(-1, 1), width=2, columns=1, rest=False),
    Case(seqlen=9, slots=(2, 1, 0), columns=13, width=3, dtype="float", sliced=True),
    Case(seqlen=1, slots=(3, -1, 0), columns=5, positions=(0, 7, 12), dtype="float"),
    Case(seqlen=7, slots=(1, 4), columns=4, positions=(3, 1), dim=150, layout="bdt"),
    Case(seqlen=3, slots=(0, 2), columns=9, width=2, positions=(8, 1000), dtype="float"),
]


def made(case: Case) -> dict[str, Any]:
    """The tensors of a call; tokens and weights of one sequence or channel are NaN or infinite."""
    dtype = getattr(torch, case.dtype)
    batch = len(case.slots) or (1 if case.ends else 2)
    sequences = 5 if case.slots else (len(case.ends) - 1 if case.ends else batch)
    shape = batch, case.seqlen, case.dim
    x = torch.randn(shape, dtype=torch.float32).to(dtype)
    if case.ends:
        x[:, case.ends[-2] - 1] = torch.nan
    if case.sliced:
        x = torch.cat((x, x), -1)[..., : case.dim]
    given = {"x": x, "weight": torch.randn(case.dim, case.width).to(dtype)}
    given["weight"][-1, 0] = torch.inf
    if case.rest:
        given |= {"bias": torch.randn(case.dim), "residual": torch.randn(shape).to(dtype)}
    if case.layout == "bdt":
        for name in {"x", "residual"} & given.keys():
            given[name] = given[name].transpose(1, 2).contiguous()
    if case.columns:
        given["initial_state"] = torch.randn(sequences, case.dim, case.columns)
    return given


def results(case: Case, given: dict[str, Any], backend: str) -> list[torch.Tensor]:
    """Output and final state, and their gradients."""
    from flashvar.ops.causal_conv1d.api import causal_conv1d

    leaves = {name: one.detach().requires_grad_() for name, one in given.items()}
    found = causal_conv1d(
        **leaves,
        activation="silu" if case.silu else None,
        return_final_state=bool(case.columns),
        cu_seqlens=torch.tensor(case.ends, dtype=torch.int32) if case.ends else None,
        layout=case.layout,
        backend=backend,
    )
    found = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(1)
    grads = torch.autograd.grad(
        found, list(leaves.values()), [torch.randn(x.shape).to(x.dtype) for x in found]
    )
    return [*(x.detach() for x in found), *grads]


def updated(case: Case, given: dict[str, Any], backend: str) -> list[torch.Tensor]:
    """Output and states of an update."""
    from flashvar.ops.causal_conv1d.api import causal_conv1d_update

    state = given["initial_state"].clone()
    others = {name: one for name, one in given.items() if name != "initial_state"}
    y = causal_conv1d_update(
        **others,
        state=state,
        activation="silu" if case.silu else None,
        state_indices=torch.tensor(case.slots),
        state_positions=torch.tensor(case.positions) if case.positions else None,
        layout=case.layout,
        backend=backend,
    )
    return [y, state]


def wrong(case: Case) -> str:
    torch.manual_seed(0)
    given = made(case)
    call = updated if case.slots else results
    tolerance = {"half": 2e-3, "float": 2e-5}[case.dtype]
    try:
        for found, expected in zip(
            call(case, given, "triton"), call(case, given, "reference"), strict=True
        ):
            torch.testing.assert_close(
                found, expected, atol=4 * tolerance, rtol=tolerance, equal_nan=True
            )
    except AssertionError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    patch_once()
    print(json.dumps({str(case): wrong(case) for case in CASES + UPDATES}))
