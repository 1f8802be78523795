"""README.md as a package index shows it, with addresses in place of the repository's paths.

An index resolves no relative link. With `Repository` in [project.urls] each becomes absolute, at
the tag of the version; without it the words of a link stay, and pictures go. A plugin of the build
backend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flashvar_factory.config import schema, version

FILE_NAME: Final = "README.md"
TYPE: Final = "text/markdown"
# Code, whose brackets are none of a link; or a link or a picture.
_LINK: Final = re.compile(
    r"^```.*?^```$|`[^`]+`|(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def text(folder: Path, urls: Mapping[str, str], release: str) -> str:
    """The README of a project, for its page on an index."""
    repository = urls.get("Repository", "").rstrip("/")

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or target.startswith("#") or ":" in target:
            return match[0]
        if not repository:
            return "" if match["picture"] else match["words"]
        kind = "raw" if match["picture"] else "blob"
        address = f"{repository}/{kind}/v{release}/{target}"
        return f"{match['picture']}[{match['words']}]({address})"

    return _LINK.sub(absolute, (folder / FILE_NAME).read_text(encoding="utf-8"))


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """The hook of scikit-build-core's [[tool.dynamic-metadata]]; it runs in the project's root."""
    if settings:
        raise ValueError(f"expected no settings, found {sorted(settings)}")
    root = Path.cwd()
    release = version.read(schema.read(root / schema.FILE_NAME), root)
    return {"readme": {"text": text(root, project.get("urls", {}), release), "content-type": TYPE}}
