"""Few queries: keys that several blocks share, and the heads of a group as rows of one tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from device_call import (
    DEVICE,
    attend,
    check,
    check_gradients,
    options,
    replace_inputs,
    require,
    run,
)
from features import (
    Case,
    Maker,
    between_odd_elements,
    bias,
    dense,
    modified,
    other_head_dim,
    packed,
    rearranged,
    rng_state,
    sinks,
    slopes,
)
from graphs_and_streams import assert_undisturbed, captured
from oracle import Call, assert_right
from random_cases import heads_first, with_nan_around

import flashvar

# Triton's kernels divide nothing, and compile for longer than all of this runs.
pytestmark = pytest.mark.kernels_of("cuda")

needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A rehearsal shows that the tests work: fewer rows and keys where the CPU would take long.
LONGEST, MANY_ROWS = (50_176, 2500) if DEVICE == "cuda" else (9000, 60)

# Keys in parts.

_ROWS, _KEYS, _HEADS = 33, 4097, (4, 2)
# Queries and keys of very different lengths; and caches most of whose parts are empty.
_LENGTHS_Q, _LENGTHS_K = (1, 40, 0, 130, 3, 5), (8191, 17, 900, 0, 3000, 1)
_USED = (0, 1, 63, 4097, 65, 3000)


def split(d: int, t: torch.dtype, **given: Any) -> Call:
    """Few rows and many keys."""
    lengths, heads = given.pop("lengths", (_ROWS, _KEYS)), given.pop("heads", _HEADS)
    return dense(d, t, lengths, heads, **given)


def split_with(name: str, d: int, t: torch.dtype, **given: Any) -> Call:
    return split(d, t, **modified(name, t, 2, _HEADS[0]), **given)


def biased(d: int, t: torch.dtype, size: tuple[int, int], dtype: torch.dtype, **given: Any) -> Call:
    return split(d, t, bias=bias(*size, dtype, (_ROWS, _KEYS)), **given)


def hidden_by_bias(d: int, t: torch.dtype) -> Call:
    """Whole parts that a bias hides, in some heads all but one key, in some rows all."""
    values = bias(2, 4, FP32, (_ROWS, _KEYS))
    values[..., 1000:3000] = -torch.inf
    values[:, 1, :, 1:] = -torch.inf
    values[:, 2, :, :-1] = -torch.inf
    values[:, :, 5:9] = -torch.inf
    return split(d, t, bias=values)


def cached(
    d: int, t: torch.dtype, rows: Sequence[int] = (3, 1, 70, 1, 2, 33), **given: Any
) -> Call:
    """A cache of 4,097 keys, of which few sequences use much."""
    return packed(d, t, rows, (4097,) * 6, dense_keys=True, used=_USED, **given)


SPLITS: dict[str, Maker] = {
    "full": lambda d, t: Case(split(d, t)),
    "causal": lambda d, t: Case(split(d, t, causal=True), "bhsd"),
    # Rows of one tile that begin in different parts, and rows without keys before them.
    "causal-blind": lambda d, t: Case(
        split(d, t, lengths=(3400, 3000), heads=(2, 1), batch=1, causal=True)
    ),
    "causal-blind-sinks": lambda d, t: Case(
        split(
            *(d, t),
            lengths=(3400, 3000),
            heads=(2, 1),
            batch=1,
            causal=True,
            sinks=sinks(2, t),
        )
    ),
    "window-last-keys": lambda d, t: Case(split(d, t, window=(37, 0))),
    "window-last-key": lambda d, t: Case(split(d, t, window=(0, 0), causal=True)),
    "window-over-parts": lambda d, t: Case(split(d, t, window=(2500, -1))),
    "window-right": lambda d, t: Case(split(d, t, lengths=(300, 3000), window=(-1, 2))),
    "window-both": lambda d, t: Case(split(d, t, lengths=(300, 3000), window=(1200, 7))),
    # The window of the first rows lies before all keys.
    "window-blind-sinks": lambda d, t: Case(
        split(
            *(d, t),
            lengths=(3400, 3000),
            heads=(2, 1),
            batch=1,
            window=(100, 50),
            sinks=sinks(2, FP32),
        )
    ),
    **{
        name: (lambda d, t, name=name: Case(split_with(name, d, t)))
        for name in ("softcap", "alibi-batch", "sinks", "sinks-fp32", "dropout")
    },
    **{
        f"{name}-causal": (lambda d, t, name=name: Case(split_with(name, d, t, causal=True)))
        for name in ("alibi", "sinks", "dropout", "negative-scale")
    },
    "sinks-window": lambda d, t: Case(split_with("sinks-fp32", d, t, window=(40, 0))),
    "bias": lambda d, t: Case(biased(d, t, (2, 4), FP32)),
    "bias-16-bit": lambda d, t: Case(biased(d, t, (2, 4), t, causal=True)),
    "bias-per-head": lambda d, t: Case(biased(d, t, (1, 4), t, softcap=4.0)),
    "bias-per-batch": lambda d, t: Case(biased(d, t, (2, 1), FP32, window=(3000, -1))),
    "bias-for-all": lambda d, t: Case(biased(d, t, (1, 1), FP32, sinks=sinks(4, t))),
    "bias-that-hides": lambda d, t: Case(hidden_by_bias(d, t)),
    "head-dim-v": lambda d, t: Case(split(d, t, head_dim_v=other_head_dim(d), causal=True)),
    "heads-first": lambda d, t: Case(rearranged(split(d, t), heads_first), "bhsd"),
    "bhsd-to-bshd": lambda d, t: Case(split(d, t, causal=True), "bhsd->bshd"),
    "nan-around": lambda d, t: Case(rearranged(split(d, t), with_nan_around)),
    "odd-strides": lambda d, t: Case(rearranged(split(d, t, causal=True), between_odd_elements)),
    "packed": lambda d, t: Case(packed(d, t, _LENGTHS_Q, _LENGTHS_K)),
    "packed-causal-outside": lambda d, t: Case(
        packed(d, t, _LENGTHS_Q, _LENGTHS_K, outside=(7, 90), causal=True), max_seqlen=20_000
    ),
    "packed-sinks": lambda d, t: Case(
        packed(d, t, _LENGTHS_Q, _LENGTHS_K, sinks=sinks(4, t), window=(50, 0))
    ),
    "packed-extras": lambda d, t: Case(
        packed(
            *(d, t, _LENGTHS_Q, _LENGTHS_K),
            alibi_slopes=slopes(6, 4) * 0.02,
            softcap=5.0,
            dropout_p=0.2,
            rng_state=rng_state(),
        )
    ),
    # A bound of which every sequence fills the first part at most.
    "packed-short": lambda d, t: Case(
        packed(d, t, (1, 3, 60), (40, 1, 70), causal=True), max_seqlen=50_176
    ),
    "cache": lambda d, t: Case(cached(d, t)),
    "cache-causal": lambda d, t: Case(cached(d, t, causal=True)),
    "cache-window": lambda d, t: Case(cached(d, t, window=(20, 0))),
    "cache-sinks": lambda d, t: Case(cached(d, t, sinks=sinks(4, FP32), causal=True)),
    "cache-alibi": lambda d, t: Case(cached(d, t, alibi_slopes=slopes(6, 4) * 0.02)),
}


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, BF16), (128, FP16)], ids=["d64-bf16", "d128-fp16"]
)
@pytest.mark.parametrize("feature", SPLITS)
def test_keys_in_parts(feature: str, head_dim: int, dtype: torch.dtype, backend: str) -> None:
    case = SPLITS[feature](head_dim, dtype)
    check(case.call, backend, case.layout, case.max_seqlen)


@pytest.mark.parametrize("lengths", [(1, 8191), (65, 3000), (200, 4097)], ids=str)
@pytest.mark.parametrize(
    "dims", [(32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str
)
def test_parts_of_every_head_dim(
    dims: tuple[int, int], lengths: tuple[int, int], backend: str
) -> None:
    for dtype in (BF16, FP16):
        call = split(dims[0], dtype, lengths=lengths, head_dim_v=dims[1], causal=True)
        check(call, backend)


@pytest.mark.parametrize("rows", [2, 65])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (8, 1)], ids=str)
def test_parts_of_groups(heads: tuple[int, int], rows: int, backend: str) -> None:
    alibi = slopes(heads[0]) * 0.02
    check(split(128, BF16, lengths=(rows, 4097), heads=heads, alibi_slopes=alibi), backend)


@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("head_dim", [64, 128], ids=lambda d: f"d{d}")
def test_the_longest(head_dim: int, rows: int, backend: str) -> None:
    call = split(head_dim, BF16, lengths=(rows, LONGEST), heads=(1, 1), batch=1, causal=True)
    check(call, backend)


@pytest.mark.parametrize("keys", [3000, 4097, 8191])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda d: f"d{d}")
def test_each_key_belongs_to_one_part(head_dim: int, keys: int, backend: str) -> None:
    """Rows that see one key each, at both sides of every possible edge.

    If it is missing, out is another; if it is there twice, the log-sum-exp is.
    """
    edges = torch.arange(0, keys + 64, 64, device=DEVICE)
    seen = torch.cat([edges, edges - 1]).clamp(0, keys - 1).unique()
    call = split(head_dim, FP16, lengths=(len(seen), keys), heads=(1, 1), batch=1)
    k = torch.nn.functional.normalize(call.k.float(), dim=-1).half()
    # P is rounded to 16 bits, its sum is not, so out may be off by 2^-11 of itself. Of 1 that is
    # one unit in the last place, which the budget allows; of a value such as 1.5 it rounds to more.
    v = torch.where(call.v > 0, 1.0, -1.0).half()
    found = Call(k[:, seen], k, v, scale=60.0)
    check(found, backend)
    assert found.written_out(torch.float64).scores.argmax(-1).flatten().equal(seen)


@pytest.mark.parametrize("place", [0, 1500, 2999], ids=["first", "middle", "last"])
@pytest.mark.parametrize("rows", [1, 40])
def test_one_large_key_among_large_scores(rows: int, place: int, backend: str) -> None:
    """A part whose maximum is far above all others'."""
    for dtype in (BF16, FP16):
        call = split(64, dtype, lengths=(rows, 3000))
        q, k = call.q.abs() * 5, call.k * 10
        k[:, place] = k[:, place].abs() * 5
        check(Call(q, k, call.v), backend)


