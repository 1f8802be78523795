"""gated_delta_rule token by token in binaries on a device: beside the recurrence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled
from gated_delta_rule_compared import GATES, made

from flashvar.backends.reference import gated_delta_rule as reference
from flashvar.backends.reference.gated_delta_rule import recurrence
from flashvar.ops.gated_delta_rule.api import gated_delta_rule

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.kernels_of("cuda"),
    pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernels"),
]
# Sums are float32 and results are rounded once.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
LAYOUTS = pytest.mark.parametrize("layout", ["kv", "vk"])
DIMS = [
    *((8, 16), (16, 8), (20, 7), (33, 100), (64, 64)),
    *((96, 192), (128, 128), (200, 24), (256, 512)),
]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries serve, and the reference goes token by token."""
    skip_unless_compiled("cuda", torch.bfloat16, 64, "gated_delta_rule_update")
    monkeypatch.setattr(reference, "_algorithm", lambda terms: recurrence)


def wide(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }


def close(one: torch.Tensor, other: torch.Tensor, name: str, factor: float = 1.0) -> None:
    assert torch.isfinite(one).all(), name
    error = float((one.double() - other).norm() / other.norm().clamp(min=1e-30))
    assert error <= factor * ROUNDING[one.dtype], (name, error)


def pooled(
    given: dict[str, Any], layout: str = "kv", dtype: torch.dtype = torch.float32, least: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with the initial states at random places among NaN, and the places."""
    states = given["initial_state"]
    states = states if layout == "kv" else states.mT
    pool = torch.full((len(states) + least, *states.shape[1:]), torch.nan, device=DEVICE)
    places = torch.randperm(len(pool), device=DEVICE)[: len(states)]
    pool[places] = states
    return pool.to(dtype), places


def compared(
    given: dict[str, Any], layout: str = "kv", dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Out, the pool's states after it, and what else is in the pool."""
    q = given["q"]
    skip_unless_compiled("cuda", q.dtype, q.shape[3], "gated_delta_rule_update")
    pool, places = pooled(given, layout, dtype)
    used = {**given, "initial_state": pool[places].float() if layout == "kv" else pool[places].mT}
    expected, final = gated_delta_rule(**wide(used), return_final_state=True, backend="reference")
    assert final is not None
    before = pool.clone()
    out, same = gated_delta_rule(
        **{**given, "initial_state": pool},
        state_indices=places.to(options.pop("indices", torch.int32)),
        state_layout=layout,
        return_final_state=True,
        backend="cuda",
    )
    assert same is pool
    close(out, expected, "out", **options)
    close(pool[places], final if layout == "kv" else final.mT, "states", **options)
    others = torch.ones(len(pool), dtype=torch.bool, device=DEVICE)
    others[places] = False
    assert torch.equal(pool[others].isnan(), before[others].isnan())


@LAYOUTS
@pytest.mark.parametrize("own", [False, True], ids=["float32", "own dtype"])
@DTYPES
@pytest.mark.parametrize("seqlen", [1, 2, 5, 16])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values(
    dims: tuple[int, int], seqlen: int, dtype: torch.dtype, own: bool, layout: str
) -> None:
    given = made(seqlen, (2, 6), dims, dtype, batch=3)
    compared(given, layout, dtype if own else torch.float32)


@LAYOUTS
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (3, 3), (16, 64)], ids=str)
def test_heads(heads: tuple[int, int], fused: bool, layout: str) -> None:
    compared(made(2, heads, (128, 128), fused=fused), layout, indices=torch.int64)


@pytest.mark.parametrize("gate", [*GATES, "mixed"], ids=str)
def test_gates(gate: float | str) -> None:
    given = made(9, fused=False)
    if gate == "mixed":
        kinds = torch.tensor(GATES, device=DEVICE)
        given["g"] = kinds[torch.randint(len(GATES), given["g"].shape, device=DEVICE)]
    else:
        given["g"].fill_(gate)
    compared(given)
    compared({**given, "g": None})


def test_equal_keys_with_beta_2() -> None:
    given = made(300, (1, 2), fused=False)
    given["k"] = torch.eye(64, device=DEVICE, dtype=torch.bfloat16)[:1].expand_as(given["k"])
    given["beta"].fill_(2.0)
    given["g"].zero_()
    compared(given, factor=4.0)


@pytest.mark.parametrize("packed", [(3, 0, 2), (0, 0), (0,), (1,) * 50, (0, 40, 1, 0, 2)], ids=str)
@LAYOUTS
def test_packed(packed: tuple[int, ...], layout: str) -> None:
    compared(made(0, (2, 4), (64, 128), packed=packed), layout)


def test_an_index_of_no_state() -> None:
    """Such a sequence begins with zeros, and nothing is written for it."""
    given = made(3, batch=4)
    pool = given.pop("initial_state")
    before = pool.clone()
    places = torch.tensor([2, -1, 7, -100], device=DEVICE)
    out, _ = gated_delta_rule(**given, initial_state=pool, state_indices=places, backend="cuda")
    states = torch.zeros_like(before)
    states[0] = before[2]
    expected, final = gated_delta_rule(
        **{**wide(given), "initial_state": states.double()},
        return_final_state=True,
        backend="reference",
    )
    assert final is not None
    close(out, expected, "out")
    close(pool[2], final[0], "state")
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("seqlen", [1, 7, 15])
@LAYOUTS
def test_few_tokens_of_a_forward(seqlen: int, layout: str) -> None:
    """They go token by token too, with states of their own before and after."""
    given = made(seqlen, (2, 4), (96, 192), batch=5)
    states = given.pop("initial_state")
    for initial in (states, None):
        whole = wide({**given, "initial_state": initial})
        expected, final = gated_delta_rule(**whole, return_final_state=True, backend="reference")
        if initial is not None and layout == "vk":
            initial = initial.mT.contiguous()
        out, found = gated_delta_rule(
            **given,
            initial_state=initial,
            state_layout=layout,
            return_final_state=True,
            backend="cuda",
        )
        assert found is not None
        assert final is not None
        close(out, expected, "out")
        close(found if layout == "kv" else found.mT, final, "final")


