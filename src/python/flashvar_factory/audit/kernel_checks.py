"""Checks a manifest's kernels against the library: its kernel facts and its device code.

A manifest repeats what others know: the kernel facts in the library (threads, shared memory,
tiles), the cubins (registers, stack, the largest block) and the mangled names of device functions,
which hold the template arguments that a kernel was compiled for. Each figure is compared with its
origin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from flashvar.binaries.kinds import SECOND, Kernel
from flashvar.binaries.manifest import KernelRow, Manifest
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding, some
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.config.axes import SpillBudget
from flashvar_factory.inspect.cubin import Function
from flashvar_factory.inspect.fatbin import SASS

# The target of a kernel's template, mangled, with its capability and its limit of shared memory.
_TARGET = re.compile(r"6TargetILi(?P<number>\d+)ELi(?P<shared_memory>\d+)EE")
# The arguments behind it: an integer, or a value of an enumeration that is called like the axis.
_ARGUMENT = re.compile(r"E?(?:Li(?P<integer>\d+)E|N(?P<nested>[0-9A-Za-z_]*?)E)")

_SLOT = 8  # bytes: what a stack grows by
# Of every architecture: registers of a thread and of a block, threads of a block and of a warp, and
# the registers that a thread gets at a time.
_REGISTERS, _FILE, _THREADS, _WARP, _UNIT = 255, 1 << 16, 1024, 32, 8
_NAME_BYTES = 31  # of a device function in kernel facts; a project may cut longer names


def kernels(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The manifest lists exactly the kernels in the library's kernel table and machine code."""
    for library, manifest in pairs(wheel):
        faults = [
            *_on_host(library, manifest),
            *_on_device(library, manifest),
            *_figures(library, manifest, expected),
            *_names(manifest, expected),
            *_launched(manifest),
        ]
        for message in faults:
            yield Finding("kernels", library.path, message)


def _on_host(library: Library, manifest: Manifest) -> Iterator[str]:
    own = f".{manifest.project}.kernels"
    sections = [one.name for one in library.file.sections if one.name.endswith(".kernels")]
    if sections not in ([], [own]):
        yield f"expected kernel facts in {own} alone, found {some(sections)}"
    named, held = {row.name for row in manifest.kernels}, set(library.launches)
    if named - held:
        missing = some(sorted(named - held))
        yield f"expected {missing} in the library, as the manifest says, found no such kernels"
    if held - named:
        yield f"expected {some(sorted(held - named))} in the manifest, found no such kernels"
    for row in manifest.kernels:
        launches = library.launches.get(row.name)
        if launches is None:
            continue
        if len(set(launches)) < len(launches):
            yield f"expected each launch of {row.name} once in the kernel facts, found one twice"
        main = launches[0]
        yield from _differences(
            row.name,
            "as the kernel facts say",
            tile=(main.tile, row.tile),
            threads=(main.threads, row.threads),
            shared_memory=(main.shared_memory, row.shared_memory),
            launches=(launches if main.family else (), row.launches),
        )


def _differences(name: str, origin: str, **pairs: tuple[object, object]) -> Iterator[str]:
    for what, (wanted, found) in pairs.items():
        if wanted != found:
            label = what.replace("_", " ")
            yield f"expected {label} of {name} to be {wanted} {origin}, found {found}"


def _on_device(library: Library, manifest: Manifest) -> Iterator[str]:
    held = Counter(function.name for image in library.images for function in image.functions or ())
    claims = Counter(name for row in manifest.kernels for name in row.functions)
    closed = sum(image.kind == SASS and image.functions is None for image in library.images)
    if closed:
        yield (
            "expected device code that is not compressed, or by zstd, found "
            f"{closed} images compressed otherwise; compile with --compress-mode=size"
        )
    for row in manifest.kernels:
        missing = [name for name in row.functions if name not in held]
        if missing:
            yield f"expected the device functions of {row.name}, found no {some(missing)}"
        if not row.functions:
            yield f"expected the device functions of {row.name} in the manifest, found none"
    # What several kernels launch is compiled with each of them.
    shared = sorted(name for name, count in claims.items() if 0 < held[name] != count)
    if shared:
        yield (
            f"expected {some(shared)} in one image for each kernel that launches it, found "
            f"{claims[shared[0]]} such kernels in the manifest and {held[shared[0]]} images"
        )
    strange = sorted(set(held) - set(claims))
    if strange:
        yield f"expected device functions of the manifest's kernels alone, found {some(strange)}"


