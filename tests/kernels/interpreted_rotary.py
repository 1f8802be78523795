"""Run the Triton kernel of rotary embeddings in Triton's interpreter, beside torch's functions."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from interpreter import patch_once


@dataclass(frozen=True)
class Case:
    """Sizes of one call; `packed` are lengths of sequences, between rows of none."""

    pairs: int = 16
    head_dim: int = 32
    heads: int = 3
    turned: int | None = None
    seqlen: int = 5
    batch: int = 2
    packed: tuple[int, ...] | None = None
    offset: int = 0
    offsets: tuple[int, ...] | None = None
    wide_integers: bool = False
    interleaved: bool = False
    conjugate: bool = False
    inplace: bool = False
    dtype: str = "half"
    table: str = "float"
    strides: str = "contiguous"
    special: bool = False  # infinities in what is copied

    def __str__(self) -> str:
        plain = Case()
        words = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join(words) or "plain"


CASES = [
    Case(**options, interleaved=interleaved)  # type: ignore[arg-type]
    for interleaved in (False, True)
    for options in (
        {},
        {"conjugate": True},
        {"inplace": True},
        {"inplace": True, "strides": "heads-first", "pairs": 5},
        {"pairs": 5, "head_dim": 24, "dtype": "float"},
        {"pairs": 1, "head_dim": 200, "heads": 1},
        {"pairs": 128, "head_dim": 256, "heads": 9, "seqlen": 3, "table": "half"},
        {"pairs": 48, "head_dim": 96, "turned": 2, "special": True},
        {"pairs": 12, "turned": 0, "special": True},
        {"offset": 7},
        {"offsets": (3, 0), "wide_integers": True},
        {"offsets": (-2, 60)},
        {"seqlen": 1, "batch": 37, "heads": 17, "offsets": tuple(range(37))},
        {"packed": (4,)},
        {"packed": (4, 0, 9, 1, 0)},
        {"packed": (1, 30, 2), "offsets": (5, 1, 62), "inplace": True},
        {"packed": (3, 2), "offset": 2, "wide_integers": True, "conjugate": True},
        {"packed": tuple(1 + i % 3 for i in range(33)), "heads": 1},
        {"packed": ()},
        {"strides": "heads-first"},
        {"strides": "every-second"},
        {"strides": "expanded"},
        {"strides": "odd", "pairs": 8},
        {"dtype": "float", "strides": "odd"},
    )
]
POSITIONS = 64


def made(case: Case) -> torch.Tensor:
    dtype = getattr(torch, case.dtype)
    rows = (case.batch, case.seqlen) if case.packed is None else (4 + sum(case.packed),)
    sizes = (*rows, case.heads, case.head_dim)
    if case.strides == "heads-first":
        order = [*range(len(rows) - 1), len(rows), len(rows) - 1, len(rows) + 1]
        return torch.randn([sizes[i] for i in order]).to(dtype).transpose(-3, -2)
    if case.strides == "every-second":
        return torch.randn(*sizes[:-1], 2 * case.head_dim).to(dtype)[..., ::2]
    if case.strides == "expanded":
        return torch.randn(1, *sizes[1:]).to(dtype).expand(sizes)
    if case.strides == "odd":
        return torch.randn(*sizes[:-1], case.head_dim + 3).to(dtype)[..., 1:-2]
    x = torch.randn(sizes).to(dtype)
    if case.special:
        x[..., case.turned :, :] = torch.inf
    return x


def wrong(case: Case) -> str:
    from flashvar.backends.triton.rotary.launch import launch
    from flashvar.ops.rotary.rotation import Rotation, formula

    torch.manual_seed(0)
    x = made(case)
    angles = torch.rand(POSITIONS, case.pairs) * 6.3
    cos, sin = (t.to(getattr(torch, case.table)) for t in (angles.cos(), angles.sin()))
    integers = torch.int64 if case.wide_integers else torch.int32
    cu = offsets = None
    if case.packed is not None:
        cu = torch.tensor([2, *case.packed]).cumsum(0).to(integers)
    if case.offsets is not None:
        offsets = torch.tensor(case.offsets, dtype=integers)
    rotation = Rotation(cos, sin, offsets, cu, case.offset, case.interleaved, case.conjugate)
    turned = case.heads if case.turned is None else case.turned
    expected = formula(x.clone(), rotation, turned)
    out = x if case.inplace else torch.full_like(x, torch.nan).contiguous()
    kept = x.clone()
    launch(out, x, rotation, turned)
    if not case.inplace and not torch.equal(x, kept):
        return "x was written to"
    tolerance = {"half": 2e-3, "float": 1e-6}[case.dtype]
    try:
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    except AssertionError as error:
        return str(error)
    rest = (slice(turned, None), slice(None)), (slice(None), slice(2 * case.pairs, None))
    same = all(torch.equal(out[..., a, b], kept[..., a, b]) for a, b in rest)
    return "" if same else "what is not turned was changed"


if __name__ == "__main__":
    patch_once()
    print(json.dumps({str(case): wrong(case) for case in CASES}))