def test_views() -> None:
    """Slices of one projection, gates of other strides, a pool among other memory."""
    given = made(2, (2, 4), (64, 64))
    rows = torch.randn(2, 2, 8 * 64 + 3, device=DEVICE).bfloat16()
    heads = rows[..., 1:-2].unflatten(-1, (8, 64))
    given["q"], given["k"], given["v"] = heads[:, :, :2], heads[:, :, 2:4], heads[:, :, 4:]
    for name in ("g", "beta"):
        given[name] = given[name].repeat_interleave(2, -1)[..., ::2]
    compared(given)
    expected, final = gated_delta_rule(**wide(given), return_final_state=True, backend="reference")
    for kind in ("page", "odd", "every second"):
        pool, places = pooled(given)
        memory = torch.zeros(len(pool), 3, 4, 64, 128, device=DEVICE)[:, 1]
        view = {"page": memory[..., :64], "odd": memory[..., 1:65]}.get(kind, memory[..., ::2])
        view.copy_(pool)
        out, _ = gated_delta_rule(
            **{**given, "initial_state": view}, state_indices=places, backend="cuda"
        )
        close(out, expected, kind)
        assert final is not None
        close(view[places], final, kind)


def test_nan_stays_where_it_is() -> None:
    """In its sequence and head; of a NaN in v, in its column."""
    given = made(2, (2, 4), (64, 64), batch=3)
    clean, states = gated_delta_rule(**given, return_final_state=True, backend="cuda")
    given["v"][1, 0, 2, 5] = torch.nan
    given["q"][2, 1, 1, 0] = torch.nan
    out, after = gated_delta_rule(**given, return_final_state=True, backend="cuda")
    assert states is not None
    assert after is not None
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[1, :, 2, 5] = True
    expected[2, 1, 2:4] = True
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(out[~expected], clean[~expected])
    of_states = torch.zeros_like(after, dtype=torch.bool)
    of_states[1, 2, :, 5] = True
    assert torch.equal(after.isnan(), of_states)
    assert torch.equal(after[~of_states], states[~of_states])


def test_the_same_bits_again_and_token_by_token() -> None:
    given = made(6, (2, 4), (128, 128))
    first, second = (
        gated_delta_rule(**given, return_final_state=True, backend="cuda") for _ in range(2)
    )
    rows = ("q", "k", "v", "g", "beta")
    pool, places = given["initial_state"].clone(), torch.arange(2, device=DEVICE)
    outs = [
        gated_delta_rule(
            **{**given, **{x: given[x][:, t : t + 1] for x in rows}, "initial_state": pool},
            state_indices=places,
            backend="cuda",
        )[0]
        for t in range(6)
    ]
    for other in (second, (torch.cat(outs, 1), pool)):
        for one, two in zip(first, other, strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)


def test_in_a_graph() -> None:
    """Nothing waits for the device: indices and lengths are those of the replay."""
    given = made(0, packed=(2, 3), dims=(64, 64))
    pool, expected = (torch.randn(5, 4, 64, 64, device=DEVICE) for _ in range(2))
    expected.copy_(pool)
    given["initial_state"] = pool
    places = torch.tensor([4, 1], device=DEVICE)
    gated_delta_rule(**{**given, "initial_state": pool.clone()}, state_indices=places)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = gated_delta_rule(**given, state_indices=places, backend="cuda")
    places.copy_(torch.tensor([-1, 2]))
    given["cu_seqlens"].copy_(torch.tensor([0, 4, 5]))
    graph.replay()
    other, _ = gated_delta_rule(
        **{**given, "initial_state": expected}, state_indices=places, backend="cuda"
    )
    assert torch.equal(out, other)
    assert torch.equal(pool, expected)


def test_offsets_outside_the_tensor() -> None:
    given = made(0, packed=(3, 2, 4), dims=(64, 64))
    given["cu_seqlens"] = torch.tensor([-7, 3, 10**6, 5], device=DEVICE)
    gated_delta_rule(**given, backend="cuda")
    torch.cuda.synchronize()


@pytest.mark.large
@pytest.mark.parametrize(
    ("heads", "dims", "batch"),
    [((6, 6), (8, 8), 10923), ((16386, 65544), (8, 8), 2), ((16, 64), (128, 128), 2100)],
    ids=["batches", "heads", "elements"],
)
def test_large(heads: tuple[int, int], dims: tuple[int, int], batch: int) -> None:
    """The last head's results are those of the head alone, to the bit."""
    given = made(1, heads, dims, batch=batch)
    last = {
        name: x
        if not isinstance(x, torch.Tensor)
        else x[-1:]
        if name in ("A_log", "dt_bias")
        else x[-1:, -1:].clone()
        if name == "initial_state"
        else x[-1:, :, -1:].clone()
        for name, x in given.items()
    }
    pools = given["initial_state"], last["initial_state"]
    outs = [
        gated_delta_rule(
            **call, state_indices=torch.arange(len(pool), device=DEVICE), backend="cuda"
        )[0]
        for call, pool in zip((given, last), pools, strict=True)
    ]
    assert torch.equal(outs[0][-1:, :, -1:], outs[1])
    assert torch.equal(pools[0][-1:, -1:], pools[1])
