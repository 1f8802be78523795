"""The family of kernels that the log names is the one that the device ran."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from device_call import skip_unless_compiled
from torch.profiler import ProfilerActivity, profile

import flashvar
from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention import plan as attention_plan
from flashvar.ops.plans import Plans
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose

Run = Callable[[torch.Tensor], torch.Tensor]


def plain(**options: Any) -> Run:
    return lambda x: flashvar.attention(x, x, x, backend="cuda", **options)


def biased(x: torch.Tensor) -> torch.Tensor:
    bias = torch.randn(1, 4, 128, 128, device=x.device, dtype=x.dtype, requires_grad=True)
    out: torch.Tensor = flashvar.attention(x, x, x, bias=bias, backend="cuda")
    return out


def packed(x: torch.Tensor) -> torch.Tensor:
    bounds = torch.tensor([0, 100, 256], device=x.device, dtype=torch.int32)
    out: torch.Tensor = flashvar.attention_varlen(
        *(x, x, x), cu_seqlens_q=bounds, max_seqlen_q=156, max_seqlen_k=156, cu_seqlens_k=bounds,
        backend="cuda",
    )  # fmt: skip
    return out


def tensor(
    *shape: int, dtype: torch.dtype = torch.bfloat16, pad: int = 0, offset: int = 0
) -> torch.Tensor:
    """Rows with `pad` elements behind each, `offset` elements after an address of 16 bytes."""
    whole = (*shape[:-1], shape[-1] + pad)
    room = torch.randn(torch.Size(whole).numel() + offset, device="cuda", dtype=dtype)
    return room[offset:].view(whole)[..., : shape[-1]].requires_grad_()


SHAPE = (2, 128, 4)
CASES: dict[str, tuple[Callable[[], torch.Tensor], Run]] = {
    **{f"d{dim}": (partial(tensor, *SHAPE, dim), plain()) for dim in (20, 40, 64, 96, 256)},
    "fp16": (partial(tensor, *SHAPE, 64, dtype=torch.half), plain()),
    "causal": (partial(tensor, *SHAPE, 128), plain(causal=True)),
    "window": (partial(tensor, *SHAPE, 64), plain(window_size=(32, 0))),
    "wide strides": (partial(tensor, *SHAPE, 64, pad=8), plain()),
    "odd strides": (partial(tensor, *SHAPE, 64, pad=4), plain()),
    "odd address": (partial(tensor, *SHAPE, 64, offset=1), plain()),
    "softcap": (partial(tensor, *SHAPE, 64), plain(softcap=5.0)),
    "dropout": (partial(tensor, *SHAPE, 64), plain(dropout_p=0.1)),
    "bias": (partial(tensor, *SHAPE, 64), biased),
    "deterministic": (partial(tensor, *SHAPE, 64), plain(deterministic=True)),
    "packed": (partial(tensor, 256, 4, 64), packed),
}


@pytest.fixture
def two_families() -> None:
    """Only where a binary holds both."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device runs kernels that could be watched")
    try:
        kernel = choose(Request.of("attention_fwd", "bf16", 0, head_dim=64), "cuda").kernel
    except BackendUnavailableError as error:
        pytest.skip(str(error).partition("\n")[0])
    if kernel is None or len(kernel.rules) == 1:
        pytest.skip("the binary of this device holds one family of kernels")


@pytest.mark.usefixtures("two_families", "seed")
@pytest.mark.parametrize("case", CASES)
def test_the_log_names_what_ran(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, run = CASES[case]
    # Plans of earlier calls were made without the log.
    monkeypatch.setattr(attention_plan, "_plans", Plans())
    monkeypatch.setattr(attention_plan, "_backward_plans", Plans())
    x = make()
    for op in ("attention_fwd", "attention_bwd"):
        skip_unless_compiled("cuda", x.dtype, -(-x.shape[-1] // 8) * 8, op)
    with (
        caplog.at_level(logging.DEBUG, "flashvar"),
        profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched,
    ):
        run(x).float().sum().backward()
        torch.cuda.synchronize()
    ran = [event.name for event in watched.events() if "flashvar::" in event.name]
    assert ran, "the profiler saw no kernel of flashvar"
    told = [record.getMessage() for record in caplog.records]
    for op in ("attention_fwd", "attention_bwd"):
        (line,) = (one for one in told if one.startswith(op) and " queries, " in one)
        wgmma = any(f"sm90::attention::{op[-3:]}_kernel" in name for name in ran)
        assert f", {'wgmma' if wgmma else 'mma.sync'}: " in line, (line, ran)
