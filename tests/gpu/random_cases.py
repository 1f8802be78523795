"""Random calls of attention that together cover every head dim, dtype, mask and pair of lengths."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from oracle import Call

HEAD_DIMS = [8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = [1, 7, 63, 64, 65, 127, 128, 129, 333, 1000]
HEADS = [(1, 1), (3, 3), (4, 2), (6, 1), (8, 2), (5, 5)]
STORAGES = ["contiguous", "padded", "heads-first"]
DRAWS = 4


@dataclass(frozen=True)
class RandomCase:
    """One call: everything but its numbers."""

    head_dim: int
    dtype: str
    causal: bool
    lengths: tuple[int, int]
    heads: tuple[int, int]
    batch: int
    scale: float | None
    storage: str

    def __str__(self) -> str:
        words = [
            f"d{self.head_dim}",
            self.dtype,
            "causal" if self.causal else "full",
            "{}x{}".format(*self.lengths),
            "h{}:{}".format(*self.heads),
            f"b{self.batch}",
            self.storage,
        ]
        return "-".join(words if self.scale is None else [*words, f"scale{self.scale}"])

    def make(self, device: str = "cuda") -> Call:
        """Fresh numbers, [batch, sequence, heads, head_dim] views of the storage asked for."""
        q, k, v = (
            self._tensor(length, heads, device)
            for length, heads in zip(
                (self.lengths[0], self.lengths[1], self.lengths[1]),
                (self.heads[0], self.heads[1], self.heads[1]),
                strict=True,
            )
        )
        return Call(q, k, v, self.causal, self.scale)

    def _tensor(self, length: int, heads: int, device: str) -> torch.Tensor:
        dtype, head_dim = DTYPES[self.dtype], self.head_dim
        if self.storage == "contiguous":
            return torch.randn(self.batch, length, heads, head_dim, device=device).to(dtype)
        if self.storage == "heads-first":
            values = torch.randn(self.batch, heads, length, head_dim, device=device).to(dtype)
            return values.transpose(1, 2)
        return with_nan_around(
            torch.randn(self.batch, length, heads, head_dim, device=device).to(dtype)
        )


def with_nan_around(values: torch.Tensor) -> torch.Tensor:
    """The same values as a view of a larger tensor of NaN, each row still on 16 bytes."""
    batch, length, heads, head_dim = values.shape
    room = values.new_full((batch + 1, length + 3, heads + 1, head_dim + 16), torch.nan)
    return room[1:, 2:-1, :-1, 8:-8].copy_(values)


def covering(seed: int) -> list[RandomCase]:
    """DRAWS cases for each head dim, dtype and mask; no pair of lengths repeats before all came."""
    draw = random.Random(seed)
    combinations = itertools.product(HEAD_DIMS, DTYPES, (False, True), range(DRAWS))
    pairs: list[tuple[int, int]] = []
    cases = []
    for number, (head_dim, dtype, causal, _) in enumerate(combinations):
        if not pairs:
            pairs = list(itertools.product(LENGTHS, LENGTHS))
            draw.shuffle(pairs)
        cases.append(
            RandomCase(
                head_dim,
                dtype,
                causal,
                pairs.pop(),
                draw.choice(HEADS),
                draw.choice([1, 2, 3]),
                draw.choice([None, None, round(draw.uniform(0.01, 1.5), 2)]),
                STORAGES[number % len(STORAGES)],
            )
        )
    return cases
