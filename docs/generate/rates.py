"""Measured figures, from the records in benchmarks/results: none of them is typed by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from benchmarks import result_file
from benchmarks.names import (
    BUILD_STEPS,
    CONTENDERS,
    HOST_CALLERS,
    HOST_OF_OP,
    HOST_WAYS,
    INTEGRATION_CALLS,
    LAYERS,
    MODELS,
    OP_OF_CELL,
    PACKED,
    note_on_wheel,
)
from benchmarks.ratios import APPROXIMATE, is_ours, is_peer
from tables import table

RESULTS: Final = Path("benchmarks", "results")
OURS: Final = "flashvar-cuda"
NONE: Final = "-"  # not measured
# Headings of a table with a column per contender, which would otherwise be wider than a page.
_SHORT: Final = {
    "sdpa-flash": "SDPA FA2",
    "sdpa-efficient": "SDPA mem.-eff.",
    "flex": "Flex",
    "flash-attn-3": "FA3 (vLLM)",
    "flash-attn-4": "FA4",
}
_MODELS: Final = (
    "Attention of one layer. *2 x 8,192, 32 / 8 x 128*: batch 2, 8,192 queries and keys, 32 query "
    "heads that share 8 heads of k and v, head dim 128. *1 x 512 / 50,176*: 512 queries on 50,176 "
    "keys. *on one of 8 GPUs*: with an eighth of the heads, as in tensor parallelism."
)
# (head dim, length, causal) -> contender -> row.
Cells: TypeAlias = dict[tuple[int, int, bool], dict[str, dict[str, Any]]]


def documents(root: Path, benchmark: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the records of a benchmark."""
    for path in sorted((root / RESULTS).glob("*.json")):
        found = result_file.read(path)
        if found.get("benchmark") == benchmark:
            yield path.name, found


def forward(root: Path) -> str:
    """Rates of the forward."""
    return _rates(root, "forward")


def backward(root: Path) -> str:
    """Rates of the backward."""
    return _rates(root, "backward")


def _rates(root: Path, direction: str) -> str:
    """A table per record in which a device ran its own binary."""
    parts = []
    for file, document in _of_own_binaries(root):
        if cells := _cells(document, direction):
            parts.append(caption(file, document["environment"]) + "\n\n" + _comparison(cells))
    return "\n\n".join(parts)


