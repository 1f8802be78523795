"""A library that calls torch's stable ABI, as the page says it: built, audited, installed, called.

The op of the page runs on the CPU here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import small_project

from flashvar.binaries import manifest
from flashvar_factory.inspect import archive

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "other-kernels.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```cpp\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(SOURCE,) = (block for block in BLOCKS if "STABLE_TORCH_LIBRARY" in block)
(LINE,) = re.findall(r'^torch = "2\.\d+"$', PAGE, re.MULTILINE)
CALL = """
import json, sys
from pathlib import Path
import torch

(library,) = Path(sys.argv[1]).glob("vecadd_sm90/*.so")
torch.ops.load_library(str(library))
x, y = torch.randn(1000), torch.randn(1000)
found = {"sum": torch.equal(torch.ops.vecadd.vector_add(x, y), x + y)}
for name, other in {"another length": y[:3], "another dtype": y.double()}.items():
    try:
        torch.ops.vecadd.vector_add(x, other)
    except RuntimeError as error:
        found[name] = str(error)
json.dump(found, sys.stdout)
"""


def factory(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashvar_factory", *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src" / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of the page, built for one architecture."""
    folder = small_project(tmp_path_factory.mktemp("a project") / "vecadd")
    edit(folder / "variants.toml", 'license = "MIT"\n', f'license = "MIT"\n{LINE}\n')
    edit(folder / "src/cuda/CMakeLists.txt", "vector_add.cc)", "vector_add.cc abi/torch_ops.cc)")
    (folder / "src/cuda/abi/torch_ops.cc").write_text(SOURCE, encoding="utf-8")
    done = factory(folder, "wheels", "sm90", "dtype=fp32", "per_thread=4")
    assert done.returncode == 0, done.stdout[-5000:]
    return folder


@pytest.fixture(scope="module")
def wheel(project: Path) -> Path:
    (found,) = (project / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", "--target", str(folder), str(wheel)], check=True)
    return folder


def test_it_passes_the_audit(project: Path, wheel: Path) -> None:
    done = factory(project, "audit", str(wheel))
    assert done.returncode == 0, done.stdout


def test_it_says_which_torch(wheel: Path, site: Path) -> None:
    oldest = LINE.partition('"')[2].rstrip('"')
    assert [str(one) for one in archive.metadata(wheel).requires_dist or ()] == [f"torch>={oldest}"]
    assert manifest.read(site / "vecadd_sm90" / manifest.FILE_NAME).torch == oldest


def test_nothing_of_where_it_was_built_is_in_it(site: Path) -> None:
    (library,) = (site / "vecadd_sm90").glob("*.so")
    content = library.read_bytes()
    assert str(ROOT).encode() not in content
    assert b"site-packages" not in content


def test_its_op_is_an_op_of_torch(site: Path) -> None:
    command = [sys.executable, "-c", CALL, str(site)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sum"] is True
    assert "expected contiguous tensors of one length" in found["another length"]
    assert "expected float32" in found["another dtype"]


def test_load_brings_torch_first(site: Path) -> None:
    path = os.pathsep.join([str(site), str(ROOT / "src" / "python")])
    done = subprocess.run(
        [sys.executable, "-m", "flashvar_factory", "load-test", "vecadd-sm90"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "libvecadd_sm90.so loads: ABI 1" in done.stdout


def test_torch_of_a_later_version_is_asked_for(project: Path) -> None:
    other = project.with_name("later")
    other.mkdir()
    for name in ("CMakeLists.txt", "version.py"):
        (other / name).write_bytes((project / name).read_bytes())
    (other / "src").symlink_to(project / "src")
    text = (project / "variants.toml").read_text(encoding="utf-8")
    (other / "variants.toml").write_text(text.replace(LINE, 'torch = "2.99"'), encoding="utf-8")
    done = factory(other, "wheels", "sm90")
    assert done.returncode == 3, done.stdout
    assert "expected torch 2.99 or newer" in done.stdout
    assert not (other / "dist").exists()
