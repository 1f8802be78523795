"""What every op's call through a binary has alike: the function, and the header of its struct."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from flashvar.binaries import loader, manifest
from flashvar.binaries.loader import Function
from flashvar.errors import BackendUnavailableError

if TYPE_CHECKING:
    from flashvar.selection.candidates import CandidateResult

# flashvar_dtype.
DTYPES: Final = {"bf16": 0, "fp16": 1, "fp32": 2}
# flashvar_tensor: data, batch, sequence and head stride.
TENSOR: Final = "Qqqq"
# flashvar_call: struct_size abi_version device reserved; then stream workspace workspace_size.
_HEAD: Final = struct.Struct("<IIiI")
CALL: Final = f"{_HEAD.size}sQQQ"


def call_head(params: struct.Struct, device: int) -> bytes:
    """The part of a flashvar_call that is the same at every call."""
    return _HEAD.pack(params.size, manifest.ABI, device, 0)


def function_of(name: str, chosen: CandidateResult, device: int | None) -> tuple[Function, int]:
    """The function of the binary that was chosen, and the device."""
    if chosen.binary is None or device is None:
        raise BackendUnavailableError(
            "the cuda backend serves CUDA tensors through an installed binary, got "
            f"{chosen.candidate}: run `flashvar doctor` to see what is installed"
        )
    return loader.load(chosen.binary).function(name), device
