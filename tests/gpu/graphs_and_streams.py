"""Calls captured in a CUDA graph, and calls on several streams at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ROUNDS = 25


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a step, and the results that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_undisturbed(calls: Sequence[Callable[[], Sequence[torch.Tensor]]]) -> None:
    """Calls, each on a stream of its own, give bitwise what each gives alone."""
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in calls], []
    for _ in range(_ROUNDS):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((number, calls[number]()))
    torch.cuda.synchronize()
    for number, results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, expected[number], strict=True))