def _of_own_binaries(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records of attention, without those of translated code, which is tuned for another device."""
    for file, document in documents(root, "attention"):
        if "FLASHVAR_FORCE_ARCH" not in document["environment"].get("settings", {}):
            yield file, document


def _cells(document: dict[str, Any], direction: str) -> Cells:
    """The cells that flashvar's binary ran, with a row for each contender."""
    cells: Cells = {}
    for row in document["rows"]:
        if row.get("direction", "forward") == direction and "tflops" in row:
            cell = (row["head_dim"], row["seqlen"], row["causal"])
            cells.setdefault(cell, {})[row["contender"]] = row
    return {cell: by for cell, by in cells.items() if OURS in by}


def ratios(root: Path) -> str:
    """The rate of flashvar divided by that of each other package, and which were not measured."""
    parts = []
    for file, document in _of_own_binaries(root):
        directions = [_cells(document, direction) for direction in ("forward", "backward")]
        if not any(directions):
            continue
        named = dict.fromkeys([*(row["contender"] for row in document["rows"]), *CONTENDERS])
        peers = [name for name in named if not is_ours(name)]
        rows = [(contender(peer), *(_ratio(cells, peer) for cells in directions)) for peer in peers]
        absent = [name for name, *found in rows if set(found) == {NONE}]
        heading = ("other kernel", "forward: mean (range)", "backward: mean (range)")
        made = table(heading, (row for row in rows if row[0] not in absent))
        missing = f"\n\nNot measured in this run: {', '.join(absent)}." if absent else ""
        missing += _approximations(by for cells in directions for by in cells.values())
        measured = caption(file, document["environment"], "Measured")
        parts.append(f"{measured} Means are geometric.\n\n{made}{missing}")
    return "\n\n".join(parts)


def _ratio(cells: Cells, peer: str) -> str:
    """Geometric mean, lowest and highest; NONE if nothing was measured."""
    found = [by[OURS]["tflops"] / by[peer]["tflops"] for by in cells.values() if peer in by]
    if not found:
        return NONE
    return f"{geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def to_the_fastest(root: Path) -> str:
    """README.md's table: flashvar's rate relative to that of the fastest other kernel."""
    _, document = _with_a_forward(root)
    of_call = {
        f"{direction}, head dim {head_dim}": [
            by[OURS]["tflops"] / best
            for cell, by in _cells(document, direction).items()
            if cell[0] == head_dim and (best := _fastest_other(by)) is not None
        ]
        for direction in ("forward", "backward")
        for head_dim in sorted({cell[0] for cell in _cells(document, direction)})
    }
    return relative(of_call)


def of_the_chart(root: Path) -> str:
    """README.md's words on the run that its chart and that table are of."""
    file, document = _with_a_forward(root)
    return day_and_commit(file, document["environment"])


def _with_a_forward(root: Path) -> tuple[str, dict[str, Any]]:
    """Of the records of attention with a forward, one with the most peers; of these the newest."""

    def worth(record: tuple[str, dict[str, Any]]) -> tuple[int, str]:
        cells = _cells(record[1], "forward").values()
        peers = {name for by in cells for name in by if is_peer(name)}
        return len(peers), str(record[1]["environment"]["time"])

    found = [(file, one) for file, one in _of_own_binaries(root) if _cells(one, "forward")]
    return max(found, key=worth)


def relative(of_call: Mapping[str, Sequence[float]]) -> str:
    """A line per call: geometric mean and range of the ratios of its cells, and those below 1."""
    rows = [
        (
            call,
            f"{geometric_mean(found):#.3g}",
            f"{min(found):#.3g} to {max(found):#.3g}",
            f"{sum(ratio < 1 for ratio in found)} of {len(found)}",
        )
        for call, found in of_call.items()
    ]
    return table(("", "mean", "range", "flashvar is slower in"), rows)


def _fastest_other(by: dict[str, dict[str, Any]]) -> float | None:
    """The highest rate in a cell that is of another package, and exact."""
    return max((row["tflops"] for name, row in by.items() if is_peer(name)), default=None)


def _approximations(cells: Iterable[dict[str, dict[str, Any]]]) -> str:
    """How far the results of approximate kernels are from exact ones; "" where there are none."""
    found: dict[tuple[str, str], list[float]] = {}
    exact: list[float] = []
    for by in cells:
        if not APPROXIMATE.keys() & by:
            continue
        differences = {name: 100 * row["difference_to_reference"] for name, row in by.items()}
        others = [name for name in by if name not in APPROXIMATE]
        exact += [differences[name] for name in others]
        for name in APPROXIMATE.keys() & by:
            found.setdefault((name, others[0]), []).append(differences[name])
    return "".join(
        f"\n\n{contender(name)} {APPROXIMATE[name]}: its results differ from those of "
        f"{contender(reference)} by {min(differences):.1f} to {max(differences):.1f} % (Frobenius "
        f"norm), those of exact kernels by at most {max(exact):.1f} %. It never counts as the "
        "fastest other."
        for (name, reference), differences in sorted(found.items())
    )


def _comparison(cells: Cells) -> str:
    peers = [name for name in dict.fromkeys(n for by in cells.values() for n in by) if name != OURS]
    rows = []
    for (head_dim, seqlen, causal), by in sorted(cells.items()):
        best, own = _fastest_other(by), by[OURS]["tflops"]
        rows.append(
            (
                head_dim,
                f"{seqlen:,}",
                "causal" if causal else "full",
                f"**{own:.0f}**",
                *(f"{by[name]['tflops']:.0f}" if name in by else NONE for name in peers),
                NONE if best is None else f"{own / best:.2f}",
            )
        )
    heading = ("head dim", "length", "mask", "flashvar")
    short = (_SHORT.get(name, contender(name)) for name in peers)
    made = table((*heading, *short, "vs fastest other"), rows)
    return made + _approximations(cells.values())


def contender(name: str) -> str:
    """The name of a contender for readers."""
    return CONTENDERS.get(name, f"`{name}`")


def caption(file: str, environment: dict[str, Any], unit: str = "TFLOP/s") -> str:
    """What was measured, on what, and where the record is."""
    device, versions = environment["device"], environment["versions"]
    return (
        f"{unit} on one {device['name']}, driver {device['driver']}, torch {versions['torch']}, "
        f"{day_and_commit(file, environment)}."
    )


def day_and_commit(file: str, environment: dict[str, Any], folder: Path = RESULTS) -> str:
    """The day and the commit of a record, with its file."""
    source = environment["source"]
    binaries = {(one["revision"], one["dirty"]) for one in environment.get("binaries", ())}
    if source.get("dirty") and len(binaries) == 1 and not (binary := binaries.pop())[1]:
        commit = f"kernels of commit {binary[0][:10]}"
    else:
        commit = f"commit {source['revision'][:10]}" if source["revision"] else "no commit recorded"
        commit += " with uncommitted changes" if source.get("dirty") else ""
    day = environment.get("time", "").partition("T")[0]
    return f"{f'{day}, ' if day else ''}{commit} (`{folder / file}`)"


def host(root: Path) -> str:
    """Host time of one call."""
    parts = []
    for file, document in documents(root, "host"):
        times = {
            row["contender"]: row["median_us"] for row in document["rows"] if "median_us" in row
        }
        rows = [
            (contender(name), *(_time(times.get(f"{prefix}-{way}")) for way in HOST_WAYS))
            for prefix, name in HOST_CALLERS.items()
        ]
        made = table(("call", *HOST_WAYS.values()), rows)
        least = (
            f" `torch.empty_like` took {times['empty-like']:.1f} µs."
            if "empty-like" in times
            else ""
        )
        origin = day_and_commit(file, document["environment"])
        parts.append(f"Medians in µs, {origin}.{least}\n\n{made}")
        others = [
            (f"`{OP_OF_CELL[cell.partition(',')[0]]}`", cell, _time(spent))
            for name, spent in times.items()
            if (cell := name.removeprefix(HOST_OF_OP)) != name
        ]
        if others:
            made = table(("op", "call", "µs"), others)
            parts.append(f"The other ops, without gradients:\n\n{made}")
    return "\n\n".join(parts)


def integrations(root: Path) -> str:
    """What an integration adds to the host time of a call."""
    parts = []
    for file, document in documents(root, "integrations"):
        found = {row["way"]: row for row in document["rows"] if "median_us" in row}
        rows = [
            (
                name,
                *(
                    _time(found.get(f"{way}, {mode}", {}).get(measured))
                    for mode in ("no-gradient", "gradient")
                    for measured in ("median_us", "added_us")
                ),
            )
            for way, name in INTEGRATION_CALLS.items()
        ]
        made = table(("call", "no gradient", "added", "gradient", "added"), rows)
        origin = day_and_commit(file, document["environment"])
        parts.append(
            f"Through an integration, and how much that adds to `flashvar.attention`. "
            f"Medians in µs, {origin}.\n\n{made}"
        )
    return "\n\n".join(parts)


def builds(root: Path) -> str:
    """Seconds of a build."""
    parts = []
    for file, document in documents(root, "build"):
        cores = document["environment"]["cpu"]["count"]
        rows = [
            (
                BUILD_STEPS.get(row["step"], row["step"]),
                f"`{row['command']}`",
                f"{row['seconds']:.1f}",
            )
            for row in document["rows"]
            if "seconds" in row
        ]
        parts.append(
            f"On {cores} cores, {day_and_commit(file, document['environment'])}.\n\n"
            + table(("step", "command", "seconds"), rows)
        )
    return "\n\n".join(parts)


def models(root: Path) -> str:
    """Rates in the shapes of models that people have, with a heading where there is a record."""
    parts = []
    for file, document in documents(root, "models"):
        cells: dict[str, dict[str, dict[str, Any]]] = {}
        for row in document["rows"]:
            if "tflops" in row and "cell" in row:
                cells.setdefault(row["cell"], {})[row["contender"]] = row
        names = list(dict.fromkeys(name for by in cells.values() for name in by))
        rows = []
        for cell, by in cells.items():
            call = next(iter(by.values()))
            rates = [_rate(by[name]["tflops"]) if name in by else NONE for name in names]
            model = cell.removesuffix(f"-{call['direction']}")
            rows.append((MODELS.get(model, model), call["direction"], sizes_of(call), *rates))
        measured = caption(file, document["environment"])
        headings = (
            "layer of",
            "direction",
            "call",
            *(_SHORT.get(one, contender(one)) for one in names),
        )
        parts.append(f"{measured}\n\n{table(headings, rows)}")
    return "\n\n".join(["## Models", _MODELS, *parts]) if parts else ""


def packed_and_grouped(root: Path) -> str:
    """Rates of packed sequences and of grouped heads."""
    parts = []
    for file, document in documents(root, "shapes"):
        cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for row in document["rows"]:
            if "tflops" in row and row["shape"] in ("gqa", "packed"):
                cells.setdefault((row["cell"], row["direction"]), {})[row["contender"]] = row
        names = list(dict.fromkeys(name for by in cells.values() for name in by))
        rows = []
        for (cell, direction), by in cells.items():
            call = PACKED.get(cell.removesuffix(f"-{direction}")) or sizes_of(
                next(iter(by.values()))
            )
            rates = [_rate(by[name]["tflops"]) if name in by else NONE for name in names]
            rows.append((call, direction, *rates))
        headings = ("call", "direction", *(_SHORT.get(one, contender(one)) for one in names))
        parts.append(f"{caption(file, document['environment'])}\n\n{table(headings, rows)}")
    return "\n\n".join(parts)


def _rate(tflops: float) -> str:
    """Digits of a rate; a small one has one after the point."""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.1f}"


