"""Calls of flashvar that one binary alone answers, beside others in the same process.

FLASHVAR_FORCE_ARCH is read when a kind of call is decided, and the decision is kept. So the
decisions made under it are kept apart, and are in place only while such a call is made: two
binaries can take turns, and a round costs both the same.
"""

from __future__ import annotations

import os
from types import ModuleType, TracebackType
from typing import Any, Final

_VARIABLE: Final = "FLASHVAR_FORCE_ARCH"
_KEPT: Final = ("_plans", "_backward_plans")  # of flashvar.ops.attention.plan


class OneBinary:
    """`with OneBinary("sm_XY")():` holds calls with backend "cuda" to the binary of sm_XY."""

    def __init__(self, architecture: str) -> None:
        """Nothing is decided yet; `architecture` is as FLASHVAR_FORCE_ARCH takes it."""
        from flashvar.ops.plans import Plans

        self._architecture = architecture
        self._mine: dict[str, Any] = {name: Plans() for name in _KEPT}
        self._theirs: dict[str, Any] = {}
        self._variable: str | None = None

    def __call__(self) -> OneBinary:
        """Itself: it may be entered any number of times, one after the other."""
        return self

    def __enter__(self) -> None:
        """Put this binary's decisions in the place of the others."""
        plans = _plans()
        self._variable = os.environ.get(_VARIABLE)
        self._theirs = {name: getattr(plans, name) for name in _KEPT}
        os.environ[_VARIABLE] = self._architecture
        _put(plans, self._mine)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the others back."""
        _put(_plans(), self._theirs)
        if self._variable is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = self._variable


def _plans() -> ModuleType:
    from flashvar.ops.attention import plan as attention_plan

    return attention_plan


def _put(plans: ModuleType, kept: dict[str, Any]) -> None:
    from flashvar.selection import resolve

    for name, decisions in kept.items():
        setattr(plans, name, decisions)
    resolve.choose.cache_clear()  # by backend alone: what it holds was decided for the others
