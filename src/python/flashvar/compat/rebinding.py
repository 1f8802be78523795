"""Functions of another package replaced by ours, in every module that has bound them by name."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Rebinding", "rebindable", "take_place_of", "words_of"]


def words_of(error: Exception, package: str) -> str:
    """What was found in place of a package, from the error of its import."""
    missing = isinstance(error, ModuleNotFoundError) and error.name == package
    return "none" if missing else str(error)


class Rebinding:
    """Replacements that `restore` undoes completely."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pairs: tuple[tuple[Any, Any], ...] = ()

    def replace(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Replace each first object by the second, which is bound nowhere yet.

        Replacements of an earlier call are undone.
        """
        with self._lock:
            self.restore()
            self._pairs = tuple(pairs)
            _rebind(self._pairs)

    def restore(self) -> None:
        """Undo `replace`, also in modules that were imported since; nothing without it."""
        with self._lock:
            _rebind(tuple((ours, theirs) for theirs, ours in self._pairs))
            self._pairs = ()


def _rebind(pairs: tuple[tuple[Any, Any], ...]) -> None:
    """Bind the second object of each pair to every global name that is bound to the first."""
    wanted = {id(old): new for old, new in pairs}
    if not wanted:
        return
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):  # None in sys.modules blocks an import
            continue
        if wanted.keys().isdisjoint(map(id, list(names.values()))):  # as most, of thousands
            continue
        for name, value in list(names.items()):
            if id(value) in wanted:
                names[name] = wanted[id(value)]


def rebindable(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same calls and signature that no module has bound, for an original."""

    @functools.wraps(function)
    def rebound(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    take_place_of(original, rebound)
    return rebound


def take_place_of(original: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Give a function the place where pickle finds the original, and so what is bound there."""
    function.__module__, function.__qualname__ = original.__module__, original.__qualname__
