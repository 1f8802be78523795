"""Checks that a wheel, of whatever project, runs where its tag promises."""

from __future__ import annotations

from collections.abc import Iterator

from flashvar_factory.audit import platform_tag
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding, some
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.audit.platform_tag import Policy, Version
from flashvar_factory.config import torch_coupling


def platform(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The tag names the processor of the libraries, and a glibc that auditwheel confirms."""
    del expected
    if not wheel.libraries:
        return
    found = ".".join(wheel.platforms)
    for library in wheel.libraries:
        machine = library.dynamic.machine
        if not all(tag.endswith(f"_{machine}") for tag in wheel.platforms):
            yield Finding(
                "platform",
                library.path,
                f"expected a platform tag for {machine}, found {found}; rename it",
            )
    promised = [platform_tag.glibc_of_tag(tag) for tag in wheel.platforms]
    floors = [version for version in promised if version is not None]
    if len(floors) < len(promised):
        strange = ".".join(
            tag for tag, version in zip(wheel.platforms, promised, strict=True) if version is None
        )
        yield Finding(
            "platform",
            wheel.path.name,
            f"expected a manylinux tag, found {strange}, which PyPI or auditwheel does not accept; "
            "link against the stubs of glibc 2.28 (cmake/manylinux.cmake)",
        )
        return
    calls_torch = any(manifest.torch is not None for _, manifest in pairs(wheel))
    brought = torch_coupling.LIBRARIES if calls_torch else frozenset[str]()
    yield from _compared(wheel, min(floors), platform_tag.ask(wheel.path, wheel.name, brought))


def _compared(wheel: Wheel, floor: Version, answer: Policy | str) -> Iterator[Finding]:
    tag = ".".join(wheel.platforms)
    if isinstance(answer, str):
        yield Finding(
            "platform",
            wheel.path.name,
            f"expected auditwheel to name a platform tag, found: {answer}",
        )
        return
    found = platform_tag.glibc_of_tag(answer.tag)
    if found is not None and found <= floor:
        return
    young = [symbol for library in wheel.libraries for symbol in _younger(library, floor)]
    reasons = young or [f"needs {name}" for name in answer.outside] or ["see auditwheel show"]
    yield Finding(
        "platform",
        wheel.path.name,
        f"expected {tag}, as its name says, found {answer.tag} by auditwheel: "
        f"{some(reasons)}; "
        "link against the stubs of glibc 2.28 (cmake/manylinux.cmake)",
    )


def _younger(library: Library, floor: Version) -> Iterator[str]:
    """The symbols that a glibc of the promised age does not have."""
    for symbol in library.dynamic.undefined:
        version = platform_tag.glibc_of_symbol(symbol.version)
        if version is not None and version > floor:
            yield f"{symbol.name} of {symbol.version}"
