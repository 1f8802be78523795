"""What `cases.toml` holds, typed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE: Final = Path(__file__).with_name("cases.toml")
# Matrix products of one attention call, each 2 * batch * heads * seqlen^2 * head_dim operations.
_PRODUCTS: Final = {"forward": 2}


@dataclass(frozen=True)
class Cell:
    """One attention problem: q, k and v are [batch, seqlen, heads, head_dim]."""

    name: str
    direction: str
    dtype: str
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def operations(self) -> float:
        """Floating-point operations that the result needs; half of them under a causal mask."""
        full = 2.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return _PRODUCTS[self.direction] * full / (2 if self.causal else 1)


def attention() -> list[Cell]:
    """The cells of the attention benchmark, in the file's order."""
    table = _table("attention")
    return [
        Cell(
            name=name,
            direction=table["direction"],
            dtype=table["dtype"],
            batch=table["tokens"] // cell["seqlen"],
            seqlen=cell["seqlen"],
            heads=table["width"] // cell["head_dim"],
            head_dim=cell["head_dim"],
            causal=cell["causal"],
        )
        for name, cell in table["cells"].items()
    ]


def host() -> Cell:
    """The small call of the host-time benchmark."""
    return Cell(name="host", direction="forward", causal=False, **_table("host"))


def _table(name: str) -> dict[str, Any]:
    with _FILE.open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)[name]
    return table
