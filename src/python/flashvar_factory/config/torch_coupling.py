"""Libraries that call torch through its stable ABI, which later versions of torch keep."""

from __future__ import annotations

import re
from typing import Final

# What such a library links against. `import torch` loads them first.
LIBRARIES: Final = frozenset({"libtorch_cpu.so", "libtorch_cuda.so"})
# Torch 2.9 is the first whose headers take the version of the ABI to offer.
VERSION: Final = r"2\.(9|[1-9][0-9])"
VERSION_MEANING: Final = "the oldest version of torch, 2.9 or newer, such as '2.10'"

_STABLE: Final = re.compile(r"(aoti_)?torch_[a-z][A-Za-z0-9_]*")


def requirement(torch: str) -> str:
    """The Requires-Dist entry of a wheel of such libraries."""
    return f"torch>={torch}"


def target(torch: str) -> str:
    """The version as torch's headers take it (TORCH_TARGET_VERSION): 0x020a000000000000."""
    major, minor = map(int, torch.split("."))
    return f"{major << 56 | minor << 48:#018x}"


def is_stable(symbol: str) -> bool:
    """Whether it is the name of a function of the stable ABI, whose names are C's."""
    return _STABLE.fullmatch(symbol) is not None
