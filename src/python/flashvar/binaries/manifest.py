"""`manifest.json`, the description of a binary: its types, a strict reader, and a writer.

Schema 2. A manifest is in the folder of the library that it describes. It holds everything that
selection needs, so selection opens no library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from flashvar.binaries.kinds import Architecture, BinaryKind, Kernel, joined
from flashvar.binaries.strict_json import Table, wrong
from flashvar.errors import ManifestError
from flashvar.machine import bounded_read

FILE_NAME: Final = "manifest.json"
SCHEMA: Final = 2
# The version of the C ABI (src/cuda/abi/flashvar.h) that this flashvar calls.
ABI: Final = 2

# On which GPUs tests of the architecture's kernels have run: on one that it is for, on another one
# whose driver translated their PTX, on none.
RAN: Final = ("own", "ptx", "never")

# A manifest of all kernels that can be built has a few hundred kilobytes.
_LARGEST: Final = 16 << 20
_AXES: Final = 16  # of a function; ours have two
_LIBRARY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*\.so")
# The fixed keys of a kernel's row; every other key is an axis.
FIXED_KERNEL_KEYS: Final = frozenset(
    {
        "op",
        "name",
        "family",
        "tile",
        "threads",
        "shared_memory",
        "registers",
        "spill_bytes",
        "stack_bytes",
        "functions",
        "launches",
    }
)


@dataclass(frozen=True)
class SourceRevision:
    """The source that the binary was compiled from."""

    revision: str | None  # git commit; None outside a checkout
    dirty: bool | None  # uncommitted changes; None outside a checkout
    hash: str  # sha256 of the CUDA sources and the plan, hex


@dataclass(frozen=True)
class Toolkit:
    """The toolkit that compiled the binary."""

    compiler: str
    version: str
    ptxas: str | None = None  # the version that made the machine code, if not the compiler's own

    @property
    def machine_code(self) -> str:
        """The version of the toolkit that made the machine code, and whose runtime is inside."""
        return self.ptxas or self.version


@dataclass(frozen=True)
class MinimumDriver:
    """The oldest driver that runs the binary."""

    cuda: tuple[int, int]  # the CUDA version the driver must report
    display: str  # the driver branch that first reports it, e.g. "580"


@dataclass(frozen=True)
class LibraryFile:
    """The shared library beside the manifest."""

    file: str  # a bare file name
    bytes: int
    sha256: str  # hex


@dataclass(frozen=True)
class Launch:
    """One device function that a row of a kernel table launches, or a variant of it."""

    # Name of the device function; after a comma its variant, or a further condition of the calls
    # that launch it.
    kernel: str
    family: str  # instruction family: "wgmma" or "mma.sync"
    when: str  # the calls that launch the row's kernels of this family
    tile: tuple[int, ...]
    threads: int  # per block
    shared_memory: int  # dynamic, bytes per block


@dataclass(frozen=True)
class Rule:
    """Which of the calls of a row launch kernels of an instruction family."""

    family: str
    when: str


@dataclass(frozen=True)
class KernelRow:
    """One row of the binary's kernel table, with the launch facts of its main kernel."""

    function: str  # the key "op" of the file
    axes: tuple[tuple[str, str | int], ...]  # e.g. (("dtype", "bf16"), ("row_dim", 64))
    name: str
    family: str
    tile: tuple[int, ...]
    threads: int  # per block
    shared_memory: int  # dynamic, bytes per block
    registers: int  # per thread
    spill_bytes: int  # per thread
    stack_bytes: int  # per thread
    functions: tuple[str, ...] = ()  # mangled names of the device functions that it launches
    launches: tuple[Launch, ...] = ()  # the main kernel first

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The instruction families of its kernels, that of a plain call first."""
        return tuple(dict.fromkeys(Rule(one.family, one.when) for one in self.launches))

    @cached_property
    def dtype(self) -> str | None:
        """The value of the axis dtype; None when the function has none."""
        value = dict(self.axes).get("dtype")
        return value if isinstance(value, str) else None

    @property
    def values(self) -> dict[str, str | int | tuple[int, int]]:
        """The value of each axis except the dtype; the integers of a pair are one tuple."""
        return {axis: value for axis, value in joined(self.axes).items() if axis != "dtype"}


@dataclass(frozen=True)
class Manifest:
    """A whole `manifest.json`."""

    abi: int
    project: str
    version: str  # of the project; a local label marks a build of a subset
    distribution: str
    source: SourceRevision
    architecture: Architecture
    code_kinds: tuple[str, ...]  # ("sass",) or ("sass", "ptx")
    toolkit: Toolkit
    minimum_driver: MinimumDriver
    platform: str
    library: LibraryFile
    kernels: tuple[KernelRow, ...]
    ran: str | None = None  # one of RAN; None: the manifest does not say
    torch: str | None = None  # the oldest torch whose stable ABI the library calls; None: none

    @property
    def kind(self) -> BinaryKind:
        """The architecture, and the CUDA major that it was made for if not the compiler's."""
        if self.toolkit.ptxas is None:
            return BinaryKind(self.architecture)
        return BinaryKind(self.architecture, self.minimum_driver.cuda[0])

    def to_json(self) -> str:
        """The text that `parse` reads back to an equal manifest."""
        document = {
            "schema": SCHEMA,
            "abi": self.abi,
            "project": self.project,
            "version": self.version,
            "distribution": self.distribution,
            "source": vars(self.source),
            "architecture": self.architecture.name,
            "code": self.architecture.code,
            "code_kinds": self.code_kinds,
            "toolkit": {key: value for key, value in vars(self.toolkit).items() if value},
            "minimum_driver": vars(self.minimum_driver),
            "platform": self.platform,
            "library": vars(self.library),
            **({} if self.ran is None else {"ran": self.ran}),
            **({} if self.torch is None else {"torch": self.torch}),
            "kernels": [_kernel_to_json(row) for row in self.kernels],
        }
        return json.dumps(document, indent=1) + "\n"


