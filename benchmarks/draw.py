"""Draw pictures, as PNG and SVG, from what `run.py --json` wrote.

    python benchmarks/draw.py benchmarks/results/attention-h200.json --out docs/pictures

Files of `attention` make rates by length in both directions, an overview of both under a causal
mask, and heat maps of ratios; of `host` and `size`, one picture each, and of
`ops` one for each op. Several files of one benchmark and one machine make one set, which says so;
of a case that is in two, the later one counts. A picture names its files and their hashes in its
metadata (`Source`). Needs matplotlib, no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Run as a file, Python searches this folder: `build` and the other modules here would hide others.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib import pyplot, rcParams
from matplotlib.figure import Figure

from benchmarks import compare
from benchmarks.drawing import heat, host, ops, rates, sizes, style
from benchmarks.drawing.points import Rates, best_peer, over
from benchmarks.drawing.points import rates as rates_of
from benchmarks.ratios import APPROXIMATE
from benchmarks.report import BenchmarkError

_PEER_SIZES: Final = Path(__file__).with_name("peer_sizes.toml")
_DIRECTIONS: Final = ("forward", "backward")
_DPI: Final = 120

Rows = list[dict[str, Any]]


def main() -> int:
    """Command line; 2 where there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, help="JSON of attention, host, ops or size")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/pictures"), metavar="FOLDER")
    parser.add_argument("--name", default="", help="what the pictures' names start with")
    options = parser.parse_args()
    rcParams["svg.hashsalt"] = "flashvar"  # the same ids, so the same file, every time
    try:
        pictures = list(_pictures([compare.read(path) for path in options.files]))
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for benchmark, name, figure in pictures:
        source = {"Source": _source(benchmark, options.files)}
        for ending, metadata in (("png", source), ("svg", source | {"Date": None})):
            target = options.out / f"{options.name}{name}.{ending}"
            figure.savefig(target, dpi=_DPI, metadata=metadata)
            print(target)
        pyplot.close(figure)
    return 0


def _source(benchmark: str, files: Sequence[Path]) -> str:
    """The files that a benchmark's pictures were drawn from, each with its hash."""
    drawn = [path for path in files if compare.read(path)["benchmark"] == benchmark]
    drawn += [_PEER_SIZES] if benchmark == "size" else []
    hashes = (hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in drawn)
    return ", ".join(f"{path.name} {hashed}" for path, hashed in zip(drawn, hashes, strict=True))


def _pictures(documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, Figure]]:
    """Benchmark, name and picture of everything in the files.

    Raises:
        BenchmarkError: nothing in them can be drawn, or one picture would have two machines.
    """
    none = True
    draw = {"attention": _attention, "host": _host, "ops": _ops, "size": _size}
    for benchmark, function in draw.items():
        of_it = [one for one in documents if one["benchmark"] == benchmark]
        if of_it:
            rows = [row for document in of_it for row in document["rows"]]
            for name, figure in function(rows, _one_machine(of_it), len(of_it)):
                none = False
                yield benchmark, name, figure
    if none:
        raise BenchmarkError(
            "expected timed rows of `run.py attention`, `host`, `ops` or `size`, found none: "
            "measure first"
        )


