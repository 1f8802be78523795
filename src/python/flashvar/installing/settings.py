"""The environment variables that pip and uv run with: an allowlist of the user's, and our own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from flashvar.installing.source import WheelSource

# Settings for reaching a source and caching downloads. Any other may add a source, select other
# wheels, or install to another place.
_KEPT_SETTINGS: Final = {
    "PIP": frozenset(
        {
            *("CACHE_DIR", "NO_CACHE_DIR", "CERT", "CLIENT_CERT", "PROXY", "TRUSTED_HOST"),
            *("KEYRING_PROVIDER", "RETRIES", "RESUME_RETRIES", "TIMEOUT"),
        }
    ),
    "UV": frozenset(
        {
            *("CACHE_DIR", "NO_CACHE", "CREDENTIALS_DIR", "KEYRING_PROVIDER", "INSECURE_HOST"),
            *("NATIVE_TLS", "SYSTEM_CERTS", "OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
            *("HTTP_TIMEOUT", "REQUEST_TIMEOUT", "HTTP_CONNECT_TIMEOUT", "HTTP_RETRIES"),
            *("CONCURRENT_DOWNLOADS", "LOCK_TIMEOUT"),
        }
    ),
}
# Settings that name the sources; they count only where the command names none.
_SOURCES: Final = frozenset(
    {
        *("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "INDEX", "DEFAULT_INDEX"),
        *("INDEX_STRATEGY", "CONFIG_FILE", "NO_CONFIG"),
    }
)
_TRUE: Final = frozenset({"1", "true", "yes", "y", "on", "t"})


def may_change_the_system(environ: Mapping[str, str]) -> bool:
    """Whether pip or uv may install into a Python that the system manages."""
    values = (environ.get(f"{tool}_BREAK_SYSTEM_PACKAGES", "") for tool in _KEPT_SETTINGS)
    return any(value.lower() in _TRUE for value in values)


def variables(environ: Mapping[str, str], source: WheelSource) -> dict[str, str]:
    """The environment of a call of pip or uv. A named source is the only one that they ask."""
    kept = {key: value for key, value in environ.items() if _is_kept(key, source)}
    own = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONSAFEPATH": "1"}
    # A name in an address is UTF-8, whatever the locale is.
    own["PYTHONUTF8"] = "1"
    # A warning of pip's own code is no failure, whatever warnings are in the user's tests.
    own["PYTHONWARNINGS"] = ""
    # Overrides a configuration file that still counts: the requirement has no hash yet.
    own["PIP_REQUIRE_HASHES"] = "0"
    if source.is_named:
        own["PIP_CONFIG_FILE"] = os.devnull
    if source.index is not None:  # not in the command line, which every user can read
        # uv before 0.4.23 reads UV_INDEX_URL alone; without it, it would ask PyPI.
        names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
        own |= dict.fromkeys(names, source.index)
    if may_change_the_system(environ):
        own |= {f"{tool}_BREAK_SYSTEM_PACKAGES": "1" for tool in _KEPT_SETTINGS}
    return {**kept, **own}


def _is_kept(key: str, source: WheelSource) -> bool:
    tool, _, name = key.partition("_")
    if tool not in _KEPT_SETTINGS or not name:
        return True
    is_password = tool == "UV" and name.startswith("INDEX_")  # of a source
    names_source = name in _SOURCES or is_password
    return name in _KEPT_SETTINGS[tool] or (names_source and not source.is_named)
