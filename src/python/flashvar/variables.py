"""The names of flashvar's environment variables, and of those that nearly have one of them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Final

_PREFIX: Final = "FLASHVAR_"
# What follows the prefix; docs/environment.md says what each does.
NAMES: Final = ("BACKEND", "CACHE_DIR", "FORCE_ARCH", "INDEX", "LIB_DIR", "LOG", "STRICT")
# How alike a name must be, from 0 to 1: the variables of a user's own scripts are none of ours.
_CUTOFF: Final = 0.7
# Kubernetes and linked containers set these for a service, such as one called `flashvar-index`.
_OF_SERVICE: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")

_log: Final = logging.getLogger("flashvar")


def misspelled(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that flashvar does not read, each with the nearest one that it reads."""
    known = {_PREFIX + name for name in NAMES}
    unknown = [one for one in environ if one.upper().startswith(_PREFIX) and one not in known]
    if not unknown:
        return {}
    from difflib import get_close_matches

    found = {}
    for variable in unknown:
        name = variable.upper().removeprefix(_PREFIX)
        if _OF_SERVICE.search(name):
            continue
        longer = [one for one in NAMES if name.startswith(f"{one}_")]
        near = longer or get_close_matches(name, NAMES, n=1, cutoff=_CUTOFF)
        if near:
            found[variable] = _PREFIX + near[0]
    return found


@cache
def warn_of_misspelled() -> None:
    """Say it in the log, once per process: what the user wants is not what runs."""
    for variable, near in misspelled(os.environ).items():
        _log.warning("%s is not a variable of flashvar: did you mean %s?", variable, near)
