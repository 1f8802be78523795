"""What merge_states refuses: what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from merge_states_calls import made, rows

import flashvar


def good() -> dict[str, Any]:
    outs, lses = made(2, dtype=torch.float32)
    return {"outs": outs, "lses": lses}


def bad(**changed: Any) -> dict[str, Any]:
    return {**good(), **changed}


REFUSALS: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "no parts": (lambda: bad(outs=[], lses=[]), flashvar.ShapeError, "one part, found none"),
    "no stacked parts": (
        lambda: bad(outs=torch.empty(0, 2, 5, 4, 8), lses=torch.empty(0, 2, 4, 5)),
        flashvar.ShapeError,
        "at least one part, found (0, 2, 5, 4, 8)",
    ),
    "a scalar": (
        lambda: bad(lses=torch.tensor(1.0)), flashvar.ShapeError, "without dimensions"
    ),
    "no sequence": (
        lambda: bad(outs=3), flashvar.InvalidInputError, "found int: pass [out_a, out_b]"
    ),
    "no tensors": (
        lambda: bad(lses=[1, 2]), flashvar.InvalidInputError, "lses[0] must be a torch.Tensor"
    ),
    "as many": (
        lambda: bad(lses=good()["lses"][:1]), flashvar.ShapeError, "found 2 and 1: pass one"
    ),
    "dimensions": (
        lambda: bad(outs=[x[0, 0] for x in good()["outs"]]), flashvar.ShapeError, "found (4, 8)"
    ),
    "shapes": (
        lambda: bad(outs=[good()["outs"][0], torch.randn(2, 5, 4, 9)]),
        flashvar.ShapeError,
        "one shape, found (2, 5, 4, 8) and, in part 1, (2, 5, 4, 9)",
    ),
    "order of lses": (
        lambda: bad(lses=rows(good()["lses"])),
        flashvar.ShapeError,
        "that is (2, 4, 5), found (2, 5, 4)",
    ),
    "order of stacked lses": (
        lambda: {"outs": torch.randn(1, 16, 4, 32), "lses": torch.randn(1, 16, 4)},
        flashvar.ShapeError,
        "lses must be [parts, heads, total] with outs (1, 16, 4, 32), that is (1, 4, 16), found",
    ),
    "dtypes": (
        lambda: bad(outs=[good()["outs"][0], torch.randn(2, 5, 4, 8).half()]),
        flashvar.DtypeError,
        "one dtype, found torch.float32 and, in part 1, torch.float16",
    ),
    "integers": (
        lambda: bad(outs=[x.int() for x in good()["outs"]]), flashvar.DtypeError, "torch.int32"
    ),
    "narrow lses": (
        lambda: bad(lses=[x.half() for x in good()["lses"]]),
        flashvar.DtypeError,
        "must be float32 with torch.float32 outs, found torch.float16",
    ),
    "devices": (
        lambda: bad(lses=[x.to("meta") for x in good()["lses"]]),
        flashvar.DeviceError,
        "one device, found cpu and meta",
    ),
    "sparse": (
        lambda: bad(outs=[x.to_sparse() for x in good()["outs"]]),
        flashvar.LayoutError,
        "found layout torch.sparse_coo",
    ),
    "layout": (lambda: bad(layout="sbhd"), flashvar.LayoutError, "found 'sbhd': name the order"),
    "packed layout": (
        lambda: {
            "outs": [torch.randn(7, 4, 8)], "lses": [torch.randn(4, 7)], "layout": "bhsd"
        },
        flashvar.LayoutError,
        "leave layout out",
    ),
    "backend": (
        lambda: bad(backend="cudnn"), flashvar.InvalidInputError, "found 'cudnn': leave it out"
    ),
    "no binary": (
        lambda: bad(backend="cuda"),
        flashvar.BackendUnavailableError,
        "merge_states_fwd fp32 on CPU",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(given: Callable[[], dict[str, Any]], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        flashvar.merge_states(**given())
    assert words in str(caught.value)
