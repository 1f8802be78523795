"""Checks that a library exports the ABI alone and needs nothing but the system."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flashvar_factory.audit import glibc_symbols, platform_tag
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.audit.finding import Finding, some
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.config import torch_coupling
from flashvar_factory.inspect.dynamic import Undefined

# What every project's libraries show beside their ops.
_COMMON: Final = ("abi_version", "build_info")
# What they may show: words on the last failure, and of each op how much memory it wants, and why it
# takes which kernels.
_LAST_ERROR: Final = "last_error"
_BESIDE: Final = ("workspace", "explain")
_SYSTEM: Final = frozenset(
    {
        "libc.so.6",
        "libdl.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libpthread.so.0",
        "librt.so.1",
    }
)
_LOADERS: Final = {"aarch64": "ld-linux-aarch64.so.1", "x86_64": "ld-linux-x86-64.so.2"}
_SYSTEM_VERSIONS: Final = re.compile(r"(GLIBC|GCC)_[0-9.]+")
# What compilers ask for without needing it.
_OPTIONAL: Final = frozenset(
    {
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
        "__cxa_finalize",
        "__cxa_pure_virtual",
        "__gmon_start__",
        # The exceptions of a static libstdc++, for programs with transactional memory.
        "_ITM_RU1",
        "_ITM_RU8",
        "_ITM_addUserCommitAction",
        "_ITM_memcpyRnWt",
        "_ITM_memcpyRtWn",
        "_ZGTtdlPv",
        "_ZGTtnam",
    }
)
# What a static libstdc++ asks for weakly, to know whether a program has threads.
_THREADS: Final = re.compile(r"_*pthread_\w+|sched_yield|__cxa_thread_atexit_impl")
# Whose a library or a symbol is, and what to do about it.
_OWNERS: Final = (
    (
        r"libpython|_?Py[A-Z_]",
        "Python: the wheel would work with only one Python version; do not link Python",
    ),
    (
        r"libtorch|libc10|libATen|_ZNK?(2at|3c10|5torch)|aoti_torch",
        "torch: leave its C++ out, or say `torch` in [project] and call its stable ABI",
    ),
    (r"libcuda\.so|cu[A-Z]\w+@", "the NVIDIA driver: ask for it at run time, so that it loads"),
    (r"libcudart|cuda[A-Z]", "the CUDA runtime: link cudart_static"),
    (
        r"libstdc\+\+|_ZNK?S[tsabiod]|_ZS[tsabiod]|.*GLIBCXX|.*CXXABI",
        "libstdc++: link it statically",
    ),
)


def exports(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The library exports the functions of the C interface, and no other symbol."""
    for library, manifest in pairs(wheel):
        functions = expected.functions or {kernel.function for kernel in manifest.kernels}
        wanted = {f"{manifest.project}_{name}" for name in (*_COMMON, *functions)}
        optional = (_LAST_ERROR, *(f"{name}_{one}" for name in functions for one in _BESIDE))
        found = set(library.dynamic.exported)
        for name in sorted(found - wanted - {f"{manifest.project}_{name}" for name in optional}):
            yield Finding(
                "exports",
                library.path,
                f"expected no exported symbols but the ABI's, found {name}; hide it "
                "(-fvisibility=hidden and the version script of cmake/)",
            )
        for name in sorted(wanted - found):
            yield Finding("exports", library.path, f"expected the ABI's symbol {name}, found none")


def dependencies(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The library needs the C runtime only, and has no search path of its own.

    A library that calls torch, as its manifest says, also needs torch's, and C functions of it.
    """
    del expected
    coupled = {one.path for one, manifest in pairs(wheel) if manifest.torch is not None}
    for library in wheel.libraries:
        calls_torch = library.path in coupled
        known = _SYSTEM | torch_coupling.LIBRARIES if calls_torch else _SYSTEM
        known |= {_LOADERS.get(library.dynamic.machine, "")}
        for name in library.dynamic.needed:
            if name not in known:
                yield Finding(
                    "dependencies",
                    library.path,
                    f"expected only the libraries of the C runtime, found {name}{_owner(name)}",
                )
        for path in library.dynamic.run_paths:
            yield Finding(
                "dependencies",
                library.path,
                f"expected no RPATH or RUNPATH, found {path}; remove it",
            )
        yield from _undefined(library, calls_torch=calls_torch)
        yield from _weak(library)
        yield from _absent(library)


def _undefined(library: Library, *, calls_torch: bool) -> Iterator[Finding]:
    unexpected = [
        symbol
        for symbol in library.dynamic.undefined
        if not _is_system(symbol) and not (calls_torch and _is_of_torch(symbol))
    ]
    by_owner: dict[str, list[str]] = {}
    for symbol in unexpected:
        by_owner.setdefault(_owner(f"{symbol.name}@{symbol.version or ''}"), []).append(symbol.name)
    for owner, names in by_owner.items():
        yield Finding(
            "dependencies",
            library.path,
            f"expected only undefined symbols of the C runtime, found {some(names)}{owner}",
        )


def _weak(library: Library) -> Iterator[Finding]:
    """A loader leaves what is weak out, where it is missing; calls of it then crash."""
    names = [
        symbol.name
        for symbol in library.dynamic.undefined
        if symbol.weak and symbol.name not in _OPTIONAL and not _THREADS.fullmatch(symbol.name)
    ]
    if names:
        yield Finding(
            "dependencies",
            library.path,
            f"expected undefined symbols that have to be found, found weak ones: {some(names)}; "
            "declare them without __attribute__((weak))",
        )


def _absent(library: Library) -> Iterator[Finding]:
    """Symbols that the oldest glibc has not, in this version or in a library that is needed.

    What is younger than it `platform` reports.
    """
    machine, needed = library.dynamic.machine, library.dynamic.needed
    if not glibc_symbols.listed(machine):
        return
    for symbol in library.dynamic.undefined:
        version = platform_tag.glibc_of_symbol(symbol.version)
        if version is None or version > glibc_symbols.GLIBC:
            continue
        homes = glibc_symbols.homes(symbol, machine)
        if homes.isdisjoint(needed):
            known = " and ".join(sorted(homes))
            found = f"it in {known}, which the library does not need" if homes else "no such"
            yield Finding(
                "dependencies",
                library.path,
                f"expected {symbol.name} of {symbol.version} in the libraries that it needs "
                f"({', '.join(needed)}), found {found}; link against the stubs of glibc 2.28 "
                "(cmake/manylinux.cmake)",
            )


def _is_system(symbol: Undefined) -> bool:
    if symbol.version is None:
        return symbol.weak and symbol.name in _OPTIONAL
    return _SYSTEM_VERSIONS.fullmatch(symbol.version) is not None


def _is_of_torch(symbol: Undefined) -> bool:
    return symbol.version is None and torch_coupling.is_stable(symbol.name)


def _owner(name: str) -> str:
    """`, of <whom>: <what to do>` for a library or a symbol that has a well-known owner."""
    owners = (owner for pattern, owner in _OWNERS if re.match(pattern, name))
    owner = next(owners, None)
    return f", of {owner}" if owner else ""
