"""The structs of the C ABI's headers, as ctypes lays them out."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

_ABI: Final = Path(__file__).parents[2] / "src/cuda/abi"
# The others in the folder are C++, for the library's own sources.
HEADER: Final = "".join(
    text
    for path in sorted(_ABI.glob("*.h"))
    if '\nextern "C" {' in (text := path.read_text(encoding="utf-8"))
)
_C_TYPES: Final[dict[str, Any]] = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "uint64_t": ctypes.c_uint64,
}


@cache
def declared(name: str) -> type[ctypes.Structure]:
    """The struct `name` of the headers; a pointer is an integer."""
    match = re.search(rf"typedef struct {name} {{(.*?)}} {name};", HEADER, re.DOTALL)
    assert match is not None
    body = re.sub(r"/\*.*?\*/", "", match[1], flags=re.DOTALL)
    fields = [(field, _kind(kind)) for kind, field in re.findall(r"([\w]+\*?) (\w+);", body)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _kind(name: str) -> Any:
    if name.endswith("*"):
        return ctypes.c_uint64
    return _C_TYPES.get(name) or declared(name)
