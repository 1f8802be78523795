"""A fake libcuda.so.1, which reports the devices it is told, for processes without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)

_SOURCE = """
#include <string.h>
static const struct { const char* name; int major, minor, integrated; } gpus[] = {GPUS{0, 0, 0, 0}};
int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int* count) { *count = sizeof(gpus) / sizeof(gpus[0]) - 1; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  strncpy(name, gpus[device].name, size);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? gpus[device].major
         : attribute == 76 ? gpus[device].minor
         : attribute == 18 ? gpus[device].integrated : 0;
  return 0;
}
"""


def put(folder: Path, cuda: tuple[int, int], gpus: Sequence[tuple[str, int, int]]) -> Path:
    """Write the library into a folder, which LD_LIBRARY_PATH then names; returns the folder."""
    assert COMPILER is not None
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(f'{{"{name}", {major}, {minor}, 0}}, ' for name, major, minor in gpus)
    source = _SOURCE.replace("GPUS", rows)
    source = source.replace("VERSION", str(1000 * cuda[0] + 10 * cuda[1]))
    (folder / "cuda.c").write_text(source, encoding="utf-8")
    command = [COMPILER, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder
