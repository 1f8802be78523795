"""What was run and where, from the records in tests/gpu/results, and what is only compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import result_file
from tables import table

from flashvar import ops
from flashvar.binaries.kinds import Architecture, BinaryKind
from flashvar.machine.driver import BRANCHES
from flashvar_factory.config import schema, toml_table
from flashvar_factory.toolchain import driver

_ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = Path("tests", "gpu", "results")
_MEMORY: Final = re.compile(r" \d+GB.*")
_NAMED_BACKEND: Final = re.compile(r"\[(?:.*-)?(cuda|triton)\b")
# The backend that the calls of a file name, if its cases do not; and tests that name none.
_BACKEND_OF: Final = {
    "test_gated_delta_rule": "triton",
    "test_gated_delta_rule_compiled": "cuda",
    "test_gated_delta_rule_gradients": "cuda",
    "test_gated_delta_rule_update": "cuda",
}
_OF_AUTO: Final = ("test_decoding_in_a_graph", "test_compiled_training")
_INTERPRETED: Final = "in its interpreter, on the CPU, with every change"


class Passed(NamedTuple):
    """A case that passed, the op whose own test it is, and the backend whose kernels it ran."""

    case: str
    op: str | None
    backend: str | None


@dataclass(frozen=True)
class Record:
    """One run of tests/gpu on a device."""

    file: str
    device: str
    own: Architecture  # whose binaries are made for the device
    forced: str | None  # the kind of the binary that had to run
    cases: frozenset[Passed]
    passed: int
    failed: int
    skipped: int
    system: dict[str, Any]
    toolkits: tuple[str, ...]
    commits: tuple[str, ...]  # of the binaries' sources
    chosen: tuple[str, ...]  # the part of the tests that ran; empty: all

    @property
    def kind(self) -> BinaryKind:
        """Of the binary that ran: the one that was forced, or the one made for the device."""
        return BinaryKind.parse(self.forced) if self.forced else BinaryKind(self.own)

    @property
    def is_native(self) -> bool:
        """Whether that binary was made for the device, and not translated by its driver."""
        return self.kind.architecture.capability == self.own.capability

    def of(self, backend: str, op: str | None = None) -> set[str]:
        """The cases that ran a backend's kernels: of every test, or of an op's own."""
        return {one.case for one in self.cases if one.backend == backend and op in (None, one.op)}


def records(root: Path) -> list[Record]:
    """Every record of all tests, by name: one of a part says nothing of a binary alone."""
    return [one for one in _runs(root) if not one.chosen]


def _runs(root: Path) -> Iterator[Record]:
    """Every record, by name."""
    config = schema.read(_ROOT / schema.FILE_NAME)
    for path in sorted((root / RESULTS).glob("*.json")):
        found = result_file.read(path)
        if not {"system", "cases", "counts"} <= set(found):
            continue  # of another kind of run
        system, counts = found["system"], found["counts"]
        device = system["devices"][0]
        yield Record(
            path.name,
            _MEMORY.sub("", device["name"].removeprefix("NVIDIA ")),
            config.made_for(Architecture(*device["capability"])),
            found.get("forced_architecture"),
            frozenset(_passed_cases(found["cases"])),
            counts.get("passed", 0),
            counts.get("failed", 0),
            counts.get("skipped", 0),
            system,
            tuple({_toolkit(binary["toolkit"]) for binary in found["binaries"]}),
            tuple({binary["source"]["revision"][:7] for binary in found["binaries"]}),
            tuple(found.get("chosen") or ()),
        )


def _toolkit(toolkit: dict[str, Any]) -> str:
    """The compiler's version, and that of ptxas where it is another toolkit's."""
    ptxas = toolkit.get("ptxas")
    return f"{toolkit['version']}{f' with ptxas {ptxas}' if ptxas else ''}"


def _passed_cases(cases: list[dict[str, Any]]) -> Iterator[Passed]:
    """The backend is the one that the case names, or else its file."""
    for one in cases:
        file, _, test = one["case"].partition("::")
        file = Path(file).stem
        op = _op_of(file)
        named = _NAMED_BACKEND.search(test)
        of_file = None if test.partition("[")[0] in _OF_AUTO else _BACKEND_OF.get(file)
        if one["outcome"] == "passed":
            yield Passed(one["case"], op, named[1] if named else of_file)


def _op_of(file: str) -> str | None:
    """The op whose own tests a file has."""
    return next((op for op in ops.TABLE if file.startswith(f"test_{op}")), None)


def what_was_run(root: Path) -> str:
    """One row per architecture that has run, and one of all others."""
    config = schema.read(root / schema.FILE_NAME)
    every = records(root)
    rows, never = [], []
    for name in config.targets:
        runs = [one for one in every if name == one.kind.name and one.of("cuda")]
        own = [one for one in runs if one.is_native]
        other = [one for one in runs if one not in own]
        translated = "; ".join(
            f"its PTX, translated by the driver of an {one.device}: {one.passed:,} cases passed"
            for one in other
        )
        native = "; ".join(f"{one.device}: {one.passed:,} cases passed" for one in own)
        if runs:
            rows.append((f"`{name}`", native or "no", translated or "no"))
        else:
            never.append(f"`{name}`")
    rows.append(("Triton", _triton(root, every) or "no", _INTERPRETED))
    if never:
        rows.append((", ".join(never), "no", "no"))
    return table(("code", "ran on a GPU that it is for", "ran otherwise"), rows)


def ops_that_ran(root: Path) -> str:
    """One row per op: the cases of its own tests that passed on a GPU."""
    every = records(root)
    rows = [
        (
            f"`{op}`",
            *(_of_binaries(every, op, native=native) or "no record" for native in (True, False)),
            _of_triton(every, op) or "no record",
        )
        for op in ops.TABLE
    ]
    return table(("op", "native code", "as PTX on another GPU", "Triton"), rows)


def _of_binaries(every: list[Record], op: str, *, native: bool) -> str:
    """The cases of an op that ran a binary's kernels, by code and GPU."""
    return "; ".join(
        f"`{one.kind.name}` on {one.device}: {len(found):,} cases"
        for one in every
        if one.is_native == native and (found := one.of("cuda", op))
    )


