"""The one runner: `python benchmarks/run.py attention --json OUT`; models, host, ... likewise.

Needs nothing but Python, and torch (with triton) for the first eight; flashvar is imported from
where Python finds it, so from a working tree:

    PYTHONPATH=src/python python benchmarks/run.py attention --json out.json --only hdim64

`--prepare N` compiles what Triton and torch compile in N processes at once, and then measures.
An interrupted run of attention, models, random, shapes, ops or layers writes what it has measured
to OUT.partial.json and ends with 130. Tables are printed last; `draw.py` draws pictures from the
files; `--compare` sets two side by side.
The JSON file, schema 2, here as `result_file.read` gives it:

    {
      "schema": 2,
      "benchmark": "attention",
      "parameters": {           what the run was told
        "only": [...], "contenders": [...], "seconds": 0.25, "processes": 0},
      "environment": {          environment.py
        "time": "...", "source": {"revision": "<git sha>" or null, "dirty": true/false/null,
          "from": "checkout", "BENCH_REVISION", "binaries" or null: who says so},
        "python": "3.12.3", "platform": "Linux x86_64", "libc": "...", "cpu": {"model", "count"},
        "versions": {"torch", "triton", "numpy", and each contender's distribution that is
          installed}, "nvcc": "..." or null,
        "settings": {FLASHVAR_* variables that change what runs},
        "device": {             this and the next: only where a device is measured
          "name", "capability": [9, 0], "multiprocessors", "memory_bytes", "l2_bytes", "driver",
          "cuda_of_torch", "cudnn", "clocks_before": {clocks}},
        "binaries": [           what flashvar found, from the manifests
          {"architecture", "version", "code_kinds", "toolkit", "revision", "dirty", "hash"}]
      },
      "took_seconds": 93.1,     wall clock of the run
      "rows": [{...}]           one per case and contender:
    }

    attention  cell, contender, direction, dtype, batch, seqlen, seqlen_k where it differs, heads,
               heads_kv, head_dim, causal;
               then median_ms, low_ms, high_ms (20th and 80th percentile), rounds, tflops,
               difference_to_reference (relative distance from the output of the first contender
               that is exact), approximate (true where it is), to_reference, to_best (ratio of rates
               to SDPA's FlashAttention-2 and to the fastest contender that is exact and not
               flashvar), product_tflops (of a matrix product of 8192 x
               8192, timed beside the long forwards), and clocks under load: sm_mhz,
               memory_mhz, power_w, power_limit_w, temperature_c; or skipped: why it did not run
    models     as attention
    random     as attention
    shapes     cell, contender, shape (gqa or mha, packed or padded, a feature or "without", a head
               dim or the next that is compiled); the rest as attention; ratio to the plain call: of
               rates (to_plain) and of times (faster)
    ops        op (or a function of it), unit (of its rates), cell, contender, dtype; median_ms,
               low_ms, high_ms, rounds, rate (10^12 of the cell's work a second: operations, or
               bytes moved), to_contender (flashvar's rate to it); clocks as attention; or skipped
    layers     cell, direction (step: forward and backward), dtype, batch, seqlen, hidden, head_dim,
               warm_up (calls before the clock), contender; first_s (its first call here),
               median_ms, low_ms, high_ms, rounds, tokens_per_s, to_contender; clocks as attention;
               or skipped
    host       contender (of another op than attention: "op, " and its cell); median_us, low_us,
               high_us, rounds, calls (per round); or skipped
    integrations  way; median_us, low_us, high_us, rounds, calls (per round); of calls added_us,
               what is more than `flashvar.attention` takes; on the CPU where there is no device
    build      step, command, seconds
    import     statement, median_ms, low_ms, high_ms, cpu_ms (its part on the CPU: a busy
               machine changes it less), rounds, heavy_modules (loaded by it)
    size       wheel, distribution, platform, bytes, installed_bytes, library_bytes,
               library_compressed_bytes
    install    wheel, distribution, version, median_s, cpu_s (a busy machine changes it less),
               rounds, megabytes
    index      case, median_s, rounds, wheels, megabytes
    audit      wheel, median_s, rounds, megabytes, kernels, findings
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Final, NoReturn

# Run as a file, Python searches this folder: `build` and the other modules here would hide others.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import compare, environment, result_file
from benchmarks.report import SCHEMA, BenchmarkError, Options, Report

# The module of each benchmark: it has a function `run(options)` that gives a report.
_MODULES: Final = {
    "attention": "attention",
    "models": "models",
    "random": "random_calls",
    "shapes": "shapes",
    "ops": "ops",
    "layers": "layers",
    "host": "host",
    "integrations": "integrations",
    "build": "build",
    "import": "import_time",
    "size": "size",
    "install": "install",
    "index": "index",
    "audit": "audit",
}
_ON_DEVICE: Final = ("attention", "models", "random", "shapes", "ops", "layers", "host")
# Who takes an option that not everybody takes.
_WITH_CONTENDERS: Final = ("attention", "models", "random", "shapes")
_TAKEN_BY: Final = {
    "contender": (*_WITH_CONTENDERS, "ops", "layers"),
    "seconds": (*_WITH_CONTENDERS, "ops", "layers", "integrations"),
    "prepare": (*_WITH_CONTENDERS, "ops"),
    "threshold": (),
}


def main() -> int:
    """Command line; 0, 1 where a comparison finds what got worse, 2 where it cannot be done.

    130 where the run was interrupted.
    """
    parser = _parser()
    arguments = parser.parse_args()
    if wrong := _misplaced(arguments, parser):
        parser.error(wrong)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if arguments.compare:
            return _compare(arguments)
        report = _run(arguments)
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    print("\n".join([report.table(), *report.notes()]))
    if last := report.last_tables():
        print(f"\n{last}")
    return 0 if report.is_whole() else 130


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End as by Ctrl-C, which keeps rows. `timeout` signals twice: the second does not end that."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(arguments: argparse.Namespace) -> Report:
    """What the benchmark reports, in the file that was asked for too."""
    options = Options(
        tuple(arguments.only), tuple(arguments.contender), arguments.seconds, arguments.prepare
    )
    if arguments.json is not None:
        _check_writable(arguments.json)
    # Loaded by name, for only some of them need torch.
    module = importlib.import_module(f"benchmarks.{_MODULES[arguments.benchmark]}")
    on_device = arguments.benchmark in _ON_DEVICE or (
        arguments.benchmark == "integrations" and environment.has_device()
    )
    facts = environment.gather(device=on_device)
    start = perf_counter()
    report: Report = module.run(options)
    if arguments.json is not None:
        result = {
            "schema": SCHEMA,
            "benchmark": arguments.benchmark,
            "parameters": {
                "only": options.only,
                "contenders": options.contenders,
                "seconds": options.seconds,
                "processes": options.processes,
            },
            "environment": facts,
            "took_seconds": round(perf_counter() - start, 1),
            "rows": report.rows,
        }
        whole, partial = arguments.json, arguments.json.with_suffix(".partial.json")
        result_file.write(whole if report.is_whole() else partial, result)
    return report


def _compare(arguments: argparse.Namespace) -> int:
    """Prints the ratios of two files; 1 where one is worse by more than the threshold."""
    before, after = map(compare.read, arguments.compare)
    compared = compare.documents(before, after)
    print(compare.table(compared, arguments.threshold))
    for line in compare.differences(before, after):
        print(line)
    return 1 if compare.regressions(compared, arguments.threshold) else 0


def _misplaced(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """What is wrong with words that are right by themselves."""
    if (arguments.benchmark is None) != bool(arguments.compare):
        return "expected a benchmark, or --compare A.json B.json, and not both"
    given = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    if arguments.compare:
        others = [name for name in given if name not in ("compare", "threshold")]
        return f"--{others[0]} does not go with --compare: leave it out" if others else None
    for name in given:
        takers = _TAKEN_BY.get(name)
        if takers is not None and arguments.benchmark not in takers:
            goes_with = ", ".join(takers) or "--compare"
            return f"--{name} goes with {goes_with}, not with {arguments.benchmark}: leave it out"
    return None


def _check_writable(file: Path) -> None:
    """Hours of measuring must not end at a folder that cannot be written."""
    new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise BenchmarkError(
            f"--json: expected a file that can be written, found {error}: choose another"
        ) from None
    if new:
        file.unlink()


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="How fast flashvar runs, calls, builds and imports, next to its peers.",
        allow_abbrev=False,
    )
    parser.add_argument("benchmark", nargs="?", choices=_MODULES)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all results here")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="CASE",
        help="a case, a part of its name or a pattern with *; may be repeated",
    )
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="NAME",
        help="attention, models, random, shapes, ops, layers: who runs, e.g. flex or "
        "flashvar-smXY; may be repeated",
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=0.25,
        help="attention, models, random, shapes, ops, layers: device time of a contender in a "
        "case; integrations: of each way (%(default)s)",
    )
    parser.add_argument(
        "--prepare",
        type=int,
        default=0,
        metavar="N",
        help="attention, models, random, shapes, ops: N processes first prepare the cases at the "
        "same time, then measure one after the other (0: one process does both; needs the least "
        "memory)",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.json", "B.json"),
        help="measure nothing: ratios of B to A, and exit code 1 where B is worse",
    )
    parser.add_argument(
        "--threshold",
        type=_positive,
        default=0.05,
        metavar="PART",
        help="of --compare: how much worse B may be (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