@pytest.mark.parametrize("logit", [-1e4, -120.0, 1e4], ids=str)
def test_parts_of_extreme_logits(logit: float, backend: str) -> None:
    """Scores all near one value, far from 0."""
    call = split(64, BF16)
    q, k = call.q * 0.01, call.k * 0.01
    q[..., 0], k[..., 0] = 1.0, logit
    for causal in (False, True):
        check(Call(q, k, call.v, causal, scale=1.0), backend)


@pytest.mark.parametrize("rows", [1, 40])
def test_parts_of_equal_scores(rows: int, backend: str) -> None:
    """Every part weighs as much as it has keys; without a scale, and with equal rows."""
    call = split(64, FP16, lengths=(rows, 3000))
    check(Call(call.q, call.k, call.v, scale=0.0), backend)
    out, lse = attend(Call(call.q * 0, call.k, call.v), backend)
    mean = call.v.double().mean(1, keepdim=True).repeat_interleave(2, 2)
    torch.testing.assert_close(out.double(), mean.expand_as(out), rtol=2**-9, atol=2**-15)
    expected = torch.full_like(lse, 3000.0).log()
    torch.testing.assert_close(lse, expected, rtol=0, atol=2e-5)
    same = Call(call.q[:, :1].expand_as(call.q), call.k[:, :1].expand_as(call.k), call.v)
    check(same, backend)


