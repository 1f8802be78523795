"""The descriptions of ops agree with what is built and with what backends have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import A100, inventory, system

from flashvar.ops import specs
from flashvar.ops.attention.problem import Options, make_inputs
from flashvar.ops.attention.validate import inspect
from flashvar.ops.op import OpSpec
from flashvar.selection import compatibility
from flashvar.selection.request import Overrides, Request
from flashvar.selection.rules import select
from flashvar_factory.config import schema

ROOT = Path(__file__).parents[3]
every_op = pytest.mark.parametrize("spec", specs(), ids=[one.name for one in specs()])


@every_op
def test_compiled_functions_are_those_of_a_release(spec: OpSpec) -> None:
    config = schema.read(ROOT / "variants.toml")
    assert spec.compiled == {
        function: config.defaults[function]["dtype"]
        for function in spec.functions
        if function in config.default_ops
    }


@every_op
def test_functions_without_kernels_are_functions_of_the_op(spec: OpSpec) -> None:
    assert set(spec.without_triton) <= set(spec.functions)


@every_op
def test_backends_that_serve_an_op_have_its_module(spec: OpSpec) -> None:
    backends = ROOT / "src" / "python" / "flashvar" / "backends"
    found = {path.parent.name for path in backends.glob(f"*/{spec.name}*")}
    serving = {"cuda": spec.compiled, "triton": spec.triton, "reference": spec.reference}
    assert found == {backend for backend, held in serving.items() if held}


def test_a_request_is_made_of_a_call() -> None:
    q, k = (torch.empty(1, 2, 3, 64, dtype=torch.float16) for _ in range(2))
    problem = inspect(make_inputs((q, k, q[..., :32], *(None,) * 7)), Options())
    assert Request.of_call("attention_fwd", "fp16", 0, problem) == Request.of(
        "attention_fwd", "fp16", 0, head_dim=(64, 32)
    )
    assert Request.of_call("merge_states_fwd", "fp32", None, None).axes == ()


def decision(monkeypatch: pytest.MonkeyPatch, spec: OpSpec, function: str, dtype: str) -> str:
    monkeypatch.setattr("flashvar.ops.specs", lambda: (spec,))
    monkeypatch.setattr(compatibility, "specs", lambda: (spec,))
    found = select(Request(function, dtype, 0), system(A100), inventory(), Overrides())
    return "nothing" if found.chosen is None else found.chosen.candidate


def test_the_reference_serves_what_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = OpSpec(
        "op",
        ("op_fwd", "op_bwd"),
        triton={"bf16": (8, 0), "fp64": (8, 0)},
        without_triton=("op_bwd",),
        reference=("bf16",),
    )
    assert decision(monkeypatch, spec, "op_fwd", "bf16") == "triton"
    assert decision(monkeypatch, spec, "op_bwd", "bf16") == "reference"
    assert decision(monkeypatch, spec, "op_bwd", "fp64") == "nothing"