def read(path: Path) -> Manifest:
    """Parse the manifest at `path`; a ManifestError names the file."""
    try:
        return parse(bounded_read.text(path, _LARGEST))
    except FileNotFoundError:
        raise ManifestError(f"{path}: expected a manifest, found no file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: expected a readable manifest, found: {error}") from error
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def parse(text: str) -> Manifest:
    """Check every key and return the manifest; a ManifestError names key, expected and found."""
    try:
        document: object = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"expected JSON, found something else: {error}") from error
    top = Table(document, "")
    schema = top.integer("schema")
    if schema != SCHEMA:
        raise ManifestError(f"schema: expected {SCHEMA}, found {schema}")
    manifest = Manifest(
        abi=top.integer("abi"),
        project=top.text("project"),
        version=top.text("version"),
        distribution=top.text("distribution"),
        source=_source(top.table("source")),
        architecture=_architecture(top),
        code_kinds=_code_kinds(top),
        toolkit=_toolkit(top.table("toolkit")),
        minimum_driver=_minimum_driver(top.table("minimum_driver")),
        platform=top.text("platform"),
        library=_library(top.table("library")),
        ran=_ran(top),
        torch=top.text("torch") if "torch" in top.rest else None,
        kernels=tuple(_kernel(row) for row in top.tables("kernels")),
    )
    top.end()
    names: set[str] = set()
    for row in manifest.kernels:
        if row.name in names:
            twice = f"found {row.name} more than once"
            raise ManifestError(f"kernels: expected each kernel once, {twice}")
        names.add(row.name)
    return manifest


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; duplicate keys are an error."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ManifestError(
                f"expected each key once in an object, found {name!r} more than once"
            )
        found[name] = value
    return found


