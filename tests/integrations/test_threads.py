"""A thread's calls are its own: what another thread's calls met does not show in its answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from flashvar.errors import BackendUnavailableError
from flashvar.integrations import fallback
from flashvar.integrations.call_counts import CallCounts
from flashvar.integrations.torch import activation as ours
from flashvar.integrations.torch import flash as torch_flash
from flashvar.integrations.transformers import context_parallel
from flashvar.integrations.transformers.fallback import Call
from flashvar.integrations.transformers.visibility import Visibility

Q, K, V = torch.randn(3, 1, 2, 6, 8)


def elsewhere(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.fixture(autouse=True)
def inactive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLASHVAR_STRICT", raising=False)
    monkeypatch.setattr(fallback, "_logged", set())
    yield
    ours.deactivate()


def test_calls_are_counted_for_the_process_and_for_a_thread() -> None:
    counts = CallCounts()

    def count() -> int:
        for _ in range(1000):
            counts.add("a")
        return counts.of_this_thread()

    with ThreadPoolExecutor(4) as pool:
        found = [one.result() for one in [pool.submit(count) for _ in range(8)]]
    assert max(found) % 1000 == 0  # a thread of the pool may have run it more than once
    assert counts.counts() == {"a": 8000}
    assert counts.of_this_thread() == 0
    counts.clear()
    assert counts.counts() == {}


class Watching(TorchDispatchMode):
    """A mode that must see calls; meanwhile another thread's call is served."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        elsewhere(serve_one)
        return func(*args, **(kwargs or {}))


def serve_one() -> None:
    torch_flash._attend(Q, K, V, False, None)


def test_a_mode_is_the_reason_although_another_thread_is_served() -> None:
    with ours.activate("reference"):
        with Watching():
            functional.scaled_dot_product_attention(Q, K, V)
        assert "Watching" in str(ours.last_reason())
        assert ours.report()[ours.RUN_BELOW_DISPATCHER] >= 1


def test_the_last_call_is_that_of_the_thread() -> None:
    def call_there() -> str | None:
        functional.scaled_dot_product_attention(Q, K, V)
        return ours.last_reason()

    with ours.activate("reference"):
        with Watching():
            functional.scaled_dot_product_attention(Q, K, V)
        assert elsewhere(call_there) is None
        assert "Watching" in str(ours.last_reason())


@pytest.mark.parametrize("own", [True, False], ids=["served", "not served"])
def test_a_layer_in_parts_asks_about_its_own_steps(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = functional.scaled_dot_product_attention(Q, K, V).transpose(1, 2)

    def replaced(*tensors: torch.Tensor, **_: Any) -> torch.Tensor:
        if own:
            serve_one()
        else:
            elsewhere(serve_one)
        return expected.transpose(1, 2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", replaced)
    monkeypatch.setenv("FLASHVAR_STRICT", "1")
    call = Call(Q, K, V, 0.0, None, None, None, None)
    visibility = Visibility(causal=False, window=(-1, -1), keys=6)
    if own:
        found = context_parallel.distributed_attention(torch.nn.Identity(), call, visibility, {})
        torch.testing.assert_close(found, expected)
        return
    with pytest.raises(BackendUnavailableError, match="is replaced by other code"):
        context_parallel.distributed_attention(torch.nn.Identity(), call, visibility, {})


def test_one_thread_at_a_time_activates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch registers kernels: two threads that do so may wait for each other forever."""
    meeting = threading.Barrier(2)
    switch_on = torch_flash.switch_on

    def watched(*given: Any) -> bool:
        with pytest.raises(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return switch_on(*given)

    def activate() -> None:
        with ours.activate(backend="reference"):
            pass

    monkeypatch.setattr(torch_flash, "switch_on", watched)
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(activate) for _ in range(2)]:
            one.result()
    assert not ours.active()
    assert torch.backends.mha.get_fastpath_enabled()
