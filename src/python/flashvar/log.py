"""Shows flashvar's log on stderr, at the level that FLASHVAR_LOG names."""

from __future__ import annotations

import logging
import os

_LEVELS = ("debug", "info", "warning", "error")


def _configure(level: str) -> None:
    logger = logging.getLogger("flashvar")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    if level in _LEVELS:
        logger.setLevel(level.upper())
    else:  # importing never raises
        logger.warning("FLASHVAR_LOG: expected one of %s, found %r", ", ".join(_LEVELS), level)


_configure(os.environ.get("FLASHVAR_LOG", "").lower())
