"""The metadata of a distribution that is stood in for, for queries of importlib.metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from typing import Any, NoReturn


class EmptyDistribution(Distribution):
    """A distribution without files."""

    def __init__(self, name: str, package: str, version: str) -> None:
        self._name = name
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """The text of a metadata file; None if there is no such file."""
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> NoReturn:
        """Raise: the distribution has no files."""
        raise FileNotFoundError(
            f"flashvar's stand-in for {self._name} has no files, asked for {path}"
        )


class Finder(DistributionFinder):
    """Finds distributions of one package, before installed ones, and no modules."""

    def __init__(self, names: Iterable[str], package: str, version: str) -> None:
        self._found = {_normal(name): EmptyDistribution(name, package, version) for name in names}

    def find_spec(self, *_: object) -> None:
        """None: modules are in sys.modules."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """The distribution that is searched by name, or all of them."""
        name = None if context is None else context.name
        if name is None:
            yield from self._found.values()
        elif _normal(name) in self._found:
            yield self._found[_normal(name)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
