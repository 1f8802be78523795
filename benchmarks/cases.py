"""What `cases.toml` holds, typed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE: Final = Path(__file__).with_name("cases.toml")
# Matrix products of one attention call, each 2 * heads * seqlen^2 * head_dim operations a sequence.
_PRODUCTS: Final = {"forward": 2, "backward": 5}
DIRECTIONS: Final = tuple(_PRODUCTS)
# Kinds of random calls that training has too.
_TRAINED: Final = ("self-", "causal-", "cross-")
# Queries of a sequence in a step of decoding, with those of drafts: nobody trains so few.
_DECODED: Final = 8


@dataclass(frozen=True)
class Cell:
    """One attention problem: q is [batch, seqlen, heads, head_dim], k and v have heads_kv heads.

    k and v have seqlen_k rows; 0: as many as q. With `lengths` there are so many sequences, none
    longer than seqlen: packed one behind the other, or padded to seqlen.
    """

    name: str
    direction: str
    dtype: str
    batch: int
    seqlen: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    seqlen_k: int = 0
    lengths: tuple[int, ...] = ()
    feature: str | None = None  # one of `kinds` in cases.toml
    product: bool = False  # whether a matrix product is timed beside it

    @property
    def keys(self) -> int:
        """Rows of k and v of a sequence."""
        return self.seqlen_k or self.seqlen

    @property
    def operations(self) -> float:
        """Floating-point operations that the result needs; half of them under a causal mask."""
        pairs = float(self.batch * self.seqlen * self.keys)
        if self.lengths:
            pairs = sum(float(length) ** 2 for length in self.lengths)
        full = 2.0 * self.heads * self.head_dim * pairs
        return _PRODUCTS[self.direction] * full / (2 if self.causal else 1)


@dataclass(frozen=True)
class LayerCell:
    """A call of a layer: its input is [batch, seqlen, hidden]."""

    direction: str  # forward, without gradients; or step, a forward and a backward
    dtype: str
    batch: int
    seqlen: int
    hidden: int
    head_dim: int
    warm_up: int  # calls before the clock

    @property
    def name(self) -> str:
        """What `--only` takes."""
        return f"hdim{self.head_dim}-hidden{self.hidden}-s{self.seqlen}-{self.direction}"


def attention() -> list[Cell]:
    """The cells of the attention benchmark in the file's order, each in both directions."""
    table = _table("attention")
    return [
        replace(
            _of_width(table, f"{name}-{direction}", direction, cell),
            product=cell.get("product", False) and direction == "forward",
        )
        for name, cell in table["cells"].items()
        for direction in DIRECTIONS
    ]


def models() -> list[Cell]:
    """One layer of each model in the file's order: both directions, of decoding the forward."""
    table = _table("models")
    return [
        Cell(
            name=f"{name}-{direction}",
            direction=direction,
            dtype=table["dtype"],
            **{"heads_kv": cell["heads"], **cell},
        )
        for name, cell in table["cells"].items()
        for direction in (DIRECTIONS if cell["seqlen"] > _DECODED else DIRECTIONS[:1])
    ]


def random_calls() -> list[Cell]:
    """Calls of sizes that are drawn at random: both directions, of few queries the forward.

    The order of what is drawn is that of the file, so a run with another seed has other calls.
    """
    table = _table("random")
    draw = Random(table["seed"])
    calls: dict[str, Cell] = {}
    while len(calls) < table["calls"]:
        kind = draw.choice(list(table["kinds"]))
        sizes = {name: draw.choice(values) for name, values in table["kinds"][kind].items()}
        dtype, head_dim, heads_kv, group, batch = (
            draw.choice(table[name]) for name in ("dtype", "head_dim", "heads_kv", "group", "batch")
        )
        made = Cell(
            name="",
            direction="forward",
            dtype=dtype,
            batch=batch,
            heads=heads_kv * group,
            heads_kv=heads_kv,
            head_dim=head_dim,
            causal=kind == "causal",
            **sizes,
        )
        rows = 2 * made.batch * (made.heads * made.seqlen + made.heads_kv * made.keys)
        limited = {
            "most_operations": made.operations,
            "most_elements": rows * made.head_dim,
            "most_heads": made.heads,
        }
        if all(found <= table[limit] for limit, found in limited.items()):
            keys = f"-{made.seqlen_k}" if made.seqlen_k else ""
            heads = f"{made.heads}h{heads_kv}-hdim{head_dim}"
            calls[f"{kind}-{batch}x{made.seqlen}{keys}-{heads}-{dtype}"] = made
    return [
        replace(made, name=f"{name}-{direction}", direction=direction)
        for name, made in calls.items()
        for direction in (DIRECTIONS if name.startswith(_TRAINED) else DIRECTIONS[:1])
    ]


