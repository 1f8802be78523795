"""Compile the probes of Hopper's primitives into one library: build/probes/libflashvar_probes.so.

    python tests/gpu/build_probes.py [LIBRARY]

Needs the CUDA compiler that builds the project; the library runs on any machine with a driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build/probes/libflashvar_probes.so"
SOURCES = sorted((Path(__file__).parent / "probes").glob("*.cu"))


def build(library: Path = LIBRARY) -> str:
    """Compile; returns what ptxas says of every kernel. CalledProcessError shows nvcc's errors."""
    sys.path.insert(0, str(ROOT / "src/python"))
    from flashvar_factory.toolchain import nvcc

    found = nvcc.find("auto", os.environ, ROOT)
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [str(found.nvcc), "-shared", "-std=c++17", "-O3", "--threads=2", "-Xptxas=-v"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    command += [f"-I{ROOT / 'src/cuda'}", *map(str, SOURCES), "-o", str(library)]
    if found.library_dir is not None:
        command.append(f"-L{found.library_dir}")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    print(build(*map(Path, sys.argv[1:])))
