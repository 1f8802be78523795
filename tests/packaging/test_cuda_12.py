"""Device code compiles as CUDA 12.9 too, so that a release can be made for older drivers.

There is no nvcc of CUDA 12 on PyPI, but its runtime compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest

from flashvar_factory import schema
from flashvar_factory.schema import Target

ROOT = Path(__file__).parents[2]
CONFIG = schema.read(ROOT / "variants.toml")

# The runtime compiler brings no C++ library; all that device code takes from one are these types.
CSTDINT = b"""
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long uint64_t; typedef unsigned long uintptr_t;
"""

PROGRAM = """
#include "core/dtype.cuh"
#include "core/target.h"
#include "{family}/attention_fwd.cuh"
namespace flashvar {{
using Config = {family}::AttentionFwdConfig<Target<{number}, {shared_memory}>, dtype::bf16, 64>;
template __global__ void {family}::attention_fwd_kernel<Config, true>(
    const __grid_constant__ AttentionFwdProblem);
}}
"""


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)), "lib")
    for name in ("libnvrtc-builtins.so.12.9", "libnvrtc.so.12"):
        library = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return library


@pytest.mark.parametrize("target", CONFIG.targets.values(), ids=CONFIG.targets)
def test_device_code_compiles_with_nvrtc_12_9(target: Target, nvrtc: ctypes.CDLL) -> None:
    architecture = target.architecture
    text = PROGRAM.format(
        family=target.family,
        number=10 * architecture.major + architecture.minor,
        shared_memory=target.shared_memory,
    )
    program = ctypes.c_void_p()
    headers, names = (ctypes.c_char_p * 1)(CSTDINT), (ctypes.c_char_p * 1)(b"cstdint")
    source = text.encode()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source, b"instance.cu", 1, headers, names
    )
    assert created == 0
    options = [
        f"-arch=sm_{architecture.code}",
        "-std=c++17",
        # There is no host here: the constexpr functions of both sides count as the device's.
        "--device-as-default-execution-space",
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
