"""Binaries as they lie on disk once installed, and libraries made by a C compiler."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from flashvar.binaries.manifest import ABI, LibraryFile, Manifest
from flashvar.binaries.registry import Binary, BinaryFolder

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "c++", "g++"))), None)

# The C ABI.
_LIBRARY = """
#ifdef __cplusplus
extern "C" {
#endif
unsigned flashvar_abi_version(void) { return ABI; }
const char* flashvar_build_info(void) { return INFO; }
static const char* last_error = "";
const char* flashvar_last_error(void) { return last_error; }
FUNCTIONS
#ifdef __cplusplus
}
#endif
"""
# A launch succeeds if struct_size is 208, and fails in words otherwise.
_FUNCTION = """
int flashvar_NAME(const unsigned* params) {
  if (params[0] == 208) return 0;
  last_error = "struct_size: expected 208";
  return 1;
}
int flashvar_NAME_workspace(const unsigned* params, unsigned long long* size) {
  *size = params[0];
  return 0;
}
int flashvar_NAME_explain(const unsigned* params, char* text, unsigned long long size) {
  if (params[0] != 208 || size < 2) return 1;
  text[0] = 'a';
  text[1] = 0;
  return 0;
}
"""


def library_source(
    abi: int = ABI,
    info: str = '{"architecture": "sm_80"}',
    functions: tuple[str, ...] = ("attention_fwd",),
) -> str:
    """C source of a library that says this about itself and exports these functions."""
    quoted = info.replace('"', '\\"')
    code = "".join(_FUNCTION.replace("NAME", name) for name in functions)
    library = _LIBRARY.replace("FUNCTIONS", code)
    return f'#define ABI {abi}\n#define INFO "{quoted}"\n{library}'


def compile_library(source: str, folder: Path) -> bytes:
    """The shared library of `source`."""
    assert COMPILER is not None
    (folder / "library.c").write_text(source, encoding="utf-8")
    command = [COMPILER, "-shared", "-fPIC", "-o", "library.so", "library.c"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "library.so").read_bytes()


def put_binary(directory: Path, manifest: Manifest, library: bytes = b"\0\0\0\0") -> Binary:
    """Write a folder with `library` and a manifest that describes it."""
    file = LibraryFile(manifest.library.file, len(library), hashlib.sha256(library).hexdigest())
    manifest = replace(manifest, library=file)
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    (directory / file.file).write_bytes(library)
    return Binary(BinaryFolder(directory, f"wheel {directory.name}", "install it again"), manifest)


def put_wheel(
    site: Path, manifest: Manifest, version: str = "0.1.0", library: bytes = b"\0\0\0\0"
) -> Path:
    """Write what installing a wheel into `site` leaves there; returns the binary's folder."""
    folder = manifest.distribution.replace("-", "_")
    info = site / f"{folder}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {manifest.distribution}\nVersion: {version}\n",
        encoding="utf-8",
    )
    (info / "entry_points.txt").write_text(
        f"[flashvar.binaries]\n{manifest.architecture.name} = {folder}\n", encoding="utf-8"
    )
    return put_binary(site / folder, manifest, library).folder.path