def _of_triton(every: list[Record], op: str | None = None) -> str:
    """The cases that ran Triton's kernels, by GPU; one that is in several records counts once."""
    found: dict[str, set[str]] = {}
    for one in every:
        found.setdefault(one.device, set()).update(one.of("triton", op))
    return "; ".join(f"{device}: {len(cases):,} cases" for device, cases in found.items() if cases)


def in_words(root: Path) -> str:
    """What README.md says of code that was translated, and of Triton's kernels."""
    every = records(root)
    translated: dict[tuple[str, ...], list[str]] = {}
    for op in ops.TABLE:
        runs = (one for one in every if not one.is_native and one.of("cuda", op))
        names = tuple(f"`{one.kind.extra}`" for one in runs)
        translated.setdefault(names, []).append(f"`{op}`")
    ran = "; ".join(
        f"{'every op' if len(found) == len(ops.TABLE) else _listed(found)} "
        f"for {_listed(names) if names else 'no architecture'}"
        for names, found in translated.items()
    )
    triton = [f"`{op}`" for op in ops.TABLE if _of_triton(every, op)]
    others = [name for name in (f"`{op}`" for op in ops.TABLE) if name not in triton]
    without = f"; those for {_listed(others)} have no current record" if others else ""
    on_ptx = [one for one in every if not one.is_native and one.of("cuda")]
    on_triton = [one for one in every if one.of("triton")]
    return (
        f"PTX was tested on {_devices(on_ptx)}: {ran}. flashvar's Triton kernels for "
        f"{_listed(triton)} have run on {_devices(on_triton)}{without}."
    )


def native_in_words(root: Path) -> str:
    """What README.md says of native code: the devices on which every op ran."""
    ran = [
        one
        for one in records(root)
        if one.is_native and all(one.of("cuda", op) for op in ops.TABLE)
    ]
    return f"every op as native code on {_devices(ran)}" if ran else "no current record of every op"


