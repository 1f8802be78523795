"""Which command brings a binary that fits this flashvar? It depends on where there are wheels."""

from __future__ import annotations

from flashvar._version import __version__

# Whether pip finds flashvar by itself. Until then whoever wants a wheel makes it, in a checkout.
PUBLISHED: bool = False


def install(extra: str) -> str:
    """The command that adds the binary of an extra to the flashvar that is installed."""
    return _from_wheels(extra, f'"flashvar[{extra}]"')


def install_again(distribution: str, architecture: str) -> str:
    """The command that replaces a binary by that of exactly this version, whatever is there."""
    asked = f"--force-reinstall --no-deps {distribution}=={public(__version__)}"
    return _from_wheels(architecture, asked)


def public(version: str) -> str:
    """A version without its local label."""
    return version.partition("+")[0]


def _from_wheels(architecture: str, asked: str) -> str:
    if PUBLISHED:
        return f"pip install {asked}"
    return f"nox -s wheels -- {architecture} && pip install --find-links dist {asked}"