def shapes() -> list[tuple[str, dict[str, Cell]]]:
    """Pairs of a special call and a plain one, in both directions: name, and shape -> cell."""
    return [*_grouped_heads(), *_packed_sequences(), *_with_features(), *_between_head_dims()]


def layers() -> list[LayerCell]:
    """Calls of whole layers, by head dim, hidden size, length and direction."""
    table = _table("layers")
    return [
        LayerCell(
            direction=direction,
            dtype=table["dtype"],
            batch=table["tokens"] // seqlen,
            seqlen=seqlen,
            hidden=hidden,
            head_dim=int(head_dim),
            warm_up=table["warm_up"],
        )
        for head_dim, sizes in table["hidden"].items()
        for hidden in sizes
        for seqlen in table["seqlen"]
        for direction in ("forward", "step")
    ]


def host() -> Cell:
    """The small call of the host-time benchmark."""
    table = _table("host")
    return Cell(name="host", direction="forward", causal=False, heads_kv=table["heads"], **table)


def _grouped_heads() -> Iterator[tuple[str, dict[str, Cell]]]:
    """Key heads that several query heads share, and as many key heads as query heads."""
    table = _table("gqa")
    for name, cell in table["cells"].items():
        for direction in DIRECTIONS:
            full = _of_width(table, f"{name}-{direction}", direction, cell)
            shared = replace(full, heads_kv=full.heads // table["group"])
            yield full.name, {"gqa": shared, "mha": full}


def _packed_sequences() -> Iterator[tuple[str, dict[str, Cell]]]:
    """Sequences of unequal length, packed; and as many that are all as long as the longest."""
    table = _table("varlen")
    for name, cell in table["cells"].items():
        lengths = tuple(cell["lengths"]) * cell.get("times", 1)
        for direction in DIRECTIONS:
            common = {
                "name": f"{name}-{direction}",
                "direction": direction,
                "dtype": table["dtype"],
                "batch": len(lengths),
                "seqlen": max(lengths),
                "heads": table["width"] // cell["head_dim"],
                "heads_kv": table["width"] // cell["head_dim"],
                "head_dim": cell["head_dim"],
                "causal": cell["causal"],
            }
            yield (
                f"{name}-{direction}",
                {"packed": Cell(**common, lengths=lengths), "padded": Cell(**common)},
            )


def _with_features() -> Iterator[tuple[str, dict[str, Cell]]]:
    """A feature, and the same call without it."""
    table = _table("features")
    for kind in table["kinds"]:
        for name, cell in table["cells"].items():
            for direction in DIRECTIONS:
                if kind == "deterministic" and direction == "forward":
                    continue  # it always is
                plain = _of_width(table, f"{kind}-{name}-{direction}", direction, cell)
                yield plain.name, {kind: replace(plain, feature=kind), "without": plain}


def _between_head_dims() -> Iterator[tuple[str, dict[str, Cell]]]:
    """A head dim, and the next one that kernels are made for."""
    table = _table("head_dims")
    for own, following in table["next"].items():
        for causal in (False, True):
            for direction in DIRECTIONS:
                name = f"hdim{own}-{'causal' if causal else 'full'}-{direction}"
                pair: dict[str, Cell] = {}
                for dim in (int(own), following):
                    cell = {"head_dim": dim, "seqlen": table["seqlen"], "causal": causal}
                    pair[f"hdim{dim}"] = _of_width(table, name, direction, cell)
                yield name, pair


def _of_width(table: dict[str, Any], name: str, direction: str, cell: dict[str, Any]) -> Cell:
    """A cell of so many tokens, and so many columns in all of its heads."""
    heads = table["width"] // cell["head_dim"]
    return Cell(
        name=name,
        direction=direction,
        dtype=table["dtype"],
        batch=table["tokens"] // cell["seqlen"],
        seqlen=cell["seqlen"],
        heads=heads,
        heads_kv=heads,
        head_dim=cell["head_dim"],
        causal=cell["causal"],
    )


def _table(name: str) -> dict[str, Any]:
    with _FILE.open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)[name]
    return table
