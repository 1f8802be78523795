"""Sentences with measured figures, from the records in benchmarks/results."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from typing import Final

from rates import RESULTS, documents

_SDPA: Final = "sdpa-flash"
_LEAST: Final = 0.5  # µs: medians of one call differ by less from run to run


def cost_in_transformers(root: Path) -> str:
    """What a layer's call and `register()` take."""
    ((_, document),) = documents(root, "integrations")
    device = document["environment"]["device"]["name"].removeprefix("NVIDIA ")
    rows = {row["way"]: row for row in document["rows"] if "median_us" in row}
    ways = ("no-gradient", "gradient", "one row, gradient")
    plain, gradient, one_row = (rows[f"transformers, {way}"]["added_us"] for way in ways)
    compared = f"{plain:.1f} µs more than" if plain >= _LEAST else "as long as"
    registering = rows["register, transformers"]["median_us"] / 1000
    return (
        f"On an {device} a layer's call takes {compared} `flashvar.attention`; with gradients "
        f"{gradient:.1f} µs more, and {one_row:.1f} µs more if a batch of one row has to be "
        "checked for packed sequences ([host time](../performance.md#host-time)). "
        f"Registering takes {registering:.2f} ms, plus the time to import transformers and "
        "flashvar's ops if the program has not imported them yet."
    )


def build_in_words(root: Path) -> str:
    """README.md's sentence about the time of a build."""
    ((_, document),) = documents(root, "build")
    (seconds,) = (
        row["seconds"] for row in document["rows"] if row["step"] == "wheels-all-to-cache"
    )
    return (
        f"On {document['environment']['cpu']['count']} CPU cores, the wheels for all x86-64 "
        f"architectures together took {seconds / 60:.0f} minutes "
        "([builds](docs/performance.md#builds))."
    )


def tiles_for_99_kib(root: Path) -> str:
    """Rates of the PTX of GPUs with less shared memory, relative to FlashAttention-2 in torch."""
    ((file, document),) = (
        (file, one)
        for file, one in documents(root, "attention")
        if "flashvar-sm89" in {row["contender"] for row in one["rows"]}
    )
    rate = {
        (row["contender"], row["direction"], row["head_dim"], row["seqlen"], row["causal"]): float(
            row["tflops"]
        )
        for row in document["rows"]
        if "tflops" in row
    }
    ratios = {
        direction: [
            ours / rate[(_SDPA, *cell)]
            for (contender, *cell), ours in rate.items()
            if contender == "flashvar-sm89" and cell[0] == direction
        ]
        for direction in ("forward", "backward")
    }
    forward, backward = (
        f"{geometric_mean(found):.2f} times in the {direction} (lowest cell {min(found):.2f})"
        for direction, found in ratios.items()
    )
    device = document["environment"]["device"]["name"].removeprefix("NVIDIA ")
    return (
        "Rate of the tiles for 99 KiB relative to FlashAttention-2 in torch, as PTX on one "
        f"{device}, over {len(ratios['forward'])} cells of head dims 64 to 256: {forward}, "
        f"{backward} (`{RESULTS / file}`)."
    )
