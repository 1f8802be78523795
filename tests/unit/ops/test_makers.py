"""Tensors that plans make without the dispatcher are those of empty_like."""

from __future__ import annotations

import pytest
import torch

from flashvar.ops import plans
from flashvar.ops.plans import maker

LIKE = {
    "contiguous": torch.zeros(2, 3, 4),
    "transposed": torch.zeros(2, 3, 4, dtype=torch.bfloat16).transpose(0, 1),
    "expanded": torch.zeros(1, 3).expand(5, 3),
    "every second": torch.zeros(6, 4, dtype=torch.half)[::2],
    "empty": torch.zeros(0, 3),
    "without dimensions": torch.zeros(()),
    "on meta": torch.zeros(2, 3, device="meta"),
}


def facts(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("like", LIKE.values(), ids=LIKE)
def test_they_are_like_the_tensor(like: torch.Tensor, inference: bool) -> None:
    make = maker(like)
    with torch.inference_mode(inference):
        first, second = make(), make()
        assert facts(first) == facts(second) == facts(torch.empty_like(like))
    if like.device.type == "cpu" and like.numel():
        assert first.data_ptr() != second.data_ptr()


def test_a_device_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's shorter way takes the current device; a tensor of another goes the longer way."""
    current = [1]
    shorter, longer = torch.zeros(3), torch.zeros(3)

    class OnDevice(torch.Tensor):  # type: ignore[misc]
        device = torch.device("cuda", 1)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(plans, "_empty_strided_cuda", lambda *_: shorter)
    monkeypatch.setattr(torch, "empty_strided", lambda *_, **options: longer)
    make = maker(torch.zeros(3).as_subclass(OnDevice))
    assert make() is shorter
    current[0] = 0
    assert make() is longer
