"""Reports that a call falls back from flashvar: once in the log, or as an error."""

from __future__ import annotations

import logging
from typing import Final

from flashvar.errors import BackendUnavailableError
from flashvar.selection.request import Overrides

__all__ = ["report_fallback"]

_log: Final = logging.getLogger("flashvar")
_logged: Final[set[tuple[str, str]]] = set()


def report_fallback(where: str, reason: str, instead: str) -> None:
    """Log, once, the reason why a call falls back from flashvar to `instead`.

    Raises:
        BackendUnavailableError: FLASHVAR_STRICT=1, which makes a fallback an error.
    """
    if Overrides.from_environment().strict:
        raise BackendUnavailableError(
            f"{where}: expected a call that flashvar supports (FLASHVAR_STRICT=1), found {reason}: "
            f"leave FLASHVAR_STRICT out for {instead}"
        )
    if (where, reason) not in _logged:
        _logged.add((where, reason))
        _log.warning("%s: %s; such calls take %s", where, reason, instead)
