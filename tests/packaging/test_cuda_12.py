"""All code compiles as CUDA 12.9 too, so that a release can be made for older drivers.

There is no nvcc of CUDA 12 on PyPI, but its runtime compiler, and its headers.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from flashvar_factory.build.configure import configure
from flashvar_factory.config import schema
from flashvar_factory.config.expand import expand, select_all
from flashvar_factory.config.schema import Target
from flashvar_factory.config.selection_arguments import SelectionArguments
from flashvar_factory.toolchain.nvcc import Toolchain

ROOT = Path(__file__).parents[2]
ABI = ROOT / "src" / "cuda" / "abi"
CONFIG = schema.read(ROOT / "variants.toml")

# The runtime compiler brings no C++ library; all that device code takes from one are these types.
CSTDINT = b"""
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long uint64_t; typedef unsigned long uintptr_t;
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
"""
TYPE_TRAITS = b"""#pragma once
namespace std {
template <class T, T kValue> struct integral_constant { static constexpr T value = kValue; };
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <bool kFirst, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool kFirst, class A, class B>
using conditional_t = typename conditional<kFirst, A, B>::type;
}
"""
# It knows the runtime without a header; of the driver's, kernels take the type of tensor maps.
CUDA_H = b"#pragma once\nstruct CUtensorMap { alignas(64) unsigned long opaque[16]; };\n"
HEADERS = {
    b"cstdint": CSTDINT,
    b"type_traits": TYPE_TRAITS,
    b"cuda_runtime_api.h": b"",
    b"cuda.h": CUDA_H,
}

# The main kernels of each namespace; a family may have those of several.
PROGRAMS = {
    "sm80/attention/fwd": """
using Config = sm80::attention::FwdConfig<{target}, dtype::{dtype}, {dims}, {modifiers}>;
template __global__ void sm80::attention::fwd_kernel<Config, {aligned}>(
    const __grid_constant__ attention::FwdProblem);
""",
    "sm80/attention/bwd": """
using Config = sm80::attention::BwdConfig<{target}, dtype::{dtype}, {dims}, {modifiers}>;
template __global__ void sm80::attention::bwd_kernel<Config>(
    const __grid_constant__ sm80::attention::BwdArgs);
""",
    "sm90/attention/fwd": """
using Variant = sm90::attention::FwdVariant;
constexpr auto kVariant = {modifiers} ? Variant::kModifiers : Variant::kGeneral;
using Config = sm90::attention::FwdConfig<{target}, dtype::{dtype}, {dims}, kVariant>;
template __global__ void sm90::attention::fwd_kernel<Config>(
    const __grid_constant__ sm90::attention::FwdArgs);
""",
    "sm90/attention/bwd": """
using Variant = sm90::attention::BwdVariant;
constexpr auto kVariant = {modifiers} ? Variant::kNoDqModifiers : Variant::kDense;
using Config = sm90::attention::BwdConfig<{target}, dtype::{dtype}, {dims}, kVariant>;
template __global__ void sm90::attention::bwd_kernel<Config>(
    const __grid_constant__ sm90::attention::BwdArgs);
""",
    "sm90/attention/bwd_dq": """
using Config = sm90::attention::BwdDqConfig<{target}, dtype::{dtype}, {dims}, {modifiers}>;
template __global__ void sm90::attention::bwd_dq_kernel<Config>(
    const __grid_constant__ sm90::attention::BwdDqArgs);
""",
}
KERNELS_OF = {"sm80": ["sm80/attention/fwd", "sm80/attention/bwd"], "sm90": list(PROGRAMS)}
# Each value with each value of the other two: dtype, head dims, plain or with modifiers.
VARIANTS = [
    ("bf16", "64, 64", True),
    ("bf16", "192, 128", False),
    ("fp16", "64, 64", False),
    ("fp16", "192, 128", True),
]
PARTS = [
    pytest.param(target, part, id=f"{name}-{part}")
    for name, target in CONFIG.targets.items()
    for part in KERNELS_OF[target.family]
]


def part_of_cuda_12(name: str) -> Path:
    """The folder of a package of CUDA 12."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec(f"nvidia.{name}")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"nvidia-{name.replace('_', '-')}-cu12 is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    folder = part_of_cuda_12("cuda_nvrtc") / "lib"
    for name in ("libnvrtc-builtins.so.12.9", "libnvrtc.so.12"):
        library = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return library


@pytest.mark.parametrize(("target", "part"), PARTS)
@pytest.mark.parametrize(("dtype", "dims", "plain"), VARIANTS)
def test_device_code_compiles_with_nvrtc_12_9(
    target: Target, part: str, dtype: str, dims: str, plain: bool, nvrtc: ctypes.CDLL
) -> None:
    architecture = target.architecture
    number = 10 * architecture.major + architecture.minor
    body = PROGRAMS[part].format(
        target=f"Target<{number}, {target.shared_memory}>",
        dtype=dtype,
        dims=dims,
        modifiers=str(not plain).lower(),
        aligned=str(plain).lower(),
    )
    includes = ("core/dtype.cuh", "core/target.h", f"{part}.cuh")
    text = "".join(f'#include "{name}"\n' for name in includes)
    text += f"namespace flashvar {{\n{body}}}\n"
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * len(HEADERS))(*HEADERS.values())
    names = (ctypes.c_char_p * len(HEADERS))(*HEADERS)
    source = text.encode()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source, b"instance.cu", len(HEADERS), headers, names
    )
    assert created == 0
    options = [
        f"-arch=sm_{architecture.code}",
        "-std=c++17",
        # There is no host here: the constexpr functions of both sides count as the device's.
        "--device-as-default-execution-space",
        # Whether it compiles is the question, not how fast it would run.
        "--Ofast-compile=max",
        f"-I{ROOT / 'src' / 'cuda'}",
    ]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    assert size.value > 1000


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what is generated for one binary."""
    config = CONFIG
    (build,) = expand(
        config, select_all(SelectionArguments(architectures=(next(iter(config.targets)),)), config)
    )
    nvcc = Toolchain(Path("nvcc"), "12.9.86", None, "nowhere")
    folder = tmp_path_factory.mktemp("plan")
    configure(config, build, nvcc, root=ROOT, directory=folder)
    return folder


@pytest.mark.parametrize("name", sorted(path.name for path in ABI.glob("*.cc")))
def test_host_code_compiles_with_headers_of_12_9(name: str, plan: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    headers = [part_of_cuda_12(part) / "include" for part in ("cuda_runtime", "cuda_nvcc")]
    includes = [f"-I{folder}" for folder in (ABI.parent, plan, *headers)]
    # What is asked for must be of CUDA 12, wherever else the compiler might find a header.
    version = [f"-include{headers[0] / 'cuda_runtime_api.h'}", "-DWANTED=12090"]
    (plan / "check.h").write_text("static_assert(CUDART_VERSION == WANTED);\n", encoding="utf-8")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *includes]
    command += [*version, "-include", str(plan / "check.h"), str(ABI / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
