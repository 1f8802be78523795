"""The library of merge_states with its own kernels and C functions, for fp32, on the host."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import host_program
import pytest
import torch

from flashvar.backends.cuda import merge_states as cuda
from flashvar.binaries.registry import Binary
from flashvar.selection.candidates import CandidateResult

CHOSEN = CandidateResult("cuda", "cuda", True, "", binary=cast("Binary", object()))

_PROGRAM = """
#include "device.h"
#include "abi/merge_states_fwd.cc"
#include "abi/merge_states_bwd.cc"
#include "abi/error.cc"

flashvar::DeviceGuard::DeviceGuard(int) : status_(FLASHVAR_OK) {}
flashvar::DeviceGuard::~DeviceGuard() {}
"""
_TABLE = """
}}
#include "sm80/merge_states/{direction}_launch.cuh"
namespace flashvar {{
constexpr MergeStates{Direction}Kernel kFp32{Direction} =
    sm80::merge_states::{Direction}Launch<Target<80, 166912>, dtype::fp32>::row();
constexpr const MergeStates{Direction}Kernel* kMergeStates{Direction}Kernels[] = {{
    &kFp32{Direction}, nullptr}};
"""


class HostLibrary:
    """What `flashvar.backends.cuda` calls of a binary."""

    def __init__(self, folder: Path) -> None:
        tables = {
            f"merge_states_{direction}_kernels.inc": _TABLE.format(
                direction=direction, Direction=direction.capitalize()
            )
            for direction in ("fwd", "bwd")
        }
        self._library = host_program.library(_PROGRAM, folder, tables)
        self._library.flashvar_last_error.restype = ctypes.c_char_p

    def function(self, name: str) -> Any:
        launch = getattr(self._library, f"flashvar_{name}")

        def call(packed: bytes) -> None:
            if launch(packed):
                raise RuntimeError(self._library.flashvar_last_error().decode())

        return SimpleNamespace(launch=call)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Serve CPU tensors that are handed to the cuda backend."""
        patch.setattr(cuda, "function_of", lambda name, chosen, device: (self.function(name), 0))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
