"""gated_delta_rule's compiled forward on a device: beside the recurrence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled
from gated_delta_rule_compared import GATES, LIMITS, PACKED, made

from flashvar.backends.reference import gated_delta_rule as reference
from flashvar.backends.reference.gated_delta_rule import recurrence
from flashvar.ops.gated_delta_rule.api import gated_delta_rule

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.kernels_of("cuda"),
    pytest.mark.skipif(DEVICE == "cpu", reason="asks the device's kernels"),
]
# float16 rounds to 2^-11, bfloat16 to 2^-8.
SMALLER = {torch.bfloat16: 1.0, torch.float16: 0.25}
DTYPES = pytest.mark.parametrize("dtype", SMALLER, ids=str)
DIMS = [
    *((8, 16), (16, 8), (40, 64), (64, 64), (96, 192), (128, 128), (128, 512)),
    *((136, 24), (192, 384), (256, 512)),
]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaries serve, and the reference goes token by token, whatever the length."""
    skip_unless_compiled("cuda", torch.bfloat16, 64, "gated_delta_rule_fwd")
    monkeypatch.setattr(reference, "_algorithm", lambda terms: recurrence)


def call(given: dict[str, Any], backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    out, final = gated_delta_rule(**given, return_final_state=True, backend=backend)
    assert final is not None
    return out, final


def compared(given: dict[str, Any], wider: float = 1.0) -> None:
    q = given["q"]
    skip_unless_compiled("cuda", q.dtype, q.shape[3], "gated_delta_rule_fwd")
    found = call(given, "cuda")
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }
    limit = wider * SMALLER[given["q"].dtype]
    for name, one, other in zip(("out", "final"), found, call(wide, "reference"), strict=True):
        assert torch.isfinite(one).all(), name
        error = float((one.double() - other).norm() / other.norm().clamp(min=1e-30))
        assert error <= limit * LIMITS[name], name


@DTYPES
@pytest.mark.parametrize("heads", [(2, 2), (1, 4), (3, 6)], ids=str)
@pytest.mark.parametrize("seqlen", [1, 15, 63, 64, 65, 127, 1000])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_values(
    dims: tuple[int, int], seqlen: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    # Sums of 8 products average little: of 450 draws one is above the limit of larger head dims.
    compared(made(seqlen, heads, dims, dtype), wider=1.5 if dims[0] < 16 else 1)


@pytest.mark.parametrize("group", [3, 5, 8, 9])
@pytest.mark.parametrize("dims", [(64, 64), (256, 64)], ids=str)
def test_groups(dims: tuple[int, int], group: int) -> None:
    """The first kernel has four heads of a group in each block, and in the last what is left."""
    compared(made(130, (2, 2 * group), dims))


@DTYPES
@pytest.mark.parametrize("packed", [*PACKED, (0,), (700, 3)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 128)], ids=str)
def test_packed(dims: tuple[int, int], packed: tuple[int, ...], dtype: torch.dtype) -> None:
    compared(made(0, (2, 4), dims, dtype, packed))


@pytest.mark.parametrize("gate", [*GATES, "mixed"], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (256, 64)], ids=str)
def test_gates(dims: tuple[int, int], gate: float | str) -> None:
    given = made(dims=dims, fused=False)
    if gate == "mixed":
        kinds = torch.tensor(GATES, device=DEVICE)
        given["g"] = kinds[torch.randint(len(GATES), given["g"].shape, device=DEVICE)]
    else:
        given["g"].fill_(gate)
    compared(given)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("gate", [0.0, -1e-3])
@pytest.mark.parametrize("dims", [(128, 128), (192, 64), (256, 128)], ids=str)
def test_equal_keys(dims: tuple[int, int], gate: float, beta: float) -> None:
    given = made(1000, (2, 4), dims, fused=False)
    given["k"] = torch.nn.functional.normalize(given["k"][:, :1].float(), dim=-1).bfloat16()
    given["k"] = given["k"].expand_as(given["q"]).contiguous()
    given["beta"].fill_(beta)
    given["g"].fill_(gate)
    # Between 1 and 2 updates grow and cancel, and the chunk does not yet go token by token.
    compared(given, wider=3 if beta > 1 else 1)


