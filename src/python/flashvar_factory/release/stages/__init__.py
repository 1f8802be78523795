"""The stages of a release in their order, one module each; `steps` says what a stage does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from flashvar_factory.release.pipeline import Stage
from flashvar_factory.release.stages import (
    audit,
    index,
    reproduce,
    sbom,
    smoke,
    variants,
    wheels,
)

STAGES: Final[Mapping[str, Stage]] = MappingProxyType(
    {
        "wheels": wheels,
        "audit": audit,
        "sbom": sbom,
        "reproduce": reproduce,
        "index": index,
        "variants": variants,
        "smoke": smoke,
    }
)
