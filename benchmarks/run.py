"""The one runner: `python benchmarks/run.py attention --json OUT`; forms, host, ... likewise.

Needs nothing but Python, and torch (with triton) for the first three; flashvar is imported from
where Python finds it, so from a working tree:

    PYTHONPATH=src/python python benchmarks/run.py attention --json out.json --only hdim64

`--prepare N` first compiles what Triton and torch compile for the chosen cases, in N processes.
A table is printed last; `draw.py` draws pictures from the files of `attention`.
The JSON file, schema 1:

    {
      "schema": 1,
      "benchmark": "attention",
      "parameters": {           what the run was told
        "only": [...], "contenders": [...], "seconds": 0.25},
      "environment": {          environment.py
        "time": "...", "source": {"revision": "<git sha>" or null, "dirty": true/false/null,
          "from": "checkout", "BENCH_REVISION", "binaries" or null: who says so},
        "python": "3.12.3", "platform": "Linux x86_64", "libc": "...", "cpu": {"model", "count"},
        "versions": {"torch", "triton", "numpy"}, "nvcc": "..." or null,
        "settings": {FLASHVAR_* variables that change what runs},
        "device": {             this and the next: attention, forms and host only
          "name", "capability": [9, 0], "multiprocessors", "memory_bytes", "l2_bytes", "driver",
          "cuda_of_torch", "cudnn", "clocks_before": {clocks}},
        "binaries": [           what flashvar found, from the manifests
          {"architecture", "version", "code_kinds", "toolkit", "revision", "dirty", "hash"}]
      },
      "rows": [{...}]           one per case and contender:
    }

    attention  cell, contender, direction, dtype, batch, seqlen, heads, heads_kv, head_dim, causal;
               then median_ms, low_ms, high_ms (20th and 80th percentile), rounds, tflops,
               difference_to_reference (relative distance from the first contender's output),
               to_reference, to_best (ratio of rates to SDPA's FlashAttention-2 and to the fastest
               contender that is not flashvar), and clocks under load: sm_mhz, memory_mhz,
               power_w, power_limit_w, temperature_c; or skipped: why it did not run
    forms      cell, contender, form (gqa or mha, packed or padded); the rest as attention; ratio to
               the plain form: of rates (to_plain) and of times (faster)
    host       contender; median_us, low_us, high_us, rounds, calls (per round); or skipped
    build      step, command, seconds
    import     statement, median_ms, low_ms, high_ms, rounds, heavy_modules (loaded by it)
    size       wheel, bytes, installed_bytes, library_bytes, library_compressed_bytes
    index      case, median_s, rounds, wheels, megabytes
    audit      wheel, median_s, rounds, megabytes, kernels, faults
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

# Run as a file, Python searches this folder: `build` and the other modules here would hide others.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cases, environment
from benchmarks.report import BenchmarkError, Options, Report, chosen

_MODULES: Final = {
    "attention": "attention",
    "forms": "forms",
    "host": "host",
    "build": "build",
    "import": "import_time",
    "size": "size",
    "index": "index",
    "audit": "audit",
}
_ON_DEVICE: Final = ("attention", "forms", "host")


def main() -> int:
    """Command line; 0, or 2 where the benchmark cannot run as asked."""
    arguments = _parser().parse_args()
    options = Options(tuple(arguments.only), tuple(arguments.contender), arguments.seconds)
    try:
        # Loaded by name, for only two of them need torch.
        module = importlib.import_module(f"benchmarks.{_MODULES[arguments.benchmark]}")
        facts = environment.gather(device=arguments.benchmark in _ON_DEVICE)
        if arguments.prepare:
            _prepare(arguments.benchmark, options, arguments.prepare)
        report: Report = module.run(options)
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        result = {
            "schema": 1,
            "benchmark": arguments.benchmark,
            "parameters": {
                "only": options.only,
                "contenders": options.contenders,
                "seconds": options.seconds,
            },
            "environment": facts,
            "rows": report.rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report.table())
    for note in report.notes():
        print(note)
    return 0


def _prepare(benchmark: str, options: Options, processes: int) -> None:
    """Let other processes call every case once: what they compile stays in the caches on disk."""
    known = cases.forms() if benchmark == "forms" else cases.attention()
    names = chosen(
        [case[0] if isinstance(case, tuple) else case.name for case in known], options.only
    )
    command = [sys.executable, __file__, benchmark, "--seconds", "0"]
    command += [word for name in options.contenders for word in ("--contender", name)]
    shares = [names[first::processes] for first in range(min(processes, len(names)))]
    running = [
        subprocess.Popen(
            [*command, *(word for name in share for word in ("--only", name))],
            stdout=subprocess.DEVNULL,
        )
        for share in shares
    ]
    for process in running:
        process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="How fast flashvar runs, calls, builds and imports, next to its peers.",
        allow_abbrev=False,
    )
    parser.add_argument("benchmark", choices=_MODULES)
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
        help="attention, forms: who runs, e.g. flex; may be repeated",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.25,
        help="attention, forms: device time per contender and case (%(default)s); 0: call once",
    )
    parser.add_argument(
        "--prepare",
        type=int,
        default=0,
        metavar="N",
        help="attention, forms: first call every case once, in N processes that share the work",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