def sizes_of(row: Mapping[str, Any]) -> str:
    """The sizes of a call: batch x queries / keys, heads / heads of k and v, head dim."""
    keys = f" / {row['seqlen_k']:,}" if row.get("seqlen_k") else ""
    heads, of_keys = row["heads"], row["heads_kv"]
    shared = f" / {of_keys}" if of_keys != heads else ""
    mask = ", causal" if row["causal"] else ""
    return f"{row['batch']} x {row['seqlen']:,}{keys}, {heads}{shared} x {row['head_dim']}{mask}"


def layers(root: Path) -> str:
    """Milliseconds of whole layers by head dim, hidden size and length."""
    parts = []
    for file, document in documents(root, "layers"):
        found: dict[tuple[int, int, int, str], dict[str, dict[str, Any]]] = {}
        for row in document["rows"]:
            cell = (row["head_dim"], row["hidden"], row["seqlen"], row["direction"])
            if "median_ms" in row:
                found.setdefault(cell, {})[row["contender"]] = row
        names = [name for name in LAYERS if any(name in by for by in found.values())]
        rows = [
            (
                *(head_dim, f"{hidden:,}", f"{seqlen:,}", direction),
                *(f"{by[name]['median_ms']:.2f}" if name in by else NONE for name in names),
            )
            for (head_dim, hidden, seqlen, direction), by in found.items()
        ]
        heading = ("head dim", "hidden size", "length", "call", *(LAYERS[one] for one in names))
        (warm_up,) = {row["warm_up"] for row in document["rows"]}
        measured = caption(file, document["environment"], "Milliseconds")
        measured += f" Every layer was called {warm_up} times before the timing began."
        if lacking := [name for key, name in LAYERS.items() if key not in names]:
            measured += f" Not measured: {'; '.join(lacking)}."
        parts.append(f"{measured}\n\n{table(heading, rows)}")
    return "\n\n".join(parts) or f"No record in `{RESULTS}` has them yet."


