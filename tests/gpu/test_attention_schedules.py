"""How work is dealt out: fewer tiles than SMs, as many, one more; pairs; several streams at once.

Tiles have at most 192 query rows and 128 keys, so a head of 100 rows is one tile of each and the
number of heads is that of the tiles.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, OPS, check, check_gradients, require, run
from features import dense, many_sequences, rng_state
from oracle import Call

# Of a rehearsal: any small number.
SMS = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 3
DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@DIMS
@pytest.mark.parametrize(
    "tiles",
    [1, 2, SMS - 1, SMS, SMS + 1, 2 * SMS + 1],
    ids=["one", "two", "one-less", "as-many", "one-more", "twice-and-one"],
)
def test_tiles_beside_the_number_of_sms(tiles: int, head_dim: int, backend: str) -> None:
    call = dense(head_dim, torch.bfloat16, (100, 100), heads=(tiles, tiles), batch=1, causal=True)
    check(call, backend)
    check_gradients(call, backend)


@DIMS
@MASKS
@pytest.mark.parametrize("length", [129, 320, 513, 900], ids=lambda n: f"s{n}")
def test_odd_and_even_numbers_of_tiles(
    length: int, causal: bool, head_dim: int, backend: str
) -> None:
    """Masked tiles are worked on in pairs, from both ends of a head."""
    call = dense(head_dim, torch.bfloat16, (length, length), heads=(3, 1), causal=causal)
    check(call, backend)
    check_gradients(call, backend)


@DIMS
@pytest.mark.parametrize("length", [384, 640, 896], ids=lambda n: f"s{n}")
def test_odd_numbers_of_tiles_on_all_sms(length: int, head_dim: int, backend: str) -> None:
    """The middle tile of a head has no partner; a block takes pairs and such tiles in turn."""
    heads = (SMS + 1, SMS + 1)
    call = dense(head_dim, torch.bfloat16, (length, length), heads=heads, batch=1, causal=True)
    check(call, backend)
    check_gradients(call, backend)


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {"causal": True}),
        (128, {"causal": True}),
        (256, {"causal": True}),
        (64, {"window": (40, 0)}),
        (64, {"causal": True, "dropout_p": 0.3}),
        (128, {"causal": True, "dropout_p": 0.3}),
    ],
    ids=["d64", "d128", "d256", "d64-window", "d64-dropout", "d128-dropout"],
)
def test_blocks_that_take_several_packed_tiles(
    head_dim: int, options: dict[str, Any], backend: str
) -> None:
    state = {"rng_state": rng_state()} if "dropout_p" in options else {}
    call = many_sequences(head_dim, torch.bfloat16, 2 * SMS + 1, **options, **state)
    check(call, backend)
    check_gradients(call, backend)
    check_gradients(call, backend, deterministic=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="streams and graphs need a device")
@DIMS
def test_streams_and_graphs_at_once(head_dim: int, backend: str) -> None:
    """Eight streams of different shapes, every other one a graph: bitwise what each gives alone."""
    lengths = [(100 + 97 * n, 60 + 131 * n) for n in range(8)]
    calls = [
        dense(head_dim, torch.bfloat16, pair, causal=n % 3 > 0) for n, pair in enumerate(lengths)
    ]
    for op in OPS:
        require(calls[0], backend, op)
    leaves = [[t.detach().requires_grad_() for t in (c.q, c.k, c.v)] for c in calls]
    grads_out = [torch.randn_like(call.q) for call in calls]

    def once(number: int) -> tuple[torch.Tensor, ...]:
        call = Call(*leaves[number], causal=calls[number].causal)
        out, lse = run(call, backend, deterministic=True)
        return out, lse, *torch.autograd.grad(out, leaves[number], grads_out[number])

    streams = [torch.cuda.Stream() for _ in calls]
    expected, graphs = [], {}
    for number, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected.append(once(number))
        stream.synchronize()
        if number % 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results = once(number)
            graphs[number] = (graph, results)
    torch.cuda.synchronize()
    different = [torch.zeros((), dtype=torch.bool, device=DEVICE) for _ in calls]
    for _ in range(50):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if number in graphs:
                    graph, found = graphs[number]
                    graph.replay()
                else:
                    found = once(number)
                for a, b in zip(found, expected[number], strict=True):
                    different[number] |= (a != b).any()
    torch.cuda.synchronize()
    assert not [number for number, differs in enumerate(different) if differs]