def test_rows_without_keys_beside_others_with_many(backend: str) -> None:
    """Out 0 and -inf: in sequences of no keys, and above a causal mask."""
    call = packed(
        64, BF16, (70, 3, 20), (4097,) * 3, dense_keys=True, used=(0, 4097, 15), causal=True
    )
    out, lse = attend(call, backend)
    for rows in (slice(0, 70), slice(73, 78)):
        assert (out[rows] == 0).all()
        assert (lse[:, rows] == -torch.inf).all()
    assert lse[:, 70:73].isfinite().all()
    assert lse[:, 78:].isfinite().all()


REPEATED: dict[str, Callable[[], Call]] = {
    "one-row": lambda: split(128, BF16, lengths=(1, 8191), heads=(8, 2)),
    "causal": lambda: split(64, BF16, lengths=(300, 4097), causal=True),
    "dropout": lambda: split_with("dropout", 64, FP16),
    "sinks-d256": lambda: split_with("sinks", 256, BF16),
    "packed": lambda: packed(64, BF16, _LENGTHS_Q, _LENGTHS_K, causal=True),
    "cache": lambda: cached(128, BF16, causal=True),
    "cache-one-row": lambda: cached(128, BF16, (1,) * 6, heads=(8, 1)),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_forward_repeats(kind: str, backend: str) -> None:
    """Bitwise, also after calls of other sizes, and without the log-sum-exp."""
    call = REPEATED[kind]()
    require(call, backend)
    out, lse = run(call, backend)
    for lengths in ((1, 3000), (140, 5000), (200, 200)):
        run(split(64, BF16, lengths=lengths), backend)
        again, lse_again = run(call, backend)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
    function = flashvar.attention if call.cu_seqlens_q is None else flashvar.attention_varlen
    alone = function(call.q, call.k, call.v, **options(call), backend=backend)
    assert torch.equal(out, alone)


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        (slice(0, 20), {}),
        (slice(0, 20), {"dropout_p": 0.3, "rng_state": "given"}),
        (slice(-20, None), {"causal": True}),
        (slice(-20, None), {"window": (700, 3), "softcap": 4.0}),
    ],
    ids=["full", "dropout", "causal", "window-softcap"],
)
def test_rows_alone_are_those_of_a_large_call(
    rows: slice, given: dict[str, Any], backend: str
) -> None:
    """Enough tiles for every SM, whose keys nobody has to divide, and a few of their rows."""
    chosen = given | ({"rng_state": rng_state()} if "rng_state" in given else {})
    call = split(64, FP16, lengths=(MANY_ROWS, 3000), heads=(8, 8), **chosen)
    few = replace_inputs(call, {"q": call.q[:, rows]})
    require(call, backend)
    many_out, many_lse = run(call, backend)
    out, lse = attend(few, backend)
    torch.testing.assert_close(out, many_out[:, rows], rtol=2**-9, atol=2**-13)
    torch.testing.assert_close(lse, many_lse[..., rows], rtol=0, atol=2e-5)
    assert_right(few, out, lse)