@pytest.mark.parametrize("length", [0.1, 1.0, 1.2])
def test_keys_of_any_length(length: float) -> None:
    """beta |k|^2 is at most 2, beyond which states grow without bound."""
    given = made(500, (1, 2), (64, 128), fused=False)
    given["k"] = (given["k"].float() * length).bfloat16()
    given["beta"].clamp_(max=2 / max(length, 1) ** 2)
    compared(given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gates_of_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    given = made(200, (2, 4), (64, 64), torch.bfloat16 if dtype == torch.float32 else dtype)
    for name in ("g", "beta"):
        wide = given[name][..., None].expand(*given[name].shape, 3).contiguous().to(dtype)
        given[name] = wide[..., 1]
    for name in ("A_log", "dt_bias"):
        given[name] = given[name].to(dtype)
    compared(given)


def test_states_with_values_first() -> None:
    given = made(200, (2, 4), (64, 96))
    out, final = call(given, "cuda")
    turned = {**given, "initial_state": given["initial_state"].transpose(-1, -2).contiguous()}
    other, last = gated_delta_rule(
        **turned, return_final_state=True, state_layout="vk", backend="cuda"
    )
    assert last is not None
    assert torch.equal(out, other)
    assert torch.equal(final, last.transpose(-1, -2))


def test_views_of_one_projection() -> None:
    """q, k and v as slices of one tensor: rows are not contiguous."""
    qkv = torch.randn(2, 150, 4, 64, device=DEVICE).bfloat16()
    given = made(150, (1, 2), (64, 64))
    given["q"], given["k"], given["v"] = qkv[:, :, :1], qkv[:, :, 1:2], qkv[:, :, 2:]
    compared(given)


@pytest.mark.parametrize("dims", [(128, 128), (256, 128)], ids=str)
def test_the_same_bits_again(dims: tuple[int, int]) -> None:
    given = made(1000, (2, 4), dims)
    for one, other in zip(call(given, "cuda"), call(given, "cuda"), strict=True):
        assert torch.equal(one, other)


def test_rows_are_those_of_a_shorter_call() -> None:
    given = made(640, (2, 4), (128, 128))
    short = {name: x[:, :320] if name in "qkvgbeta" else x for name, x in given.items()}
    assert torch.equal(call(given, "cuda")[0][:, :320], call(short, "cuda")[0])


def divided(seqlen: int, heads: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Inputs of a call whose sequences are long for its heads, so that segments go side by side."""
    return made(seqlen, heads, more.pop("dims", (128, 128)), batch=1, **more)


@DTYPES
@pytest.mark.parametrize(
    "dims",
    [(128, 128), (64, 64), (96, 192), (40, 24), (128, 16), (16, 256), (192, 64), (256, 512)],
    ids=str,
)
@pytest.mark.parametrize("seqlen", [4096, 5000])
def test_segments(seqlen: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    compared(divided(seqlen, (1, 2), dims=dims, dtype=dtype))


@pytest.mark.parametrize("gate", [0.0, -1e-4, -1e-2, "mixed"])
def test_states_of_segments(gate: float | str) -> None:
    """States that decay slowly reach through all segments; gates of -inf clear some."""
    given = divided(6000, (1, 2), fused=False)
    if gate == "mixed":
        given["g"] *= 1e-3
        given["g"][:, ::701] = -torch.inf
    else:
        given["g"].fill_(gate)
    compared(given)


@pytest.mark.parametrize(
    "packed",
    [
        (0, 4000, 1, 0, 1500, 63, 0),
        (1, 8192),
        (8192, 1, 0),
        (2048,) * 3,
        (3000, *(1,) * 90, 3000),
        (6000,),
    ],
    ids=str,
)
def test_segments_of_packed(packed: tuple[int, ...]) -> None:
    compared(made(0, (1, 2), (128, 128), packed=packed))


@pytest.mark.parametrize("first", [0, 1000, 1024, 2040])
def test_equal_keys_in_segments(first: int) -> None:
    """Chunks that go token by token, for states and for transitions."""
    given = divided(4096, (1, 2), fused=False)
    rows = slice(first, first + 300)
    given["k"][:, rows] = given["k"][:, first : first + 1]
    given["beta"][:, rows] = 2.0
    given["g"][:, rows] = 0.0
    compared(given, wider=3)


@pytest.mark.parametrize("packed", [None, (4000, 1, 4000)], ids=str)
def test_the_same_bits_of_segments(packed: tuple[int, ...] | None) -> None:
    given = made(0, (1, 2), (128, 128), packed=packed) if packed else divided(8000, (1, 2))
    for one, other in zip(call(given, "cuda"), call(given, "cuda"), strict=True):
        assert torch.equal(one, other)


def test_segments_are_whole_sequences() -> None:
    """Beside 64 copies of the head, which fill the device without segments."""
    given = divided(6000, (1, 1))
    many = {
        name: x
        if not isinstance(x, torch.Tensor)
        else x.repeat(64)
        if name in ("A_log", "dt_bias")
        else x.repeat(1, 64, 1, 1)
        if name == "initial_state"
        else x.repeat(1, 1, 64, *(1,) * (x.dim() - 3))
        for name, x in given.items()
    }
    out, final = call(given, "cuda")
    whole, of_whole = call(many, "cuda")
    for one, other in ((out, whole[:, :, :1]), (final, of_whole[:, :1])):
        assert float((one - other).float().norm() / other.float().norm()) <= LIMITS["out"]


def test_auto_takes_the_binary() -> None:
    given = made(300, (2, 4), (128, 128))
    for one, other in zip(call(given, "auto"), call(given, "cuda"), strict=True):
        assert torch.equal(one, other)


def test_lengths_in_a_graph() -> None:
    """Nothing waits for the device: other lengths come with a replay."""
    given = made(0, packed=(100, 28), dims=(64, 64))
    call(given, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(given, "cuda")
    given["cu_seqlens"].copy_(torch.tensor([0, 3, 128]))
    graph.replay()
    for one, other in zip(found, call(given, "cuda"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("before", [3, 64, 700, 5000])
@pytest.mark.parametrize("packed", [(100, 28), (3000,), (70, 9000, 200)], ids=str)
def test_rows_before_the_first_sequence(packed: tuple[int, ...], before: int) -> None:
    given = made(0, (1, 2), (64, 64), packed=(before, *packed))
    given["cu_seqlens"] = given["cu_seqlens"][1:].clone()
    given["initial_state"] = given["initial_state"][1:].clone()
    compared(given)


def test_offsets_outside_the_tensor() -> None:
    """Inconsistent offsets give no access outside of tensors; sequences in order are right."""
    given = made(0, packed=(100, 28, 64), dims=(64, 64))
    given["cu_seqlens"] = torch.tensor([-7, 100, 10**6, 50], device=DEVICE)
    call(given, "cuda")
    torch.cuda.synchronize()


@pytest.mark.large
@pytest.mark.parametrize(
    ("seqlen", "heads", "dims", "batch"),
    [(33, (6, 6), (8, 8), 10923), (40, (16386, 65544), (8, 8), 1), (16448, (1, 256), (16, 512), 1)],
    ids=["batches", "heads", "elements"],
)
def test_large(seqlen: int, heads: tuple[int, int], dims: tuple[int, int], batch: int) -> None:
    """The last head's results are those of the head alone: to the bit where it has no segments."""
    given = made(seqlen, heads, dims, batch=batch)
    last = {
        name: x
        if not isinstance(x, torch.Tensor)
        else x[-1:]
        if name in ("A_log", "dt_bias")
        else x[-1:, -1:].contiguous()
        if name == "initial_state"
        else x[-1:, :, -1:].contiguous()
        for name, x in given.items()
    }
    limit = 0.0 if seqlen < 100 else LIMITS["out"]
    out, final = call(given, "cuda")
    for one, other in zip((out[-1:, :, -1:], final[-1:, -1:]), call(last, "cuda"), strict=True):
        assert float((one - other).float().norm()) <= limit * float(other.float().norm())