def _source(table: Table) -> SourceRevision:
    revision, dirty = table.take("revision"), table.take("dirty")
    if revision is not None and not isinstance(revision, str):
        raise wrong(table.path("revision"), "a commit or null", revision)
    if dirty is not None and not isinstance(dirty, bool):
        raise wrong(table.path("dirty"), "true, false or null", dirty)
    source = SourceRevision(revision, dirty, table.sha256("hash"))
    table.end()
    return source


def _architecture(top: Table) -> Architecture:
    name, code = top.text("architecture"), top.text("code")
    try:
        architecture = Architecture.parse(code)
    except ValueError as error:
        raise ManifestError(f"code: {error}") from None
    if (architecture.name, architecture.code) != (name, code):
        raise wrong("architecture", f"{architecture.name!r} for code {code!r}", name)
    return architecture


def _code_kinds(top: Table) -> tuple[str, ...]:
    kinds = top.take("code_kinds")
    if kinds not in (["sass"], ["sass", "ptx"]):
        raise wrong("code_kinds", '["sass"] or ["sass", "ptx"]', kinds)
    return ("sass", "ptx") if kinds == ["sass", "ptx"] else ("sass",)


def _ran(top: Table) -> str | None:
    if "ran" not in top.rest:
        return None
    ran = top.text("ran")
    if ran not in RAN:
        raise wrong("ran", f"one of {', '.join(RAN)}", ran)
    return ran


def _toolkit(table: Table) -> Toolkit:
    toolkit = Toolkit(
        table.text("compiler"),
        table.text("version"),
        table.text("ptxas") if "ptxas" in table.rest else None,
    )
    table.end()
    return toolkit


def _minimum_driver(table: Table) -> MinimumDriver:
    version = table.integers("cuda")
    if len(version) != 2:
        raise wrong(table.path("cuda"), "[major, minor]", list(version))
    driver = MinimumDriver((version[0], version[1]), table.text("display"))
    table.end()
    return driver


def _library(table: Table) -> LibraryFile:
    file = table.text("file")
    if not _LIBRARY.fullmatch(file):
        raise wrong(table.path("file"), "the bare name of a .so file", file)
    library = LibraryFile(file, table.integer("bytes"), table.sha256("sha256"))
    table.end()
    return library


def _kernel(table: Table) -> KernelRow:
    axes: list[tuple[str, str | int]] = []
    for key in [key for key in table.rest if key not in FIXED_KERNEL_KEYS]:
        value = table.take(key)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise wrong(table.path(key), "an axis value, a string or an integer", value)
        axes.append((key, value))
    if len(axes) > _AXES:
        raise wrong(table.where, f"at most {_AXES} axes", len(axes))
    kernel = Kernel(table.text("op"), tuple(axes))
    name = table.text("name")
    if name != kernel.name:
        raise wrong(table.path("name"), f"{kernel.name!r}, after the function and its axes", name)
    return KernelRow(
        function=kernel.function,
        axes=kernel.axes,
        name=name,
        family=table.text("family"),
        tile=table.integers("tile"),
        threads=table.integer("threads"),
        shared_memory=table.integer("shared_memory"),
        registers=table.integer("registers"),
        spill_bytes=table.integer("spill_bytes"),
        stack_bytes=table.integer("stack_bytes"),
        functions=table.texts("functions") if "functions" in table.rest else (),
        launches=(
            tuple(_launch(one) for one in table.tables("launches"))
            if "launches" in table.rest
            else ()
        ),
    )


def _launch(table: Table) -> Launch:
    launch = Launch(
        kernel=table.text("kernel"),
        family=table.text("family"),
        when=table.text("when"),
        tile=table.integers("tile"),
        threads=table.integer("threads"),
        shared_memory=table.integer("shared_memory"),
    )
    table.end()
    return launch


def _kernel_to_json(row: KernelRow) -> dict[str, object]:
    special = ("function", "axes", "launches")
    fixed = {key: value for key, value in vars(row).items() if key not in special}
    if row.launches:
        fixed["launches"] = [vars(one) for one in row.launches]
    return {"op": row.function, **dict(row.axes), **fixed}
