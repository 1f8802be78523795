"""Checks that a tag names the version of the sources, and is on their commit."""

from __future__ import annotations

from pathlib import Path

from packaging.version import InvalidVersion, Version

from flashvar_factory.build import source
from flashvar_factory.errors import ReleaseError


def require(tag: str, root: Path, release: str, revision: str | None) -> None:
    """ReleaseError where `tag` is not the one of version `release` on commit `revision`."""
    if not _is_public(release):
        raise ReleaseError(
            f"expected a version that an index takes, such as 1.2.3, found {release!r}; correct "
            "the version file, commit, and tag that"
        )
    if tag != f"v{release}":
        raise ReleaseError(
            f"expected the tag v{release} of the version file, found {tag}; one of them is wrong: "
            "commit another version, or push another tag"
        )
    commit = source.tagged(root, tag)
    if commit is None:
        raise ReleaseError(
            f"expected the tag {tag} in this clone, found none; git fetch --tags, or make it: "
            f"git tag -s {tag}"
        )
    if commit != revision:
        raise ReleaseError(
            f"expected {tag} on the commit that is released, {revision}, found it on {commit}; "
            f"git checkout {tag}"
        )


def _is_public(release: str) -> bool:
    try:
        version = Version(release)
    except InvalidVersion:
        return False
    return str(version) == release and version.local is None
