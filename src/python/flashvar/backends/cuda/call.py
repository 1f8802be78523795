"""Calls through a binary, as all ops make them: the function, the header of its struct, the log."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from flashvar.binaries import loader, manifest
from flashvar.binaries.loader import Function
from flashvar.errors import BackendUnavailableError
from flashvar.ops.plans import getter

if TYPE_CHECKING:
    from flashvar.selection.candidates import CandidateResult

_log: Final = logging.getLogger("flashvar")
_logged: Final[set[tuple[str, str, str]]] = set()

# flashvar_dtype.
DTYPES: Final = {"bf16": 0, "fp16": 1, "fp32": 2}
# flashvar_tensor: data, batch, sequence and head stride.
TENSOR: Final = "Qqqq"
# flashvar_call: struct_size abi_version device reserved; then stream workspace workspace_size.
_HEAD: Final = struct.Struct("<IIiI")
CALL: Final = f"{_HEAD.size}sQQQ"


class PerCall(int):
    """A field of a struct, of the format Q, that changes from call to call: mostly an address."""


class Template:
    """A packed struct of which the fields that are PerCall alone change from call to call."""

    def __init__(self, params: struct.Struct, fields: Sequence[object]) -> None:
        """Pack `fields` once."""
        self.packed = params.pack(*fields)
        constant = [b""]
        start = 0
        for field, size in zip(fields, _sizes(params), strict=True):
            part = self.packed[start : start + size]
            if isinstance(field, PerCall):
                constant.append(b"")
            else:
                constant[-1] += part
            start += size
        self._struct = struct.Struct("<" + "Q".join(f"{len(part)}s" for part in constant))
        self._fields: list[object] = [0] * (2 * len(constant) - 1)
        self._fields[::2] = constant

    def pack(self, values: Sequence[int]) -> bytes:
        """The struct with all of its PerCall fields, in order."""
        fields = self._fields.copy()
        fields[1::2] = values
        return self._struct.pack(*fields)


def _sizes(params: struct.Struct) -> list[int]:
    """The size of each field of a struct without padding."""
    found = []
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", params.format):
        if kind == "s":
            found.append(int(count or 1))
        else:
            found += [struct.calcsize(f"<{kind}")] * int(count or 1)
    return found


def present(like: tuple[Any, ...], order: Sequence[int]) -> Callable[[tuple[Any, ...]], Any]:
    """The function that takes the tensors of calls like this one, at these indices, in order.

    Those that are None in this call are None in all of them.
    """
    return getter([index for index in order if like[index] is not None])


def call_head(params: struct.Struct, device: int) -> bytes:
    """The part of a flashvar_call that is the same at every call."""
    return _HEAD.pack(params.size, manifest.ABI, device, 0)


def function_of(name: str, chosen: CandidateResult, device: int | None) -> tuple[Function, int]:
    """The function of the binary that was chosen, and the device."""
    if chosen.binary is None or device is None:
        raise BackendUnavailableError(
            "the cuda backend runs CUDA tensors through an installed binary, found "
            f"{chosen.candidate}: run `flashvar doctor` to see what is installed"
        )
    return loader.load(chosen.binary).function(name), device


def launch_of(function: Function, name: str, chosen: CandidateResult) -> Callable[[bytes], None]:
    """The function that launches packed calls. It logs once, for debugging, which kernels run."""
    if not _log.isEnabledFor(logging.DEBUG):
        return function.launch

    def launch(packed: bytes) -> None:
        outcome = (name, chosen.candidate, function.explain(packed))
        if outcome not in _logged:
            _logged.add(outcome)
            _log.debug("%s: %s, %s", *outcome)
        function.launch(packed)

    return launch