@needs_cuda
@pytest.mark.parametrize("lengths", [(1, 8191), (40, 4097)], ids=str)
def test_a_graph_of_a_split_forward(lengths: tuple[int, int], backend: str) -> None:
    call = split(128, BF16, lengths=lengths, heads=(8, 2), causal=True)
    require(call, backend)
    graph, (out, lse) = captured(lambda: run(call, backend))
    for _ in range(3):
        for tensor in (call.q, call.k, call.v):
            tensor.normal_()
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_right(call, out, lse)
        again, lse_again = run(call, backend)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 5])
def test_a_graph_follows_a_cache_that_grows(rows: int, backend: str) -> None:
    given = {"heads": (8, 1), "dense_keys": True, "causal": True}
    call = packed(128, BF16, (rows,) * 3, (8191,) * 3, used=(8191,) * 3, **given)
    require(call, backend)
    keywords = options(call)  # reads the device, which a capture may not
    graph, (out, lse) = captured(
        lambda: flashvar.attention_varlen(
            call.q, call.k, call.v, **keywords, return_lse=True, backend=backend
        )
    )
    for used in ((0, 1, 64), (5, 4097, 3000), (8191, 0, 8190)):
        assert call.seqused_k is not None
        call.seqused_k.copy_(torch.tensor(used))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_right(call, out, lse)


@needs_cuda
def test_streams_with_parts_do_not_disturb_each_other(backend: str) -> None:
    """Forwards that are divided, on four streams at once, give what each gives alone."""
    calls = [split(64, BF16, lengths=(rows, 8191)) for rows in (1, 20, 100, 130)]
    require(calls[0], backend)
    assert_undisturbed([partial(run, call, backend) for call in calls])


# One query, whose heads of a group are the rows of one tile.


def one_query(d: int, t: torch.dtype, **given: Any) -> Call:
    heads, keys = given.pop("heads", (8, 2)), given.pop("keys", 700)
    return dense(d, t, (1, keys), heads, 3, **given)


def one_with(name: str, d: int, t: torch.dtype, **given: Any) -> Call:
    return one_query(d, t, **modified(name, t, 3, 8), **given)


def one_biased(d: int, t: torch.dtype, size: tuple[int, int], dtype: torch.dtype) -> Call:
    return one_query(d, t, bias=bias(*size, dtype, (1, 700)))


def one_hidden_by_bias(d: int, t: torch.dtype) -> Call:
    """Other keys in each head of a group; in one head none."""
    values = bias(3, 8, FP32, (1, 700))
    for head in range(8):
        values[:, head, :, head * 80 : head * 80 + 140] = -torch.inf
    values[1, 5] = -torch.inf
    return one_query(d, t, bias=values)


