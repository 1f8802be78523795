"""What the record of calls drawn at random says: how often flashvar is slower, and where most."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.ratios import is_peer
from rates import OURS, caption, contender, documents, relative, sizes_of
from tables import table

_SLOWEST: Final = 10
_ABOUT: Final = (
    "Calls whose sizes are drawn at random from lists in `benchmarks/cases.toml`: self-attention "
    "with and without a causal mask, cross-attention, prompts and single tokens on many keys. A "
    "call is written as batch x queries / keys, heads / KV heads x head dim. A ratio is flashvar's "
    "rate divided by that of the fastest other exact package in the run: above 1 flashvar is "
    "faster."
)


def random_calls(root: Path) -> str:
    """Ratios by direction and the slowest calls, with a heading where there is a record."""
    parts = []
    for file, document in documents(root, "random"):
        cells: dict[str, dict[str, dict[str, Any]]] = {}
        for row in document["rows"]:
            if "tflops" in row:
                cells.setdefault(row["cell"], {})[row["contender"]] = row
        found = []
        for by in cells.values():
            others = {name: row for name, row in by.items() if is_peer(name)}
            if OURS in by and others:
                fastest = max(others, key=lambda name: others[name]["tflops"])
                found.append((by[OURS]["tflops"] / others[fastest]["tflops"], by[OURS], fastest))
        found.sort(key=lambda one: one[0])
        ratios: dict[str, list[float]] = {}
        for ratio, row, _ in found:
            ratios.setdefault(row["direction"], []).append(ratio)
        slowest = table(
            ("slowest calls", "direction", "ratio", "to"),
            [
                (sizes_of(row), row["direction"], f"{ratio:.2f}", contender(fastest))
                for ratio, row, fastest in found[:_SLOWEST]
            ],
        )
        measured = caption(file, document["environment"], "Ratios")
        parts.append(f"{measured}\n\n{relative(ratios)}\n\n{slowest}")
    return "\n\n".join(["## Calls drawn at random", _ABOUT, *parts]) if parts else ""