def _devices(runs: Iterable[Record]) -> str:
    return _listed(dict.fromkeys(f"an {one.device}" for one in runs))


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _triton(root: Path, every: list[Record]) -> str:
    """Cases of Triton's kernels, and models whose text says that it agreed."""
    models = [
        f"a model (`{path.name}`)"
        for path in sorted((root / RESULTS).glob("*.txt"))
        if re.search(r"^triton .* ok$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    return "; ".join([*filter(None, [_of_triton(every)]), *models])


def versions(root: Path) -> str:
    """One row per record: device, software and counts; of a part of the tests also which."""
    rows = [
        (
            f"`{one.file}`{_of_part(one)}",
            one.device,
            f"driver {one.system['driver_display']}, torch {one.system['torch']}, "
            f"Triton {one.system['triton']}, Python {one.system['python']}, "
            f"nvcc {', '.join(one.toolkits)}",
            ", ".join(one.commits),
            f"{one.passed:,} / {one.failed} / {one.skipped}",
        )
        for one in _runs(root)
    ]
    heading = ("record", "GPU", "software", "commit", "passed / failed / skipped")
    return table(heading, rows)


def _of_part(one: Record) -> str:
    """The ops whose tests ran, then the files that are of no op."""
    if not one.chosen:
        return ""
    of = {Path(word).name: _op_of(Path(word).stem) for word in one.chosen}
    ran = dict.fromkeys(f"`{op}`" for op in of.values() if op)
    others = [f"`{name}`" for name, op in of.items() if not op]
    return f", only tests of {_listed([*ran, *others])}"


def skipped(root: Path) -> str:
    """Why cases did not run: a row per reason, with how many, and in how many records."""
    found = [result_file.read(path) for path in sorted((root / RESULTS).glob("*.json"))]
    runs = [one["not_run"] for one in found if "not_run" in one and not one.get("chosen")]
    reasons = dict.fromkeys(reason for by in runs for reason in by)
    rows = []
    for reason in reasons:
        counts = {by[reason] for by in runs if reason in by}
        many = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{min(counts)}"
        having = sum(reason in by for by in runs)
        rows.append((reason.removeprefix("Skipped: "), many, f"{having} of {len(runs)}"))
    return table(("why", "cases of a record", "records"), rows)


def software(root: Path) -> str:
    """What each change is run with: the pins of pyproject.toml, the versions of the workflow."""
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    groups = toml_table.document(pyproject, "pyproject.toml").table("dependency-groups")
    whole, *edges = (_pins(groups.values(name)) for name in ("runtime", "floor", "ceiling"))
    least = re.search(r'"torch>=([\d.]+)"', pyproject)
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    pythons = re.search(r"python: \[(.+)\]", workflow)
    runner = re.search(r"runs-on: (\S+)", workflow)
    if pythons is None or runner is None or least is None:
        raise ValueError("expected Pythons and a runner in ci.yml, a least torch: found none")
    rows = [
        ("Python", "3.10 and newer", pythons[1].replace('"', "")),
        ("torch", f"{least[1]} and newer", _window("torch", whole, edges)),
        ("Triton", "what that torch brings", _window("triton", whole, edges)),
        ("OS", "Linux with glibc 2.28 or newer", runner[1]),
        (
            "processor",
            f"x86-64; aarch64 for {_on_arm(root)}",
            "x86-64; aarch64 is cross-compiled and loaded in an emulator",
        ),
    ]
    return table(("software", "supported", "run with every change"), rows)


def _on_arm(root: Path) -> str:
    """The architectures that have wheels for aarch64."""
    targets = schema.read(root / schema.FILE_NAME).targets.values()
    kinds = [kind for one in targets if "aarch64" in one.platforms for kind in one.kinds]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(one.architecture.name for one in kinds))


def _pins(entries: tuple[object, ...]) -> dict[str, str]:
    return dict(str(entry).partition(";")[0].strip().split("==") for entry in entries)


def _window(name: str, whole: dict[str, str], edges: list[dict[str, str]]) -> str:
    """What every test is run with, and the limits of what is supported."""
    oldest, newest = (pins[name] for pins in edges)
    return f"{whole[name]}; tests of attention, also compiled, with {oldest} and {newest} too"


def drivers(root: Path) -> str:
    """Which driver a binary needs, by the toolkit that made it."""
    del root
    rows = []
    for version, branch in BRANCHES.items():
        least = driver.minimum(version, ("sass",))
        rows.append((".".join(map(str, version)), least.display, branch))
    heading = ("built with CUDA", "oldest driver for the wheel", "oldest driver for its PTX")
    return table(heading, rows)
