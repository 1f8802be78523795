"""Modules of ours under the names of another package, in this process."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from flashvar.compat.distribution import Finder
from flashvar.compat.not_provided import MissingModuleFinder
from flashvar.errors import ConfigurationError, IntegrationError

__all__ = ["StandIn", "modules_of"]


class StandIn:
    """A package's modules, the metadata of its distributions, and refusals of what is missing."""

    def __init__(self, package: str, finder: Finder, missing_modules: MissingModuleFinder) -> None:
        self._package = package
        self._finder: Final = finder
        self._missing_modules: Final = missing_modules
        self._lock = threading.RLock()
        self._modules: dict[str, ModuleType] = {}
        self._replaced: dict[str, ModuleType] = {}

    @property
    def stands(self) -> bool:
        """Whether imports of the package find our modules."""
        found = sys.modules.get(self._package)
        return found is not None and found is self._modules.get(self._package)

    def put(self, modules: Mapping[str, ModuleType]) -> None:
        """Let imports find these modules, in the place of any that are imported already."""
        with self._lock:
            if self.stands:
                return
            begin = f"{self._package}."
            others = [x for x in sys.modules if x == self._package or x.startswith(begin)]
            self._replaced = {name: sys.modules.pop(name) for name in others}
            sys.meta_path.insert(0, self._finder)
            # Appended last: it must not hide modules that are installed.
            sys.meta_path.append(self._missing_modules)
            self._modules = dict(modules)
            sys.modules.update(self._modules)

    def put_where_absent(
        self, distribution: str, make: Callable[[], Mapping[str, ModuleType]]
    ) -> None:
        """As `put`, with what `make` returns, where the package is not installed.

        Raises:
            ConfigurationError: it is installed, or imported from elsewhere.
        """
        with self._lock:
            if self.stands:
                return
            there = sys.modules.get(self._package) or importlib.util.find_spec(self._package)
            if there is not None:
                raise ConfigurationError(
                    f"provide() must come where {distribution} is not installed, found a package "
                    f"{self._package}: call install(), which replaces its functions, or uninstall "
                    "it"
                )
            self.put(make())

    def refuse(self, function: str, distribution: str) -> None:
        """Refuse a function that is for the installed package while our modules stand in for it.

        Raises:
            IntegrationError: `provide` was called.
        """
        if self.stands:
            raise IntegrationError(
                f"{function}() needs {distribution} itself, found flashvar's stand-in for it "
                f"(provide()): leave {function}() out, the stand-in's functions are flashvar's"
            )

    def remove(self) -> None:
        """Undo `put`; nothing without it."""
        with self._lock:
            if not self.stands:
                return
            sys.meta_path.remove(self._finder)
            sys.meta_path.remove(self._missing_modules)
            for name in self._modules:
                sys.modules.pop(name, None)
            sys.modules.update(self._replaced)
            self._modules, self._replaced = {}, {}


def modules_of(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """New modules of these names and contents, those inside a package bound in it.

    A name that its package also gives to something else stays that, as in packages that call a
    function like its module.
    """
    made: dict[str, ModuleType] = {}
    for name in sorted(contents):
        module = made[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        module.__dict__.update(contents[name])
        package, _, last = name.rpartition(".")
        if package and last not in contents[package]:
            setattr(made[package], last, module)
    return made
