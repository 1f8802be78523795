"""Checks that what is released is a commit, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

from flashvar_factory.build import source
from flashvar_factory.errors import CheckoutError

_SHOWN = 10


def revision(root: Path) -> str:
    """The commit of the checkout at `root`; CheckoutError if it is none, or has changes."""
    found, dirty = source.stated(root)
    if found is None:
        raise CheckoutError(
            f"{root}: expected a git checkout, found none; a release names the commit it is made of"
        )
    if dirty:
        changes = source.changes(root)
        shown = "\n".join(f"  {change}" for change in changes[:_SHOWN])
        more = f"\n  and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise CheckoutError(
            f"{root}: expected a clean checkout, found changes\n{shown}{more}\n"
            "commit or stash them; to try a build as it is, use `wheels`"
        )
    return found
