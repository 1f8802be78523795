"""The commands that install a binary of this version of flashvar."""

from __future__ import annotations

from flashvar._version import __version__

# Whether the wheels are on PyPI. If not, users build them in a checkout.
PUBLISHED: bool = False


def install(extra: str) -> str:
    """The command that installs the binary of an extra beside the installed flashvar."""
    return _from_wheels(extra, f'"flashvar[{extra}]"')


def install_runtime() -> str:
    """The command that installs flashvar itself, without a binary."""
    if PUBLISHED:
        return "`pip install flashvar`"
    return "`pip install .` in a checkout"


def install_again(distribution: str, kind: str) -> str:
    """The command that replaces an installed binary by the one of exactly this version."""
    requirement = f"--force-reinstall --no-deps {distribution}=={public(__version__)}"
    return _from_wheels(kind, requirement)


def build(words: str, wheel: str | None) -> str:
    """The command that builds the kernels of a selection, and replaces an installed wheel.

    Without a wheel they are added to the development build.
    """
    if wheel is None:
        return f"nox -s build-dev -- {words}"
    return _built(words, f"--force-reinstall --no-deps {wheel}=={public(__version__)}")


def public(version: str) -> str:
    """A version without its local label."""
    return version.partition("+")[0]


def _from_wheels(kind: str, requirement: str) -> str:
    return f"pip install {requirement}" if PUBLISHED else _built(kind, requirement)


def _built(words: str, requirement: str) -> str:
    # Nothing but what was made: on an index the name may be anybody's.
    source = "--no-index --find-links dist"
    return f"nox -s wheels -- {words} && pip install {source} {requirement}"
