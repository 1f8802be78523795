"""Run the GPU tests in several processes, on one device or equal ones, and merge their records.

    python tests/gpu/shards.py -j 14 --results results.json -- -k "not sizes"
    python tests/gpu/shards.py -j 56 --devices 4 --results results.json
    python tests/gpu/shards.py -j 14 --results part.json -- tests/gpu/test_causal_conv1d.py

Most of the time goes into Triton's compiler, which the processes share out (shares.py); the tests
marked `large`, which fill the device's memory, run after the others. Arguments after `--` go to
pytest; files of tests/gpu among them limit the run to these files. Ends with 1 where a test failed.

    python tests/gpu/shards.py -j 14 --results results.json --again

After a failure was fixed in Python: run the files in which a case failed once more, on the same
binaries and inputs. The record keeps the other files' cases and lists what had failed.

    python tests/gpu/shards.py -j 14 --results results.json --rest

After an interruption, which leaves results.partial.json: run the cases that it lacks, on the same
binaries and inputs, with the same arguments for pytest.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import complete, failed_files, failures, merge, replace_failed

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import result_file

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
# Exit codes of pytest: some test failed, it was interrupted, and nothing was selected.
_FAILED, _INTERRUPTED, _NO_TESTS = 1, 2, 5
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_TIME_TO_WRITE = 10  # seconds


def main() -> int:
    """Start the shards, wait for all, report and merge."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("-j", "--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="use the first N devices, which processes are assigned to in rotation",
        metavar="N",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="the record of all, as JSON")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    more = parser.add_mutually_exclusive_group()
    more.add_argument("--again", action="store_true", help="run the failed files of the record")
    more.add_argument("--rest", action="store_true", help="run what an interrupted run has not")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    options = parser.parse_args()
    paths, before = _begun(options, parser)
    devices = _devices(options.devices)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        count = options.processes + 1
        given = [f"--seed={options.seed}", *options.pytest]
        if options.rest:
            given.append(f"--without={_partial(options.results)}")

        def start(part: int) -> subprocess.Popen[str]:
            words = [*paths, f"--shard={part}/{count}", *given]
            return _start(Path(folder, str(part)), words, devices[part % len(devices)])

        running: dict[int, subprocess.Popen[str]] = {}
        codes: list[int] = []
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        try:
            running |= {part: start(part) for part in range(1, count)}
            codes = [process.wait() for process in running.values()]
            running[count] = start(count)  # the tests marked large, alone on the device
            codes.append(running[count].wait())
        except KeyboardInterrupt:
            for process in running.values():
                process.terminate()
            for part, process in running.items():
                if not _ended(process):
                    print(f"process {part} had not ended:", *_log(folder, part)[-1:])
            codes = [_INTERRUPTED]
        for part, code in enumerate(codes, start=1):
            if code not in (0, _FAILED, _NO_TESTS, _INTERRUPTED):
                print(f"--- process {part}: exit code {code}", *_log(folder, part)[-40:], sep="\n")
        interrupted = _INTERRUPTED in codes
        parts = sorted(Path(folder).glob("*.json"))
        try:
            merged = merge(parts) if parts else {"cases": [], "counts": {}}
            if parts and options.results:
                _write(options, before, merged, interrupted)
        except ValueError as error:
            apart = Path(tempfile.mkdtemp(prefix="shards-"))
            shutil.copytree(folder, apart, dirs_exist_ok=True)
            print(f"{error}; no record was changed, these are in {apart}: run all tests again")
            return 1
    print(failures(merged["cases"]))
    print(f"--seed {options.seed}: {merged['counts']} in {time.monotonic() - began:.0f} s")
    return 0 if all(code in (0, _NO_TESTS) for code in codes) else 1


def _begun(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[list[str], dict[str, Any] | None]:
    """What to run, and the record that it belongs to, whose seed it has; None: one of its own."""
    if not (options.again or options.rest):
        return [str(_HERE)], None
    word = "--again" if options.again else "--rest"
    if options.results is None:
        parser.error(f"{word} expects a record: name it by --results")
    file = options.results if options.again else _partial(options.results)
    if not file.is_file():
        parser.error(f"{word}: expected the record {file}, found none: run all tests")
    before = result_file.read(file)
    options.seed = before["seed"]
    if options.rest:
        return [str(_HERE)], before
    paths = [str(_ROOT / one) for one in failed_files(before["cases"])]
    if not paths:
        parser.error(f"--again: no case of {file} failed")
    return paths, before


def _partial(results: Path) -> Path:
    """Where an interrupted run writes what it has: no record, but what --rest goes on from."""
    return results.with_suffix(".partial.json")


def _write(
    options: argparse.Namespace,
    before: dict[str, Any] | None,
    merged: dict[str, Any],
    interrupted: bool,
) -> None:
    """Write a record, or the part of one; a run of failed files that was interrupted is neither.

    Raises:
        ValueError: what ran is of other binaries, another system or other tests than `before`.
    """
    if options.again and interrupted:
        print(f"{options.results} stays as it is; --again runs its failed files from the start")
        return
    if before:
        merged.update((replace_failed if options.again else complete)(before, merged))
    if interrupted:
        print(f"what has run is in {_partial(options.results)}; --rest runs the others")
        result_file.write(_partial(options.results), merged)
    else:
        result_file.write(options.results, merged)
        _partial(options.results).unlink(missing_ok=True)


def _ended(process: subprocess.Popen[str]) -> bool:
    """Whether a process that was terminated ends; it has some seconds to write its record."""
    try:
        return process.wait(_TIME_TO_WRITE) >= 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _log(folder: str, part: int) -> list[str]:
    return Path(folder, f"{part}.log").read_text(encoding="utf-8").splitlines()


def _devices(count: int) -> list[dict[str, str]]:
    """Of each device, the environment of its processes: they see all of them, their own first."""
    if count == 1:
        return [{}]
    from flashvar.machine.system import gather

    found = gather().devices[: max(count, 0)]
    if len(found) != count or len({(device.name, device.memory) for device in found}) != 1:
        names = [device.name for device in found]
        raise SystemExit(f"--devices: expected {count} equal devices, found {names}")
    visible = os.environ.get(_VISIBLE)
    names = visible.split(",")[:count] if visible else [str(index) for index in range(count)]
    return [{_VISIBLE: ",".join(names[index:] + names[:index])} for index in range(count)]


def _start(stem: Path, words: list[str], device: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    with stem.with_suffix(".log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            [*command, f"--results={stem.with_suffix('.json')}", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            # One compiler thread each: the processes are the parallelism.
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", **device},
        )


if __name__ == "__main__":
    sys.exit(main())