def _one_machine(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The environment that all of them have, as far as a picture names it."""
    environments: list[dict[str, Any]] = [document["environment"] for document in documents]
    if all("device" in environment for environment in environments):
        machines = list(dict.fromkeys(map(style.machine, environments)))
        if len(machines) > 1:
            raise BenchmarkError(
                f"expected files of one machine, found {' and '.join(machines)}: draw them apart"
            )
    return environments[-1]


def _attention(rows: Rows, environment: dict[str, Any], runs: int) -> Iterator[tuple[str, Figure]]:
    machine = style.machine(environment) + _clock(rows)
    found = {direction: rates_of(rows, direction) for direction in _DIRECTIONS}
    measured = {direction: one for direction, one in found.items() if one}
    what = "bf16, 16,384 tokens per batch, heads = 2048 / head dim; medians, cold L2, "
    what += "all in one run" if runs == 1 else f"of {runs} runs"
    for direction, one in measured.items():
        title = f"Attention {direction}, TFLOP/s"
        yield direction, rates.draw(rates.by_mask(one), title, machine, what)
    strips = [(direction, one, True) for direction, one in measured.items() if _has_causal(one)]
    if strips:
        title = "Causal attention, TFLOP/s"
        yield "causal", rates.draw(strips, title, machine, what)
    ours = [(direction, _to_best(one)) for direction, one in measured.items()]
    if any(maps for _, maps in ours):
        title = "flashvar's rate relative to that of the fastest other kernel"
        others = "every other kernel"
        if any(APPROXIMATE.keys() & one for one in measured.values()):
            others += " that is exact"
        legend = (
            f"head dim, mask and length; above 1 (blue): faster than {others} in this run; "
            "means are geometric"
        )
        yield "best-peer", heat.draw(ours, title, machine, legend)
    each = [(direction, _to_each(one)) for direction, one in measured.items()]
    if any(maps for _, maps in each):
        title = "flashvar's rate relative to that of each other kernel"
        legend = (
            "head dim, mask and length; above 1 (blue): flashvar is faster; means are geometric"
        )
        yield "each-peer", heat.draw(each, title, machine, legend)


def _clock(rows: Rows) -> str:
    clocks = [round(row["sm_mhz"]) for row in rows if "sm_mhz" in row]
    if not clocks:
        return ""
    least, most = min(clocks), max(clocks)
    return f", SM at {least} MHz" if least == most else f", SM at {least} to {most} MHz"


def _has_causal(measured: Rates) -> bool:
    return any(point.causal for found in measured.values() for point in found)


def _to_best(measured: Rates) -> list[heat.Map]:
    best = best_peer(measured)
    return [
        (style.label(name, short=True), ratios)
        for name in measured
        if style.is_ours(name) and (ratios := over(measured[name], best))
    ]


def _to_each(measured: Rates) -> list[heat.Map]:
    cuda = measured.get("flashvar-cuda", {})
    peers = {
        style.label(name, short=True): measured[name]
        for name in measured
        if name in style.STYLES and not style.is_ours(name)
    }
    return [
        (f"vs {name}", ratios) for name, found in peers.items() if (ratios := over(cuda, found))
    ]


def _host(rows: Rows, environment: dict[str, Any], runs: int) -> Iterator[tuple[str, Figure]]:
    cpu = environment.get("cpu", {}).get("model", "")
    what = "batch 1, 8 heads, 128 tokens, head dim 64, bf16; median and 20th to 80th percentile"
    figure = host.draw(rows, f"{style.machine(environment)}; {cpu}", what)
    if figure is not None:
        yield "host", figure


def _ops(rows: Rows, environment: dict[str, Any], runs: int) -> Iterator[tuple[str, Figure]]:
    for name in dict.fromkeys(row["op"] for row in rows):
        of_op = [row for row in rows if row["op"] == name]
        what = "medians, cold L2, " + ("all in one run" if runs == 1 else f"of {runs} runs")
        figure = ops.draw(of_op, style.machine(environment) + _clock(of_op), what)
        if figure is not None:
            yield name.replace("_", "-"), figure


def _size(rows: Rows, environment: dict[str, Any], runs: int) -> Iterator[tuple[str, Figure]]:
    mine = [row for row in rows if "x86_64" in row["platform"] or row["platform"] == "any"]
    peers = tomllib.loads(_PEER_SIZES.read_text("utf-8"))["peer"]
    if mine:
        what = "Linux x86-64; flashvar: one wheel of pure Python, and one for each GPU architecture"
        yield "sizes", sizes.draw(mine, peers, what)


if __name__ == "__main__":
    sys.exit(main())
