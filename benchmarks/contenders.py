"""The names of all contenders, as `--contender` takes them and the JSON has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch.nn.attention import SDPBackend

from benchmarks import peers
from benchmarks.contender import FEATURES, Contender, flashvar, flex, sdpa
from benchmarks.one_binary import OneBinary
from benchmarks.ratios import REFERENCE
from benchmarks.report import BenchmarkError

CONTENDERS: Final[dict[str, Contender]] = {
    REFERENCE: Contender(sdpa(SDPBackend.FLASH_ATTENTION), features=frozenset({"dropout"})),
    "sdpa-cudnn": Contender(sdpa(SDPBackend.CUDNN_ATTENTION)),
    "sdpa-efficient": Contender(sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    "flex": Contender(flex),
    "flash-attn": Contender(peers.flash_attn),
    "flash-attn-3": Contender(peers.flash_attn_3),
    "flash-attn-4": Contender(peers.flash_attn_4),
    "flashinfer": Contender(peers.flashinfer),
    "xformers": Contender(peers.xformers),
    "sageattention": Contender(peers.sageattention),
    "flashvar-cuda": Contender(flashvar("cuda"), features=FEATURES),
    "flashvar-triton": Contender(flashvar("triton"), features=FEATURES),
    "flashvar-reference": Contender(flashvar("reference"), features=FEATURES),
}
# flashvar-smXY is the binary of that architecture alone; on another device, its PTX.
_BINARY: Final = "flashvar-sm"


def named(names: Sequence[str]) -> dict[str, Contender]:
    """The contenders of these names.

    Raises:
        BenchmarkError: for one that is not known.
    """
    for name in names:
        architecture = name.removeprefix(_BINARY)
        if name not in CONTENDERS and (architecture == name or not architecture.isdecimal()):
            raise BenchmarkError(
                f"--contender must be one of {', '.join(CONTENDERS)} or {_BINARY}XY, "
                f"found {name!r}: correct it"
            )
    return {
        name: CONTENDERS.get(name)
        or Contender(flashvar("cuda"), OneBinary(f"sm_{name.removeprefix(_BINARY)}"), FEATURES)
        for name in names
    }
