"""causal_conv1d on the host: its own kernels and C functions, for every dtype."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import host_program
import pytest
import torch

from flashvar.backends.cuda import causal_conv1d as cuda
from flashvar.binaries.registry import Binary
from flashvar.selection.candidates import CandidateResult

CHOSEN = CandidateResult("cuda", "cuda", True, "", binary=cast("Binary", object()))

# Constants that tests set: their headers, and their values there.
_LIMITS = {
    "kBlocks": ("causal_conv1d/tiles.h", "256"),
    "kFewTiles": ("causal_conv1d/tiles.h", "8"),
    "kFewestCopied": ("causal_conv1d/bwd_plan.h", "1 << 20"),
}
_PROGRAM = """
#include "device.h"
extern "C" {
int target = 0;
}
#include "abi/causal_conv1d_fwd.cc"
#include "abi/causal_conv1d_bwd.cc"
#include "abi/causal_conv1d_update.cc"
#include "abi/error.cc"

flashvar::DeviceGuard::DeviceGuard(int) : status_(FLASHVAR_OK) {}
flashvar::DeviceGuard::~DeviceGuard() {}
"""
_TABLE = """
}}
#include "core/dtype.cuh"
#include "sm80/causal_conv1d/{direction}_launch.cuh"
namespace flashvar {{
template <class Target, class Dtype>
constexpr CausalConv1d{Direction}Kernel k{Direction}Row =
    sm80::causal_conv1d::{Direction}Launch<Target, Dtype>::row();
template <class Target>
constexpr const CausalConv1d{Direction}Kernel* k{Direction}Rows[] = {{
    &k{Direction}Row<Target, dtype::bf16>, &k{Direction}Row<Target, dtype::fp16>,
    &k{Direction}Row<Target, dtype::fp32>, nullptr}};
constexpr const CausalConv1d{Direction}Kernel* const* k{Direction}Tables[] = {{{tables}}};
#define kCausalConv1d{Direction}Kernels k{Direction}Tables[::target]
"""


class HostLibrary:
    """What `flashvar.backends.cuda` calls of binaries for targets, as C++ names these."""

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        headers: dict[str, str] = {}
        for limit, (header, value) in _LIMITS.items():
            text = headers.get(header) or (host_program.SOURCES / header).read_text("utf-8")
            constant = f"inline constexpr int64_t {limit} = {value};"
            assert constant in text
            variable = f'extern "C" {{ inline int64_t {limit} = {value}; }}'
            headers[header] = text.replace(constant, variable)
        for direction in ("fwd", "bwd", "update"):
            name = direction.capitalize()
            # On the host only the backward differs by target; the others are compiled for one.
            of = targets if direction == "bwd" else targets[:1] * len(targets)
            tables = ", ".join(f"k{name}Rows<Target<{target}>>" for target in of)
            headers[f"causal_conv1d_{direction}_kernels.inc"] = _TABLE.format(
                direction=direction, Direction=name, tables=tables
            )
        self._targets = targets
        # Its kernels run for longer than their compilation takes.
        self._library = host_program.library(_PROGRAM, folder, headers, "-Og")
        self._library.flashvar_last_error.restype = ctypes.c_char_p

    def choose(self, target: str) -> None:
        """Be the binary for this target."""
        ctypes.c_int.in_dll(self._library, "target").value = self._targets.index(target)

    def function(self, name: str) -> Any:
        def call(suffix: str, packed: bytes, *others: Any) -> None:
            if getattr(self._library, f"flashvar_{name}{suffix}")(packed, *others):
                raise RuntimeError(self._library.flashvar_last_error().decode())

        def workspace(packed: bytes) -> int:
            size = ctypes.c_uint64()
            call("_workspace", packed, ctypes.byref(size))
            return size.value

        def explain(packed: bytes) -> str:
            text = ctypes.create_string_buffer(512)
            call("_explain", packed, text, ctypes.c_uint64(512))
            return text.value.decode()

        return SimpleNamespace(
            launch=lambda packed: call("", packed), workspace=workspace, explain=explain
        )

    def install(
        self, patch: pytest.MonkeyPatch, blocks: int = 256, few_tiles: int = 1,
        multiprocessors: int = 3, copied: int = 1 << 20,
    ) -> None:  # fmt: skip
        """Serve CPU tensors that are handed to the cuda backend.

        `blocks`: how many a launch should have before threads get more work each.
        `few_tiles`: of tokens, for which a block is started; few of them, so that small calls have
        several blocks.
        `multiprocessors`: of the device. With few, blocks go on from channel to channel.
        `copied`: elements of a gradient from which it may be copied.
        """
        for limit, value in zip(_LIMITS, (blocks, few_tiles, copied), strict=True):
            ctypes.c_int64.in_dll(self._library, limit).value = value
        ctypes.c_int.in_dll(self._library, "multiprocessors").value = multiprocessors
        patch.setattr(cuda, "function_of", lambda name, chosen, device: (self.function(name), 0))
        patch.setattr(cuda, "maker", lambda like: partial(_aligned, like.numel()))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)

    def count_blocks(self, call: Callable[[], object]) -> int:
        """How many blocks a call launches. They are not run."""
        counted = ctypes.c_int64()
        counter = ctypes.c_void_p.in_dll(self._library, "counted_blocks")
        counter.value = ctypes.addressof(counted)
        call()
        counter.value = None
        return counted.value

    def end_tensors_at(self, x: torch.Tensor | None) -> None:
        """From now on let no access cross the end of x; None: of no tensor."""
        end = 0 if x is None else x.data_ptr() + x.numel() * x.element_size()
        ctypes.c_void_p.in_dll(self._library, "end_of_tensor").value = end


def _aligned(size: int) -> torch.Tensor:
    """As memory of a device is, on a multiple of 256 bytes."""
    memory = torch.full((size + 255,), 0xFF, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][:size]
