"""Run the Triton kernels of norms in Triton's interpreter, beside the formula in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from interpreter import patch_once


@dataclass(frozen=True)
class Case:
    """One call."""

    rows: tuple[int, ...] = (3, 7)
    dim: int = 24
    mean: bool = True
    gate: str = ""  # "swish" or "sigmoid"
    weight: bool = True
    bias: bool = False
    residual: str = ""  # its dtype
    total: str = ""  # that of the sum
    dtype: str = "half"
    strides: str = "contiguous"
    programs: int = 0  # of a backward, in 16 warps; 0: as many as there are blocks

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join(words) or "plain"


CASES = [
    Case(),
    Case(rows=(0,)),
    Case(rows=()),
    Case(rows=(1,), dim=1),
    Case(rows=(50,), dim=128, gate="swish"),
    Case(rows=(2, 33), dim=128, gate="swish", programs=1),
    Case(gate="sigmoid", bias=True),
    Case(gate="swish", weight=False, dtype="float"),
    Case(bias=True, weight=False),
    Case(mean=False, weight=False),
    Case(mean=False, weight=False, dtype="float", dim=64),
    Case(residual="half", total="half"),
    Case(residual="float", total="float", gate="swish", bias=True, programs=1),
    Case(residual="half", dtype="float"),
    Case(total="float"),
    Case(rows=(3,), dim=1000, gate="swish", bias=True),
    Case(rows=(300,), dim=900, bias=True, programs=80),
    Case(rows=(2,), dim=8192, gate="sigmoid"),
    Case(rows=(3,), dim=5000, dtype="float", residual="float"),
    Case(strides="slice", gate="swish", residual="half"),
    Case(strides="transposed", gate="swish", residual="half"),
    Case(strides="every-second"),
    Case(strides="expanded", gate="sigmoid", residual="half"),
]


def made(case: Case, dtype: str) -> torch.Tensor:
    sizes = [*case.rows, case.dim]
    kind = getattr(torch, dtype)
    if case.strides == "slice":
        return torch.randn(*case.rows, case.dim + 5).to(kind)[..., 2:-3]
    if case.strides == "transposed":
        return torch.randn(case.rows[1], case.rows[0], case.dim).to(kind).transpose(0, 1)
    if case.strides == "every-second":
        return torch.randn(*case.rows, 2 * case.dim).to(kind)[..., ::2]
    if case.strides == "expanded":
        return torch.randn(case.dim).to(kind).expand(sizes)
    return torch.randn(sizes).to(kind)


def wrong(case: Case) -> str:
    from flashvar.backends.triton import rms_norm
    from flashvar.ops.rms_norm import formula, run
    from flashvar.ops.rms_norm.formula import Norm, Tensors

    torch.manual_seed(0)
    tensors = Tensors(
        made(case, case.dtype),
        made(case, case.dtype) if case.gate else None,
        torch.randn(case.dim) if case.weight else None,
        torch.randn(2 * case.dim)[::2] if case.bias else None,
        made(case, case.residual) if case.residual else None,
    )
    grad_y = made(case, case.dtype)
    grad_total = made(case, case.total) if case.total else None
    kind = getattr(torch, case.dtype)
    total_dtype = getattr(torch, case.total) if case.total else None
    norm = Norm(1e-5, case.mean, case.gate == "sigmoid", kind, total_dtype)
    rms_norm._BACKWARD_WARPS = (case.programs or 64) * rms_norm._MAX_WARPS
    given = (grad_y, grad_total, *tensors)
    found = (*run.plan(tensors, norm).run(*tensors), *run.gradients(given, norm))
    leaves = [None if x is None else x.double().detach().requires_grad_() for x in tensors]
    wide = norm._replace(dtype=torch.float64, total_dtype=total_dtype and torch.float64)
    results = formula.forward(Tensors._make(leaves), wide)
    present = [x for x in leaves if x is not None]
    outs = [x for x in results if x is not None]
    grads = [x.double() for x in (grad_y, grad_total) if x is not None]
    of_present = iter(torch.autograd.grad(outs, present, grads))
    expected = (*results, *(None if x is None else next(of_present) for x in leaves))
    names = ("y", "total", *(f"gradient of {name}" for name in Tensors._fields))
    for name, one, other in zip(names, found, expected, strict=True):
        if (one is None) is not (other is None):
            return f"{name} is {one}"
        if one is None:
            continue
        tolerance = 4e-3 if one.dtype == torch.half else 2e-5
        try:
            scale = {"atol": tolerance, "rtol": tolerance}
            torch.testing.assert_close(one.double(), other.detach(), **scale)
        except AssertionError as error:
            return f"{name}: {error}"
    dtypes = [x.dtype for x in tensors if x is not None]
    same = dtypes == [x.dtype for x in found[2:] if x is not None]
    return "" if same else "a gradient has another dtype"


if __name__ == "__main__":
    patch_once()
    print(json.dumps({str(case): wrong(case) for case in CASES}))
