"""Run the Triton kernel that writes into a KV cache interpreted, beside torch's functions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interpreter import patch_once

_NONE = (-1, -1, -1)


@dataclass(frozen=True)
class Case:
    """Sizes of one call, and its integers."""

    before: tuple[int, ...] = (5, 0, 9)
    begins: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None
    table: tuple[tuple[int, ...], ...] | None = None
    new: int | None = 2
    heads: int = 2
    dims: tuple[int, int] = (16, 8)
    wide_integers: bool = False
    strides: str = "contiguous"
    dtype: str = "half"

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join(words) or "plain"


_TABLE = ((3, 1, -1), (0, -1, -1), (4, 2, 6))
CASES = [
    Case(**options)  # type: ignore[arg-type]
    for options in (
        {},
        {"new": 1},
        {"new": None, "before": (5, -1, 12)},
        {"new": None, "begins": (2, 0, 9)},
        {"before": (-1, 3, -7)},
        {"before": (-1, -1, -1)},
        {"before": (-1, 3, -(2**40)), "wide_integers": True},
        {"before": (2**40, 11, 12), "wide_integers": True},  # beyond the cache
        {"begins": (2, 0, 9), "before": (5, 1, 9)},
        {"slots": (4, 0, 2)},
        {"slots": (4, -1, -9)},
        {"slots": (2, 2, 2), "before": (-1, 0, -1), "wide_integers": True},
        {"slots": (-1, -1, -1), "new": None},
        {"table": _TABLE, "before": (5, 0, 8)},
        {"table": _TABLE, "before": (5, -1, 10), "new": 1, "wide_integers": True},
        {"table": (_TABLE[0], _NONE, _NONE), "before": (3, -1, 2)},
        {"table": (_TABLE[0], _NONE, _NONE), "before": (6, 0, 3), "new": None},
        {"table": (_TABLE[0], _NONE, (5, -1, 6)), "before": (7, 0, 9)},  # a page is missing
        {"table": ((-1, 1, 2), (-1, 0, -1), _NONE), "begins": (4, 4, 8), "before": (6, 3, 4)},
        {"heads": 3, "dims": (80, 33)},
        {"heads": 9, "dims": (128, 192), "new": 1},
        {"strides": "odd", "dtype": "float"},
        {"strides": "heads first", "dtype": "double"},
        {"strides": "every second"},
    )
] + [
    # More pages than a block has; the last one is missing in the second sequence.
    Case(before=(1150, 1150), table=(tuple(range(300)), (*range(300, 587), -1, *range(588, 600))))
]


def made(case: Case, *sizes: int) -> torch.Tensor:
    dtype = getattr(torch, case.dtype)
    if case.strides == "odd":
        return torch.randn(*sizes[:-1], sizes[-1] + 3).to(dtype)[..., 1:-2]
    if case.strides == "heads first":
        return torch.randn(sizes[0], sizes[2], sizes[1], sizes[3]).to(dtype).transpose(1, 2)
    return torch.randn(sizes).to(dtype)


def wrong(case: Case) -> str:
    from flashvar.backends.triton.attention.append import prepared
    from flashvar.ops.attention.append import formula
    from flashvar.ops.attention.cache import Cache

    torch.manual_seed(0)
    integers = torch.int64 if case.wide_integers else torch.int32
    before, begins, slots, table = (
        None if one is None else torch.tensor(one, dtype=integers)
        for one in (case.before, case.begins, case.slots, case.table)
    )
    assert before is not None
    places = (600, 4) if case.table is not None else (5, 12)
    caches = [made(case, *places, case.heads, dim) for dim in case.dims]
    if case.strides == "every second":
        caches = [one.repeat_interleave(2, -1)[..., ::2] for one in caches]
    news = [None, None]
    if case.new is not None:
        news = [made(case, len(before), case.new, case.heads, dim) for dim in case.dims]
    others = [one.clone() for one in caches]
    expected = formula(Cache(*others, slots, table), *news, before, begins)
    given = (Cache(*caches, slots, table), *news, before, begins)
    found = prepared(*given)(*given)
    if not torch.equal(found, expected):
        return f"lengths {found.tolist()}, expected {expected.tolist()}"
    same = [torch.equal(one, other) for one, other in zip(caches, others, strict=True)]
    return "" if all(same) else f"caches differ: {same}"


def wrong_of_rows_of_the_cache(heads_first: bool) -> str:
    """New keys and values that are rows of the cache; their copies have other strides."""
    from flashvar.ops.attention import append
    from flashvar.ops.attention.cache import Cache

    torch.manual_seed(0)
    case = Case(strides="heads first" if heads_first else "contiguous")
    caches = [made(case, 5, 12, case.heads, dim) for dim in case.dims]
    before, news = torch.tensor([1, 0, 9]), [one[:3, :2] for one in caches]
    others, copies = ([x.clone() for x in some] for some in (caches, news))
    expected = append.formula(Cache(*others), *copies, before, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "takes_triton", lambda *_: True)
        found = append.append(Cache(*caches), *news, before, None)
    if not torch.equal(found, expected):
        return f"lengths {found.tolist()}, expected {expected.tolist()}"
    same = [torch.equal(one, other) for one, other in zip(caches, others, strict=True)]
    return "" if all(same) else f"caches differ: {same}"


# Name, then the arguments: begins, lengths, room, and slots or a table.
COPIES: list[tuple[str, dict[str, Any]]] = [
    ("in order", {"begins": (0, 0, 0), "lengths": (5, 0, 12), "room": 12}),
    ("slots", {"begins": (2, 0, 9), "lengths": (5, 12, 3), "room": 13, "slots": (4, 0, 2)}),
    ("pages", {"begins": (0, 1, 0), "lengths": (5, 3, 12), "room": 12, "table": _TABLE}),
    ("odd pages", {"begins": (3, 0), "lengths": (2, 4), "room": 7, "table": _TABLE[:2]}),
    ("no room", {"begins": (0, 0), "lengths": (0, 0), "room": 0, "slots": (1, 0)}),
]


def wrong_copy(given: dict[str, Any], strides: str) -> str:
    from flashvar.backends.triton.attention.gather import launch
    from flashvar.ops.attention.cache import Cache

    torch.manual_seed(0)
    begins, lengths = (torch.tensor(given[name]) for name in ("begins", "lengths"))
    slots, table = (
        torch.tensor(given[name]) if name in given else None for name in ("slots", "table")
    )
    places = (7, 4) if table is not None else (5, 12)
    caches = [made(Case(strides=strides), *places, 3, dim) for dim in (40, 16)]
    cache = Cache(*caches, slots, table)
    used = torch.arange(given["room"]) < lengths[:, None]
    found, wanted = (copy(cache, begins, lengths, given["room"]) for copy in (launch, Cache.read))
    same = [torch.equal(one[used], other[used]) for one, other in zip(found, wanted, strict=True)]
    return "" if all(same) else f"copies differ: {same}"


def nan_of_what_is_missing() -> str:
    """Rows beyond the cache, and of pages that it does not have."""
    from flashvar.backends.triton.attention.gather import launch
    from flashvar.ops.attention.cache import Cache

    caches = [torch.randn(7, 4, 2, 16).half() for _ in range(2)]
    cache = Cache(*caches, table=torch.tensor(((0, 7), (-1, 2), (1, 3))))
    copies = launch(cache, torch.tensor((0, 0, 6)), torch.tensor((8, 8, 4)), 8)
    for one in copies:
        nans = one.isnan().flatten(2).all(2)
        wanted = [[False] * 4 + [True] * 4, [True] * 4 + [False] * 4, [False] * 2 + [True] * 2]
        if [row.tolist()[: len(w)] for row, w in zip(nans, wanted, strict=True)] != wanted:
            return f"NaN in {nans.tolist()}"
    return ""


if __name__ == "__main__":
    patch_once()
    answers = {str(case): wrong(case) for case in CASES}
    for name, given in COPIES:
        failed = [wrong_copy(given, strides) for strides in ("contiguous", "odd", "heads first")]
        answers[f"copy {name}"] = "; ".join(filter(None, failed))
    for heads_first in (False, True):
        answers[f"rows of the cache {heads_first}"] = wrong_of_rows_of_the_cache(heads_first)
    answers["missing"] = nan_of_what_is_missing()
    print(json.dumps(answers))
