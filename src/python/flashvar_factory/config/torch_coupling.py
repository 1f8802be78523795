"""Libraries that call torch: through its stable ABI, which holds from one version of torch on."""

from __future__ import annotations

import re
from typing import Final

# What such a library is linked with. Whoever loads it has imported torch.
LIBRARIES: Final = frozenset({"libtorch_cpu.so", "libtorch_cuda.so"})
# Of torch 2.9: the first whose headers can be told which version's ABI is meant.
VERSION: Final = r"2\.(9|[1-9][0-9])"
VERSION_MEANING: Final = "the oldest version of torch, 2.9 or newer, such as '2.10'"

_STABLE: Final = re.compile(r"(aoti_)?torch_[a-z][A-Za-z0-9_]*")


def requirement(torch: str) -> str:
    """What a wheel of such libraries asks of its environment."""
    return f"torch>={torch}"


def target(torch: str) -> str:
    """The version as torch's headers take it (TORCH_TARGET_VERSION): 0x020a000000000000."""
    major, minor = map(int, torch.split("."))
    return f"{major << 56 | minor << 48:#018x}"


def is_stable(symbol: str) -> bool:
    """Whether it is the name of a function of the stable ABI, whose names are C's."""
    return _STABLE.fullmatch(symbol) is not None
