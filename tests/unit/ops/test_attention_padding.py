"""Head dims that are no multiple of 8, served by a backend that takes no others.

The reference takes their place on the CPU, through the copies that CUDA devices get.
"""

from __future__ import annotations

import pytest
import torch

import flashvar
from flashvar.backends.reference import attention as reference
from flashvar.ops.attention import padding as attention_padding
from flashvar.ops.attention import plan as attention_plan
from flashvar.ops.attention.problem import Problem
from flashvar.ops.plans import Plans


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pads as on a CUDA device, and collects the head dims that the backend is asked for."""
    asked: list[tuple[int, int]] = []
    prepare = reference.prepare_forward

    def watched(problem: Problem, result: object) -> object:
        asked.append((problem.head_dim, problem.head_dim_v))
        return prepare(problem, result)  # type: ignore[arg-type]

    def wants(problem: Problem, backend: str) -> bool:
        return problem.head_dim % 8 != 0 or problem.head_dim_v % 8 != 0

    monkeypatch.setattr(attention_plan, "_plans", Plans())
    monkeypatch.setattr(attention_plan, "_backward_plans", Plans())
    monkeypatch.setattr(reference, "prepare_forward", watched)
    for module in (attention_padding, attention_plan):
        monkeypatch.setattr(module, "needs_padding", wants)
    return asked


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dims", [(59, 59), (64, 13), (3, 8), (111, 40)], ids=str)
def test_padding_changes_nothing(
    dims: tuple[int, int], packed: bool, padded: list[tuple[int, int]]
) -> None:
    q = torch.randn(2, 5, 4, dims[0], requires_grad=True)
    k = torch.randn(2, 7, 2, dims[0], requires_grad=True)
    v = torch.randn(2, 7, 2, dims[1], requires_grad=True)
    leaves = (q, k, v)

    def call() -> list[torch.Tensor]:
        if packed:
            out, lse = flashvar.attention_varlen(
                *(x.flatten(0, 1) for x in leaves),
                cu_seqlens_q=torch.tensor([0, 4, 10], dtype=torch.int32),
                cu_seqlens_k=torch.tensor([0, 6, 14], dtype=torch.int32),
                return_lse=True,
            )
        else:
            out, lse = flashvar.attention(q, k, v, causal=True, return_lse=True)
        assert out.is_contiguous()
        return [out, lse, *torch.autograd.grad((out.square().sum() + lse.sum()), leaves)]

    found = call()
    assert set(padded) == {(-(-dims[0] // 8) * 8, -(-dims[1] // 8) * 8)}
    attention_plan._plans.clear()
    with pytest.MonkeyPatch.context() as unpadded:
        for module in (attention_padding, attention_plan):
            unpadded.setattr(module, "needs_padding", lambda *_: False)
        attention_plan._backward_plans.clear()
        expected = call()
    torch.testing.assert_close(found, expected)
    assert [x.shape for x in found[2:]] == [x.shape for x in leaves]
