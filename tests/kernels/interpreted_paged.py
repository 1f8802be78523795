"""Run the Triton kernels of attention on a cache interpreted, beside the reference.

The interpreter computes products of fp16 in float32, so that results differ by their rounding only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from interpreter import patch_once

import flashvar


@dataclass(frozen=True)
class Case:
    """Sizes of one call, its integers and options."""

    queries: int = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    page: int | None = 4  # None: slots, which hold 40 keys
    pages: int = 10  # of each sequence
    ends: tuple[int, ...] = (9, 40)
    begins: tuple[int, ...] | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    alibi: bool = False
    splits: int | None = 1
    strides: str = "contiguous"
    wide_integers: bool = False
    gaps: bool = False  # between integers
    packed: tuple[int, ...] | None = None  # the queries of each sequence
    outside: tuple[int, int] = (0, 0)  # rows of q before the first sequence, and after the last

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join(words) or "plain"


CASES = [
    Case(**options)  # type: ignore[arg-type]
    for options in (
        {},
        {"splits": 3},
        {"splits": None},
        {"splits": None, "heads": (9, 9)},  # more programs than run at a time
        {"ends": (0, 40, 1), "splits": 5},
        {"page": 16, "pages": 20, "ends": (300, 5), "splits": 4, "dims": (64, 64)},
        {"page": 3, "pages": 7, "ends": (21, 20), "heads": (6, 2)},  # three heads of a group
        {"page": 1, "ends": (10, 3), "heads": (3, 3)},
        {"page": None, "ends": (33, 40), "splits": 2},
        {"page": None, "begins": (3, 39), "ends": (33, 40), "wide_integers": True},
        {"page": None, "begins": (3, 39), "ends": (33, 40), "gaps": True},
        {"gaps": True, "splits": 2},
        {"begins": (3, 40, 0), "ends": (33, 40, 0), "splits": 2},
        {"queries": 3, "causal": True, "ends": (40, 2, 0), "splits": 2},  # rows without a key
        {"queries": 5, "causal": True, "heads": (5, 1), "dims": (24, 8)},
        {"queries": 40, "heads": (2, 1), "causal": True, "splits": 2},  # two blocks of rows
        {"queries": 33, "heads": (4, 2), "window": (5, 3), "page": 16, "pages": 12, "ends": (190,)},
        {"queries": 3, "window": (7, 0), "page": 16, "pages": 12, "ends": (190, 4), "splits": 3},
        {"window": (-1, 4), "queries": 6},
        {"window": (6, -1), "queries": 6, "splits": 2},
        {"softcap": 2.0, "alibi": True, "queries": 2, "causal": True},
        {"alibi": True, "heads": (4, 4), "splits": 2},
        {"scale": -0.7},
        {"scale": 0.0, "splits": 2},
        {"dims": (80, 48), "heads": (2, 1)},
        {"dims": (192, 128), "heads": (16, 1), "queries": 2},
        {"dims": (128, 256), "splits": 2},
        {"strides": "odd"},
        {"strides": "heads first", "wide_integers": True},
        {"packed": (1, 1), "queries": 1},
        {"packed": (3, 0, 1), "queries": 3, "ends": (40, 7, 0), "causal": True, "splits": 2},
        {"packed": (0, 40, 2), "queries": 40, "ends": (4, 40, 12), "causal": True},
        {"packed": (2, 5, 0, 1), "queries": 6, "ends": (9, 40, 3, 30), "outside": (2, 3)},
        {"packed": (1, 2), "queries": 2, "alibi": True, "window": (5, 0), "strides": "odd"},
        {"packed": (2, 3), "queries": 3, "begins": (3, 1), "softcap": 2.0, "splits": 3},
    )
]


def made(case: Case, *sizes: int) -> torch.Tensor:
    if case.strides == "odd":
        return torch.randn(*sizes[:-1], sizes[-1] + 3).half()[..., 1:-2]
    if case.strides == "heads first":
        return torch.randn(sizes[0], sizes[2], sizes[1], sizes[3]).half().transpose(1, 2)
    return torch.randn(sizes).half()


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, torch.full_like(x, 10**6)), -1)[..., 0]


class Call:
    """The tensors of a case."""

    def __init__(self, case: Case) -> None:
        from flashvar.ops.attention.cache import Cache

        self.case, batch = case, len(case.ends)
        integers = torch.int64 if case.wide_integers else torch.int32
        slots = table = None
        if case.page is None:
            slots = (torch.randperm(batch + 2)[:batch]).to(integers)
            places = batch + 2, 40
        else:
            places = batch * case.pages + 2, case.page
            table = torch.randperm(places[0])[: batch * case.pages].view(batch, -1).to(integers)
        heads, heads_kv = case.heads
        k, v = (made(case, *places, heads_kv, dim) for dim in case.dims)
        self.cache = Cache(k, v, slots, table)
        self.offsets = None
        if case.packed is None:
            self.q = made(case, batch, case.queries, heads, case.dims[0])
        else:
            before, after = case.outside
            ends = torch.tensor((before, *case.packed)).cumsum(0)
            self.offsets = ends.int()
            self.q = made(case, 1, int(ends[-1]) + after, heads, case.dims[0])[0]
        self.slopes = torch.rand(batch, heads) if case.alibi else None
        self.ends = torch.tensor(case.ends, dtype=integers)
        self.begins = None if case.begins is None else torch.tensor(case.begins, dtype=integers)
        self.lengths = self.ends.int() if self.begins is None else (self.ends - self.begins).int()
        if case.gaps:
            self.ends = with_gaps(self.ends)
            self.begins, slots, table = (
                None if x is None else with_gaps(x) for x in (self.begins, slots, table)
            )
            self.cache = self.cache._replace(slots=slots, table=table)

    def found(self, new: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        from flashvar.backends.triton.attention.paged import prepare
        from flashvar.ops.attention.paged import Paged, with_any_keys
        from flashvar.ops.attention.problem import Options
        from flashvar.ops.attention.validate import inspect

        case = self.case
        ends, begins, slopes = self.ends, self.begins, self.slopes
        call = Paged(self.q, *self.cache, ends, begins, slopes, self.offsets, new)
        options = Options(
            case.causal,
            case.scale,
            *case.window,
            softcap=case.softcap,
            backend="triton",
            max_seqlen_q=None if case.packed is None else case.queries,
        )
        problem = inspect(with_any_keys(call), options)
        launch = prepare(problem, self.q, self.cache, new, case.splits)
        return launch(*call.tensors(self.lengths))

    def of(self, sequence: int, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The rows of a sequence in q or out, with dim=1 in the log-sum-exp, as a batch of one."""
        if self.offsets is None:
            return x[sequence][None]
        first, end = self.offsets[sequence : sequence + 2].tolist()
        return x.narrow(dim, first, end - first)[None]

    def expected(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        case, one = self.case, slice(sequence, sequence + 1)
        length = self.lengths[one]
        begin = torch.zeros_like(length) if self.begins is None else self.begins[one]
        slots, table = (None if x is None else x[one] for x in self.cache[2:])
        k, v = self.cache._replace(slots=slots, table=table).read(begin, length, int(length))
        return flashvar.attention(
            *(x.double() for x in (self.of(sequence, self.q), k, v)),
            causal=case.causal,
            scale=case.scale,
            window_size=case.window,
            softcap=case.softcap,
            alibi_slopes=None if self.slopes is None else self.slopes[one],
            return_lse=True,
        )


def wrong(case: Case) -> str:
    torch.manual_seed(0)
    call = Call(case)
    out, lse = call.found()
    for sequence in range(len(case.ends)):
        expected, of_sums = call.expected(sequence)
        finite = torch.isfinite(of_sums)
        sums = call.of(sequence, lse, 1)
        if not torch.equal(torch.isfinite(sums), finite):
            return f"sequence {sequence}: other rows have keys"
        for name, one, other, most in (
            ("out", call.of(sequence, out), expected, 3e-3),
            ("lse", sums[finite], of_sums[finite], 1e-5),
        ):
            error = (one.double() - other).abs().amax().item() if one.numel() else 0.0
            if not error <= most:
                return f"sequence {sequence}: {name} is off by {error}"
    before, after = case.outside
    rows = [*range(before), *range(len(call.q) - after, len(call.q))]
    if rows and (out[rows].any() or not lse[:, rows].isneginf().all()):
        return "rows of no sequence are not 0 and -inf"
    return ""


def nan_beyond_the_longest() -> str:
    """Queries beyond max_seqlen_q, which are not computed."""
    call = Call(Case(packed=(3, 1, 2), queries=2, ends=(9, 40, 12)))
    out, lse = call.found()
    nans = out.isnan().flatten(1).all(1).tolist(), lse.isnan().all(0).tolist()
    if nans != ([False, False, True, False, False, False],) * 2:
        return f"NaN in {nans}"
    return "" if not out[[0, 1, 3, 4, 5]].isnan().any() else "NaN elsewhere"


def nan_for_what_is_missing(splits: int) -> str:
    """Sequences that need a page the cache lacks, or more keys than the table has room for."""
    torch.manual_seed(0)
    call = Call(Case(ends=(9, 40, 12, 12), splits=splits))
    assert call.cache.table is not None
    call.cache.table[0, 2] = len(call.cache.k)  # of keys 8 to 11, of which the sequence has one
    call.cache.table[2, 1] = -3
    call.cache.table[3, 3] = 10**6  # of no key
    out, lse = call.found(new=1)  # the second sequence has 41 keys, and room for 40
    nans = [bool(x.isnan().all()) for x in out], [bool(x.isnan().all()) for x in lse]
    wanted = [True, True, True, False]
    if nans != (wanted, wanted):
        return f"NaN in {nans}"
    return "" if torch.isfinite(out[3]).all() and torch.isfinite(lse[3]).all() else "no numbers"


def nan_for_keys_outside(splits: int) -> str:
    """Sequences whose keys begin before the cache, or end after it."""
    call = Call(Case(page=None, begins=(-50, 10**9, 7, 30), ends=(9, 40, 40, 20), splits=splits))
    call.lengths = torch.tensor([59, 5, 34, -10], dtype=torch.int32)
    out, lse = call.found()
    nans = [bool(x.isnan().all()) for x in out], [bool(x.isnan().all()) for x in lse]
    wanted = [True, True, True, False]
    if nans != (wanted, wanted):
        return f"NaN in {nans}"
    return "" if not out[3].any() and lse[3].isneginf().all() else "keys of none"


if __name__ == "__main__":
    patch_once()
    answers = {str(case): wrong(case) for case in CASES}
    answers |= {f"missing {splits}": nan_for_what_is_missing(splits) for splits in (1, 3)}
    answers |= {f"outside {splits}": nan_for_keys_outside(splits) for splits in (1, 3)}
    answers["beyond the longest"] = nan_beyond_the_longest()
    print(json.dumps(answers))
