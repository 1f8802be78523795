"""Builds wheels of another project's kernels from its sdist, and tries them without a compiler.

    python tests/foreign/wheels.py causal_conv1d sm_90 dtype=bf16

The folder of the project's name says how; its sdist comes from PyPI with the hash in upstream.txt.
Everything is written into build/foreign. The Python that runs this has torch and setuptools, for
which setup.py of the sdist asks when pip reads its metadata.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What stands in for torch's own headers in the sources of all projects.
HEADERS = "torch_headers"

# What a fresh environment tries, with nothing but the wheels: every library loads, says what its
# manifest says, and refuses what it has no kernel for.
TRY = """
import ctypes, json, sys
from importlib import metadata
from pathlib import Path

project = sys.argv[1]
tried = 0
for distribution in metadata.distributions():
    for entry in distribution.entry_points.select(group=f"{project}.binaries"):
        folder = Path(distribution.locate_file(entry.value))
        described = json.loads((folder / "manifest.json").read_text())
        library = ctypes.CDLL(str(folder / described["library"]["file"]))
        info = getattr(library, f"{project}_build_info")
        error = getattr(library, f"{project}_last_error")
        info.restype = error.restype = ctypes.c_char_p
        said = json.loads(info())
        assert (said["architecture"], said["version"]) == (entry.name, described["version"]), said
        assert getattr(library, f"{project}_abi_version")() == described["abi"]
        for op in {row["op"] for row in described["kernels"]}:
            # Parameters of no size are those of no op.
            assert getattr(library, f"{project}_{op}")(bytes(64)) == 1
            assert error().startswith(f"{op}: expected params of ".encode()), error()
        print(f"{folder.name}: loads, {len(described['kernels'])} kernels, refuses in words")
        tried += 1
assert tried
"""


def main(name: str, *selection: str) -> None:
    """Fetch, build, audit, index, install, try."""
    project = ROOT / "build" / "foreign" / name
    prepare(name, project)
    factory = [sys.executable, "-m", "flashvar_factory", "--root", str(project)]
    run(*factory, "wheels", *(selection or ("all",)))
    wheels = sorted((project / "dist").glob("*.whl"))
    run(*factory, "audit", *map(str, wheels))
    run(*factory, "index")
    environment = project / "build" / "environment"
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    index = (project / "build" / "index").as_uri() + "/"
    names = [wheel.name.partition("-")[0] for wheel in wheels]
    # No compiler is on this PATH.
    alone = {"PATH": str(environment / "bin"), "CUDA_VISIBLE_DEVICES": ""}
    install = [python, "-m", "pip", "--isolated", "install", "--quiet", "--index-url", index]
    subprocess.run([*install, *names], check=True, env=alone)
    stem = names[0].rpartition("_")[0]
    subprocess.run([python, "-c", TRY, stem], check=True, env=alone)


def prepare(name: str, project: Path) -> None:
    """Copy the project and put the sources of its sdist into it; what was built stays."""
    sdists = project.parent / "sdists"
    pip = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    pip += ["--require-hashes", "--requirement", str(HERE / name / "upstream.txt")]
    skipped = {f"{word}_SKIP_CUDA_BUILD": "TRUE" for word in ("CAUSAL_CONV1D", "MAMBA")}
    run(sys.executable, "-m", "pip", *pip, "--dest", str(sdists), environ=skipped)
    (sdist,) = sdists.glob(f"{name}-*.tar.gz")
    shutil.copytree(HERE / name, project, dirs_exist_ok=True)
    sources = project / "src" / "cuda"
    upstream = sources / "upstream"
    shutil.copytree(HERE / HEADERS, sources / HEADERS, dirs_exist_ok=True)
    fresh = project.parent / f"{name}.unpacked"
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(fresh, filter="data")
    (top,) = fresh.iterdir()
    shutil.copyfile(top / "LICENSE", project / "LICENSE")
    shutil.copytree(top / "csrc", upstream / "csrc", dirs_exist_ok=True)
    toolkit, link = ROOT / "build" / "toolkit", project / "build" / "toolkit"
    if toolkit.is_dir() and not link.exists():
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(toolkit)


def run(*command: str, environ: dict[str, str] | None = None) -> None:
    """Run a command with the factory of this checkout; its failure ends this program."""
    sources = {"PYTHONPATH": str(ROOT / "src" / "python")}
    done = subprocess.run(command, env={**os.environ, **sources, **(environ or {})})
    if done.returncode != 0:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
