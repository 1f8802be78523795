"""Run the Triton kernels of gated_delta_rule in Triton's interpreter.

A forward is compared with the reference, gradients with autograd's of the recurrence in float64.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from gated_delta_rule_oracle import recurrent
from interpreter import patch_once


@dataclass(frozen=True)
class Case:
    """Sizes of one call."""

    batch: int = 1  # without `packed`
    seqlen: int = 3
    heads: tuple[int, int] = (1, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: str = "half"
    packed: tuple[int, ...] | None = None
    raw: bool = False  # l2norm, sigmoid and gate are fused
    bias: bool = True
    gate: float | None = None  # of the second token; None: g is None where nothing is fused
    state: str = "initial"  # or "none", "pool", "half pool"
    layout: str = "kv"
    strided: bool = False
    equal_keys: bool = False  # with beta 2
    narrow: bool = False  # products of 16-bit operands, as bfloat16 has them
    grads: bool = False

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join(words) or "plain"


CASES = [
    Case(batch=2),
    Case(gate=-0.5, dtype="float", seqlen=31),
    Case(gate=-torch.inf, dtype="float", state="none"),
    Case(gate=-200.0, batch=2, dims=(8, 6), heads=(2, 6)),
    Case(raw=True, gate=1.0, layout="vk"),
    Case(raw=True, gate=100.0, bias=False, dims=(40, 7), dtype="float"),
    Case(dims=(1, 1), seqlen=1),
    Case(dims=(96, 192), seqlen=1, heads=(1, 1), raw=True, gate=-1.0),
    Case(dims=(256, 80), seqlen=1, heads=(1, 1), gate=-1.0),
    Case(packed=(2, 0, 5, 1), gate=-1.0),
    Case(packed=(0, 0), gate=-1.0),
    Case(packed=(3, 0, 2), gate=-1.0, state="pool", layout="vk"),
    Case(batch=2, seqlen=1, gate=-1.0, state="pool"),
    Case(batch=2, seqlen=2, gate=-1.0, state="half pool", raw=True, layout="vk"),
    Case(batch=2, seqlen=4, gate=-1.0, strided=True, raw=True),
    # In chunks.
    Case(batch=2, seqlen=64, dtype="float"),
    Case(seqlen=130, gate=-0.5, dtype="float"),
    Case(seqlen=70, gate=-torch.inf, dtype="float", state="none"),
    Case(batch=2, seqlen=70, raw=True, gate=100.0, dims=(40, 7), heads=(2, 6), layout="vk"),
    Case(batch=2, seqlen=33, raw=True, gate=1.0, dims=(8, 96), bias=False, strided=True),
    Case(seqlen=40, gate=-1.0, dims=(200, 16), heads=(1, 1)),
    Case(seqlen=40, gate=-1.0, dims=(300, 16), heads=(1, 1)),
    Case(packed=(0, 100, 1, 0, 64, 65, 0), gate=-1.0, dtype="float"),
    Case(packed=(129, 3), gate=-1.0, raw=True),
    Case(batch=2, seqlen=130, dtype="float", equal_keys=True),
]


GRADIENTS = [
    Case(grads=True, batch=2, seqlen=5, dtype="float"),
    Case(grads=True, seqlen=64, dtype="float", gate=-0.5, heads=(2, 2)),
    Case(
        grads=True,
        batch=2,
        seqlen=40,
        dtype="float",
        raw=True,
        gate=-0.5,
        heads=(1, 3),
        dims=(8, 6),
    ),
    Case(grads=True, seqlen=70, raw=True, gate=100.0, dims=(40, 70), layout="vk"),
    Case(
        grads=True, batch=2, seqlen=33, raw=True, gate=1.0, dims=(8, 16), bias=False, strided=True
    ),
    Case(grads=True, seqlen=70, dtype="float", gate=-torch.inf, state="none"),
    Case(grads=True, batch=2, seqlen=130, dtype="float", equal_keys=True),
    Case(grads=True, seqlen=20, dims=(200, 30), heads=(1, 1), gate=-1.0),
    Case(grads=True, packed=(0, 70, 1, 0, 64, 0), gate=-1.0, dtype="float"),
    Case(grads=True, packed=(33, 3), raw=True, gate=0.5, heads=(2, 4)),
    Case(grads=True, packed=(0, 0), gate=-1.0),
    Case(grads=True, seqlen=70, raw=True, gate=0.5, narrow=True, dims=(64, 32)),
    Case(grads=True, seqlen=130, equal_keys=True, narrow=True, heads=(1, 1)),
]
CASES += [Case(seqlen=70, raw=True, gate=0.5, narrow=True, dims=(64, 32)), *GRADIENTS]


def made(case: Case) -> dict[str, Any]:
    dtype, (few, many), (k, v) = getattr(torch, case.dtype), case.heads, case.dims
    batch, seqlen = (case.batch, case.seqlen) if case.packed is None else (1, sum(case.packed))
    count = batch if case.packed is None else len(case.packed)
    given: dict[str, Any] = {
        "q": torch.randn(batch, seqlen, few, k).to(dtype),
        "k": torch.nn.functional.normalize(torch.randn(batch, seqlen, few, k), dim=-1).to(dtype),
        "v": torch.randn(batch, seqlen, many, v).to(dtype),
        "g": None,
        "beta": 2 * torch.rand(batch, seqlen, many),
        "state_layout": case.layout,
    }
    if case.gate is not None:
        given["g"] = -torch.rand(batch, seqlen, many)
        given["g"][:, 1:2] = case.gate
    if case.equal_keys:
        given["k"][:] = given["k"][:, :1]
        given["beta"][:] = 2
    if case.raw:
        given.update(A_log=torch.randn(many), qk_l2norm=True, beta_sigmoid=True)
        given.update(allow_neg_eigval=True, dt_bias=torch.randn(many) if case.bias else None)
    if case.packed is not None:
        given["cu_seqlens"] = torch.tensor([0, *case.packed]).cumsum(0).int()
    if case.state != "none":
        pool = case.state.endswith("pool")
        order = (k, v) if case.layout == "kv" else (v, k)
        given["initial_state"] = torch.randn(count + 2 if pool else count, many, *order)
        if pool:
            given["state_indices"] = torch.tensor([count + 1, -1, 0][:count])
        if case.state == "half pool":
            given["initial_state"] = given["initial_state"].to(dtype)
    if case.strided:
        for name in ("q", "k", "v", "g", "beta"):
            given[name] = given[name].repeat_interleave(2, -1)[..., ::2]
        given["A_log"] = given["A_log"].repeat_interleave(2)[::2]
        given["initial_state"] = given["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    return given


def wrong(case: Case) -> str:
    from flashvar.backends.triton.gated_delta_rule import launch

    torch.manual_seed(0)
    launch._OPERANDS.pop(torch.float16, None)
    if case.narrow:
        launch._OPERANDS[torch.float16] = (torch.float16, tl.float16)
    try:
        (_compare_gradients if case.grads else _compare)(case, made(case))
    except AssertionError as error:
        return str(error)
    return ""


def _compare(case: Case, given: dict[str, Any]) -> None:
    from flashvar.ops.gated_delta_rule.api import gated_delta_rule

    results = []
    for backend in ("triton", "reference"):
        copied = dict(given)
        if "state_indices" in given:
            copied["initial_state"] = given["initial_state"].clone()
        out, final = gated_delta_rule(**copied, return_final_state=True, backend=backend)
        results.append((out, final))
    tolerance = {"half": 2e-3, "float": 3e-5}[case.dtype]
    for found, expected in zip(*results, strict=True):
        largest = max(1.0, float(expected.float().abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, atol=tolerance * largest, rtol=tolerance)


def _compare_gradients(case: Case, given: dict[str, Any]) -> None:
    """By the norm of the difference."""
    from flashvar.ops.gated_delta_rule.api import gated_delta_rule

    turned = given.pop("state_layout") == "vk"
    results = []
    for ours in (True, False):
        leaves = {
            name: x.detach().requires_grad_()
            for name, x in given.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        }
        call = {**given, **leaves}
        if ours:
            options = {"state_layout": "vk" if turned else "kv", "return_final_state": True}
            found = gated_delta_rule(**call, **options, backend="triton")
        else:
            if turned:
                call["initial_state"] = call["initial_state"].mT
            out, final = recurrent(**call)
            found = (out, final.mT if turned else final)
        torch.manual_seed(1)
        loss = sum((x.double() * torch.randn(x.shape).double()).sum() for x in found)
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        results.append(dict(zip(leaves, grads, strict=True)))
    limit = {"half": 1e-3, "float": 5e-5}[case.dtype]
    for name, expected in results[1].items():
        found, expected = results[0][name].double(), expected.double()
        assert torch.isfinite(found).all(), f"{name} is not finite"
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
        assert error <= limit, f"the gradient of {name} is wrong by {error:.1e}"


if __name__ == "__main__":
    patch_once()
    print(json.dumps({str(case): wrong(case) for case in CASES}))
