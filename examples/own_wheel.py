"""Build a wheel for the GPU of this machine with the head dims of one's own model, and try it.

    python examples/own_wheel.py --head-dim 64,128 --dtype bf16

Run it in a checkout. It wants torch, nvcc and what a wheel is built with; `nox -s examples --
own_wheel` makes such an environment. The wheels are left in --output. They are installed into a
folder of their own, so that this environment stays as it is. Ends with 1 where a head dim is not in
the wheel that was installed, or a step before that fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# In the folder of the installation: which binaries are there, and that their libraries open.
FOUND = """
from flashvar.binaries import loader
for binary in loader.open_all().binaries:
    print(binary.architecture.name, ", ".join(row.name for row in binary.manifest.kernels))
"""


def run(*command: str, **environ: str) -> str:
    """What a command prints; its exit code is ours where it fails."""
    done = subprocess.run(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def build(words: list[str], output: Path) -> list[Path]:
    """The wheels of a selection: flashvar's own, and one for each architecture."""
    factory = (sys.executable, "-m", "flashvar_factory", "wheels", *words)
    said = run(*factory, "--output", str(output), PYTHONPATH=str(ROOT / "src" / "python"))
    print(said, end="")
    made = (Path(line.split()[-1]) for line in said.splitlines() if line.endswith(".whl"))
    return [path for path in made if path.is_file()]


def install(wheels: list[Path], folder: Path) -> None:
    """Install wheels, and nothing else, into a folder."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder))
    run(*pip, *map(str, wheels))


def main() -> int:
    """Build, install, look and call; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architecture", default="native", help="sm89, say; this GPU's by default")
    parser.add_argument("--head-dim", default="64", metavar="N,...")
    parser.add_argument("--dtype", default="bf16", metavar="bf16,fp16")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "own-wheel")
    options = parser.parse_args()
    words = [f"hdim={options.head_dim}", f"dtype={options.dtype}"]
    wheels = build([f"arch={options.architecture}", *words], options.output)

    with tempfile.TemporaryDirectory() as folder:
        install(wheels, Path(folder))
        found = run(sys.executable, "-c", FOUND, PYTHONPATH=folder)
        print(found, end="")
        print(run(sys.executable, "examples/first_call.py", PYTHONPATH=folder), end="")
    return 0 if all(f"hdim{dim}" in found for dim in options.head_dim.split(",")) else 1


if __name__ == "__main__":
    sys.exit(main())