def sizes(root: Path) -> str:
    """Megabytes of the wheels, with a heading where there is a record."""
    parts = []
    for file, document in documents(root, "size"):
        rows = [(_wheel(row), row["platform"], *_megabytes(row)) for row in document["rows"]]
        heading = ("wheel", "platform", "MB to download", "MB installed")
        origin = day_and_commit(file, document["environment"])
        parts.append(f"Wheels of {origin}.\n\n{table(heading, rows)}")
    return "\n\n".join(["## Sizes", *parts]) if parts else ""


def sizes_of_others(root: Path) -> str:
    """Megabytes of flashvar's wheels for x86-64, and of other packages' wheels."""
    ((file, document),) = documents(root, "size")
    ours = [
        (f"`{row['distribution']}`", *_megabytes(row), note_on_wheel(row["version"]))
        for row in document["rows"]
        if row["platform"].endswith(("any", "x86_64"))
    ]
    peers = tomllib.loads((root / "benchmarks" / "peer_sizes.toml").read_text("utf-8"))["peer"]
    others = [
        (f"{one['package']} {one['version']}", *_megabytes(one), one.get("note", ""))
        for one in sorted(peers, key=lambda one: int(one["bytes"]))
    ]
    heading = ("wheel", "MB to download", "MB installed", "")
    origin = day_and_commit(file, document["environment"])
    return (
        f"flashvar's wheels of {origin}; those of others are in `benchmarks/peer_sizes.toml`. "
        "You need `flashvar` and one more wheel.\n\n"
        f"{table(heading, [*ours, *others])}"
    )


