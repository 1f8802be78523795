"""Writes manifest.json: the plan, joined with what the linked library and ptxas report.

CMake calls it after the link. The manifest is written last and at once, so that a directory with a
manifest holds the library that it describes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashvar.binaries import manifest as manifests
from flashvar.binaries.kinds import Architecture, Kernel
from flashvar_factory.build import ptxas_report
from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import kernel_facts


def write(*, plan_json: Path, library: Path, objects_dir: Path, output: Path) -> None:
    """Write `output`; BuildError when plan, library and reports contradict each other."""
    plan = json.loads(plan_json.read_text(encoding="utf-8"))
    kernels = [Kernel(row["op"], tuple(row["axes"].items())) for row in plan["kernels"]]
    facts = kernel_facts.read(library, f".{plan['project']}.kernels")
    expected = {kernel.name for kernel in kernels}
    if set(facts) != expected:
        raise BuildError(
            f"{library}: expected the kernels of the plan, found {sorted(set(facts) - expected)} "
            f"beside them and {sorted(expected - set(facts))} missing; delete the build directory"
        )
    content = library.read_bytes()
    document = manifests.Manifest(
        abi=plan["abi"],
        project=plan["project"],
        version=plan["version"],
        distribution=plan["distribution"],
        source=manifests.SourceRevision(**plan["source"]),
        architecture=Architecture.parse(plan["code"]),
        code_kinds=tuple(plan["code_kinds"]),
        toolkit=manifests.Toolkit(**plan["toolkit"]),
        minimum_driver=_minimum_driver(plan["minimum_driver"]),
        platform=plan["platform"],
        ran=plan["ran"],
        torch=plan["torch"],
        library=manifests.LibraryFile(
            library.name, len(content), hashlib.sha256(content).hexdigest()
        ),
        kernels=tuple(
            _row(kernel, plan["family"], facts[kernel.name], _usage(objects_dir, kernel))
            for kernel in kernels
        ),
    )
    text = document.to_json()
    manifests.parse(text)  # the reader's own rules, before anyone trusts the file
    partial = output.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(output)


def _usage(objects_dir: Path, kernel: Kernel) -> ptxas_report.Usage:
    """The report of ptxas on the kernel's object; an earlier compilation may have left it."""
    reports = sorted(objects_dir.rglob(f"{kernel.name}.cu.o{ptxas_report.SUFFIX}"))
    usages = [ptxas_report.parse(report.read_text(encoding="utf-8")) for report in reports]
    if len(usages) != 1 or usages[0] is None:
        found = ", ".join(str(report.relative_to(objects_dir)) for report in reports)
        raise BuildError(
            f"expected one report of ptxas on {kernel.name} under {objects_dir}, found "
            f"{'no kernel in ' if len(reports) == 1 else ''}{found or 'none'}; delete the build "
            "directory"
        )
    return usages[0]


def _minimum_driver(row: Mapping[str, Any]) -> manifests.MinimumDriver:
    major, minor = row["cuda"]
    return manifests.MinimumDriver((major, minor), row["display"])


def _row(
    kernel: Kernel,
    family: str,
    launches: tuple[manifests.Launch, ...],
    usage: ptxas_report.Usage,
) -> manifests.KernelRow:
    main = launches[0]
    return manifests.KernelRow(
        function=kernel.function,
        axes=kernel.axes,
        name=kernel.name,
        family=family,
        tile=main.tile,
        threads=main.threads,
        shared_memory=main.shared_memory,
        launches=launches if main.family else (),
        **usage._asdict(),
    )
