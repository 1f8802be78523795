"""What is installed loads and says what it is; on a GPU it also computes."""

import ctypes
import json
from importlib import metadata
from pathlib import Path

import pytest

FP32, FP16 = 0, 1


class Params(ctypes.Structure):
    """vecadd_vector_add_params of src/cuda/abi/vecadd.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("dtype", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def folders() -> dict[str, Path]:
    """The folder of each installed binary, by its architecture: what a loader chooses from."""
    found = {}
    for distribution in metadata.distributions():
        for entry in distribution.entry_points.select(group="vecadd.binaries"):
            found[entry.name] = Path(str(distribution.locate_file(entry.value)))
    return found


@pytest.fixture(params=sorted(folders()))
def folder(request: pytest.FixtureRequest) -> Path:
    return folders()[request.param]


@pytest.fixture
def library(folder: Path) -> ctypes.CDLL:
    manifest = json.loads((folder / "manifest.json").read_text())
    found = ctypes.CDLL(str(folder / manifest["library"]["file"]))
    found.vecadd_build_info.restype = ctypes.c_char_p
    found.vecadd_last_error.restype = ctypes.c_char_p
    return found


def test_something_is_installed() -> None:
    assert folders()


def test_library_is_what_its_manifest_describes(folder: Path, library: ctypes.CDLL) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    built = json.loads(library.vecadd_build_info())
    assert library.vecadd_abi_version() == manifest["abi"]
    assert built["version"] == manifest["version"] == metadata.version(manifest["distribution"])


def test_unknown_dtype_is_refused(library: ctypes.CDLL) -> None:
    assert library.vecadd_vector_add(ctypes.byref(Params(length=8, dtype=7))) == 1
    assert library.vecadd_last_error() == b"no vector_add kernel for dtype 7"


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_nothing_to_add_is_no_error(library: ctypes.CDLL, dtype: int) -> None:
    assert library.vecadd_vector_add(ctypes.byref(Params(length=0, dtype=dtype))) == 0


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("length", [1, 1000, 4096])
def test_sums_on_the_gpu(folder: Path, library: ctypes.CDLL, dtype: int, length: int) -> None:
    torch = pytest.importorskip("torch", reason="the tensors of this test are torch's")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU that torch sees")
    major, minor = torch.cuda.get_device_capability()
    made_for = folder.name.rpartition("sm")[2]
    if not (int(made_for[:-1]) == major and int(made_for[-1]) <= minor):
        pytest.skip(f"{folder.name} is for another GPU than this one of {major}.{minor}")
    kind = torch.float32 if dtype == FP32 else torch.float16
    x, y = (torch.randn(length, device="cuda", dtype=kind) for _ in range(2))
    out = torch.full_like(x, float("nan"))
    pointers = [one.data_ptr() for one in (x, y, out)]
    stream = torch.cuda.current_stream().cuda_stream
    params = Params(*pointers, length, stream, dtype)
    assert library.vecadd_vector_add(ctypes.byref(params)) == 0, library.vecadd_last_error()
    torch.testing.assert_close(out, x + y, rtol=0, atol=0)
