"""What is said where a call takes another way than flashvar: once in the log, or an error."""

from __future__ import annotations

import logging
from typing import Final

from flashvar.errors import BackendUnavailableError
from flashvar.selection.request import Overrides

__all__ = ["decline"]

_log: Final = logging.getLogger("flashvar")
_logged: Final[set[tuple[str, str]]] = set()


def decline(where: str, reason: str, instead: str) -> None:
    """Say, once, why a call takes another way than flashvar.

    Raises:
        BackendUnavailableError: FLASHVAR_STRICT=1 makes it an error.
    """
    if Overrides.from_environment().strict:
        raise BackendUnavailableError(
            f"{where}: expected a call that flashvar serves (FLASHVAR_STRICT=1), found {reason}: "
            f"leave FLASHVAR_STRICT out for {instead}"
        )
    if (where, reason) not in _logged:
        _logged.add((where, reason))
        _log.warning("%s: %s; such calls take %s", where, reason, instead)