def _figures(library: Library, manifest: Manifest, expected: Expectations) -> Iterator[str]:
    """Registers, stack and threads, of the image that has exactly the functions of a kernel."""
    by_names = {
        frozenset(function.name for function in image.functions): image
        for image in library.images
        if image.functions
    }
    target = (
        expected.config.targets.get(manifest.kind.name) if expected.config is not None else None
    )
    ops = expected.config.ops if expected.config is not None else {}
    held = {name for names in by_names for name in names}
    for row in manifest.kernels:
        image = by_names.get(frozenset(row.functions))
        if image is None and held.issuperset(row.functions):
            yield f"expected an image with the functions of {row.name} alone, found other images"
        if image is not None:
            yield from _of_image(row, image.functions or (), image.stack)
        limit = target.shared_memory if target else None
        used = _shared_memory(row, () if image is None else image.functions or ())
        if limit is not None and used > limit:
            yield f"expected at most {limit} bytes of shared memory for {row.name}, found {used}"
        released = "+" not in manifest.version and not expected.spills
        budget = ops[row.function].budget if row.function in ops else SpillBudget()
        kernel = Kernel(row.function, row.axes)
        if released and row.spill_bytes > budget.of(kernel):
            yield (
                f"expected at most {budget.of(kernel)} bytes of spilled registers in a release, "
                f"found {row.spill_bytes} of {row.name}; choose smaller tiles, or raise "
                f"{budget.key(kernel)} of [ops.{row.function}] in variants.toml"
            )
        if released and row.stack_bytes >= row.spill_bytes + _SLOT:
            yield (
                f"expected {row.name} to have a stack for the {row.spill_bytes} bytes that it "
                f"spills, found {row.stack_bytes} bytes: it spills more than the manifest says, or "
                "has arrays in local memory, which no release has"
            )
        if row.spill_bytes and not row.stack_bytes:
            yield f"expected {row.name}, which spills registers, to have a stack, found none"


