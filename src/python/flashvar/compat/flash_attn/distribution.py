"""The metadata of a distribution `flash-attn`, for packages that query importlib.metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from typing import Any, Final, NoReturn

_NAME: Final = "flash_attn"


class StandIn(Distribution):
    """A distribution without files."""

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n",
            "top_level.txt": f"{_NAME}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """The text of a metadata file; None if there is no such file."""
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> NoReturn:
        """Raise: the distribution has no files."""
        raise FileNotFoundError(
            f"flashvar's stand-in for flash-attn has no files, asked for {path}"
        )


class Finder(DistributionFinder):
    """Finds the distribution, before an installed flash-attn, and no modules."""

    def __init__(self, version: str) -> None:
        self._found = StandIn(version)

    def find_spec(self, *_: object) -> None:
        """None: `install` puts the modules into sys.modules."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """The distribution, if it is searched by name or all distributions are listed."""
        name = None if context is None else context.name
        if name is None or re.sub(r"[-_.]+", "_", name).lower() == _NAME:
            yield self._found