def installing(root: Path) -> str:
    """CPU time of pip for each wheel."""
    parts = []
    for file, document in documents(root, "install"):
        rows = [
            (f"{row['distribution']} {row['version']}", f"{row['cpu_s']:.1f}")
            for row in sorted(document["rows"], key=lambda row: float(row["cpu_s"]))
        ]
        parts.append(
            "CPU time of pip for a wheel that is already downloaded, without the packages that it "
            f"requires, {day_and_commit(file, document['environment'])}.\n\n"
            + table(("wheel", "seconds"), rows)
        )
    return "\n\n".join(parts)


def size_in_words(root: Path) -> str:
    """README.md's sentence about the binary wheels."""
    ((file, document),) = documents(root, "size")
    binaries = [row for row in document["rows"] if row["library_bytes"]]
    by_note: dict[str, list[Mapping[str, Any]]] = {"": []}
    for row in binaries:
        by_note.setdefault(note_on_wheel(row["version"]), []).append(row)
    released = _range(by_note.pop(""))
    origin = day_and_commit(file, document["environment"])
    others = (f" {note[0].upper()}{note[1:]}, {_range(some)}." for note, some in by_note.items())
    return f"With every kernel, {released} to download: {origin}.{''.join(others)}"


def _range(wheels: Sequence[Mapping[str, Any]]) -> str:
    """The wheels by name, and from how many megabytes to how many they are; at least one."""
    names = [f"`{wheel['distribution'].removeprefix('flashvar-')}`" for wheel in wheels]
    found = sorted(wheel["bytes"] / 1e6 for wheel in wheels)
    if len(found) == 1:
        return f"the wheel for {names[0]} is {found[0]:.1f} MB"
    *most, last = names
    return f"the wheels for {', '.join(most)} and {last} are {found[0]:.1f} to {found[-1]:.1f} MB"


def _wheel(row: Mapping[str, Any]) -> str:
    note = note_on_wheel(row["version"])
    return f"`{row['distribution']}`{note and f', {note}'}"


def _megabytes(wheel: Mapping[str, Any]) -> tuple[str, str]:
    """To download, and installed."""
    return f"{wheel['bytes'] / 1e6:,.2f}", f"{wheel['installed_bytes'] / 1e6:,.2f}"


def _time(microseconds: float | None) -> str:
    return NONE if microseconds is None else f"{microseconds:.1f}"