def _of_image(row: KernelRow, functions: Sequence[Function], stack: int | None) -> Iterator[str]:
    registers = [one.registers for one in functions if one.registers is not None]
    origin = "as its device code states"
    if len(registers) < len(functions) or stack is None:
        yield f"expected device code that states the registers and stack of {row.name}, found none"
    if registers:
        yield from _differences(row.name, origin, registers=(max(registers), row.registers))
    if stack is not None:
        yield from _differences(row.name, origin, stack_bytes=(stack, row.stack_bytes))
    for each, size in ((one.registers or 0, one.threads or 0) for one in functions):
        block = -(-each // _UNIT) * _UNIT * -(-size // _WARP) * _WARP
        if each > _REGISTERS or size > _THREADS or block > _FILE:
            yield (
                f"expected {_FILE:,} registers in a block of {row.name} at most, {_REGISTERS} in a "
                f"thread and {_THREADS:,} threads, found {each} in each of {size}"
            )
    blocks = [one.threads for one in functions if one.threads is not None]
    threads = [row.threads, *(one.threads for one in row.launches)]
    if blocks and min(blocks) < min(threads):
        yield (
            f"expected at least {min(threads)} threads in a block of each function of {row.name}, "
            f"as it is launched with, found {min(blocks)} in its device code"
        )
    if len(blocks) == len(functions) and blocks and max(threads) > max(blocks):
        yield (
            f"expected at most {max(blocks)} threads in a block of {row.name} as its device code "
            f"states, found {max(threads)}"
        )


def _shared_memory(row: KernelRow, functions: Sequence[Function]) -> int:
    """The most bytes that a launch takes: what it asks for, and what its function has anyway."""
    used = [row.shared_memory]
    for one in row.launches:
        mark = _mark(one.kernel)
        own = [each.shared_memory for each in functions if mark in each.name]
        used.append(one.shared_memory + min(own, default=0))
    return max(used)


def _mark(kernel: str) -> str:
    """What is in the mangled name of a function that a launch names."""
    name = kernel.partition(",")[0]
    return name if len(name) >= _NAME_BYTES else f"{len(name)}{name}"


def _launched(manifest: Manifest) -> Iterator[str]:
    """Functions are called as the launches say, and each of these has one."""
    for row in manifest.kernels:
        marks = {_mark(one.kernel): one.kernel.partition(",")[0] for one in row.launches}
        used = [{mark for mark in marks if mark in function} for function in row.functions]
        strange = [name for name, found in zip(row.functions, used, strict=True) if not found]
        if marks and strange:
            yield (
                f"expected a function of {row.name} to be "
                f"{' or '.join(sorted(marks.values()))}, as it launches, found {some(strange)}"
            )
        for mark in sorted(marks.keys() - set().union(*used)):
            yield f"expected a function {marks[mark]} of {row.name}, which it launches, found none"


def _names(manifest: Manifest, expected: Expectations) -> Iterator[str]:
    """The template arguments in the names of a kernel's functions are its axes."""
    config = expected.config
    pairs_of = {(row.function, axis) for row in manifest.kernels for axis, _ in row.axes}
    number = 10 * manifest.architecture.major + manifest.architecture.minor
    target = config.targets.get(manifest.kind.name) if config else None
    for row in manifest.kernels:
        axes = dict(row.axes)
        for axis in list(axes):
            twin = axis + SECOND
            has_pairs = (row.function, twin) in pairs_of or (
                config is not None
                and row.function in config.ops
                and any(one.name == axis and one.pairs for one in config.ops[row.function].axes)
            )
            if has_pairs and twin not in axes:
                axes = _with(axes, axis, twin)
        for name in row.functions:
            yield from _of_name(name, row, axes, number, target.shared_memory if target else None)


def _with(axes: Mapping[str, str | int], axis: str, twin: str) -> dict[str, str | int]:
    """The axes with the second integer of a pair right behind the first: it is the same."""
    found: dict[str, str | int] = {}
    for name, value in axes.items():
        found[name] = value
        if name == axis:
            found[twin] = value
    return found


def _of_name(
    name: str, row: KernelRow, axes: Mapping[str, str | int], number: int, limit: int | None
) -> Iterator[str]:
    values = [
        found
        for axis, value in axes.items()
        if isinstance(value, str)
        for found in _enumerators(name, axis)
        if found != value
    ]
    if values:
        yield f"expected a function of {row.name} for {dict(axes)}, found {values[0]} in {name}"
    match = _TARGET.search(name)
    if match is None:
        return
    found = int(match["number"]), int(match["shared_memory"])
    if found[0] != number or limit not in (None, found[1]):
        yield (
            f"expected a function of {row.name} for capability {number} and {limit} bytes of "
            f"shared memory, found {found[0]} and {found[1]} in {name}"
        )
    position = match.end()
    for axis, value in axes.items():
        argument = _ARGUMENT.match(name, position)
        if argument is None:
            return
        position = argument.end()
        if isinstance(value, int) and argument["integer"] not in (None, str(value)):
            yield (
                f"expected {axis} {value} in the name of a function of {row.name}, found "
                f"{argument['integer']}: {name}"
            )
            return


def _enumerators(name: str, axis: str) -> Iterator[str]:
    """The value of each `axis::value` in a mangled name, spelled `4axis5valueE`.

    A project that is called like an axis has other names in its namespace, and no E behind them.
    """
    for match in re.finditer(rf"{len(axis)}{re.escape(axis)}(\d{{1,3}})", name):
        end = match.end() + int(match[1])
        if name[end : end + 1] == "E":
            yield name[match.end() : end]