def one_cached(d: int, t: torch.dtype, **given: Any) -> Call:
    given.setdefault("heads", (8, 2))
    used = (0, 1, 700, 64, 333)
    return packed(d, t, (1,) * 5, (700,) * 5, dense_keys=True, used=used, **given)


ONE_QUERY: dict[str, Maker] = {
    **{
        name: (lambda d, t, name=name: Case(one_with(name, d, t)))
        for name in (
            *("none", "softcap", "alibi", "alibi-batch", "sinks", "sinks-fp32", "dropout"),
            *("negative-scale", "zero-scale"),
        )
    },
    "causal": lambda d, t: Case(one_query(d, t, causal=True), "bhsd"),
    "window-left": lambda d, t: Case(one_query(d, t, window=(100, -1))),
    "window-last-key": lambda d, t: Case(one_query(d, t, window=(0, 0), causal=True)),
    "window-sinks": lambda d, t: Case(one_with("sinks", d, t, window=(65, 0))),
    "window-alibi-softcap": lambda d, t: Case(
        one_with("alibi-batch", d, t, window=(300, 5), softcap=3.0)
    ),
    "window-dropout": lambda d, t: Case(one_with("dropout", d, t, window=(300, -1))),
    "bias": lambda d, t: Case(one_biased(d, t, (3, 8), FP32)),
    "bias-per-head": lambda d, t: Case(one_biased(d, t, (1, 8), t)),
    "bias-per-batch": lambda d, t: Case(one_biased(d, t, (3, 1), t)),
    "bias-that-hides": lambda d, t: Case(one_hidden_by_bias(d, t)),
    "head-dim-v": lambda d, t: Case(one_query(d, t, head_dim_v=other_head_dim(d))),
    "heads-first": lambda d, t: Case(rearranged(one_query(d, t), heads_first), "bhsd"),
    "bhsd-to-bshd": lambda d, t: Case(one_query(d, t), "bhsd->bshd"),
    "nan-around": lambda d, t: Case(rearranged(one_query(d, t), with_nan_around)),
    "odd-strides": lambda d, t: Case(rearranged(one_query(d, t), between_odd_elements)),
    "cache": lambda d, t: Case(one_cached(d, t)),
    "cache-window": lambda d, t: Case(one_cached(d, t, window=(90, 0))),
    "cache-window-sinks": lambda d, t: Case(
        one_cached(d, t, window=(90, -1), sinks=sinks(8, t), causal=True)
    ),
    "cache-alibi": lambda d, t: Case(one_cached(d, t, alibi_slopes=slopes(5, 8), causal=True)),
    "cache-dropout": lambda d, t: Case(
        one_cached(d, t, dropout_p=0.3, rng_state=rng_state(), softcap=3.0)
    ),
    "packed": lambda d, t: Case(
        packed(d, t, (1, 1, 0, 1, 1), (700, 3, 90, 0, 129), heads=(6, 2), causal=True)
    ),
}


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, FP16), (128, BF16)], ids=["d64-fp16", "d128-bf16"]
)
@pytest.mark.parametrize("feature", ONE_QUERY)
def test_one_query(feature: str, head_dim: int, dtype: torch.dtype, backend: str) -> None:
    case = ONE_QUERY[feature](head_dim, dtype)
    check(case.call, backend, case.layout, case.max_seqlen)


@pytest.mark.parametrize(
    "heads", [(2, 1), (6, 2), (5, 1), (16, 1), (24, 1), (72, 1), (200, 1), (128, 2)], ids=str
)
def test_one_query_of_groups(heads: tuple[int, int], backend: str) -> None:
    """Groups of fewer and of more heads than a tile has rows."""
    call = one_query(64, BF16, heads=heads, keys=270, sinks=sinks(heads[0], FP32))
    check(call, backend)
    check(one_query(64, BF16, heads=heads, keys=270, alibi_slopes=slopes(heads[0])), backend)


@pytest.mark.parametrize("head_dim", [40, 80, 192, 256], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("keys", [1, 65, 4097])
def test_one_query_on_keys(keys: int, head_dim: int, backend: str) -> None:
    for dtype in (BF16, FP16):
        check(one_query(head_dim, dtype, heads=(6, 2), keys=keys), backend)


@pytest.mark.parametrize("feature", ["none", "sinks", "dropout", "softcap"])
def test_gradients_of_one_query(feature: str, backend: str) -> None:
    """Which the log-sum-exp of a packed group decides."""
    check_gradients(one_with(feature, 64, BF16, causal=True), backend, lse_gradient=True)
