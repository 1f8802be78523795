"""The pages of the index as HTML (PEP 503), for any web server and for file:// addresses."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from flashvar_factory.index.entries import Entry

MARK: Final = '<meta name="pypi:repository-version" content="1.1">'


def project(name: str, entries: Iterable[Entry]) -> str:
    """The page of one project."""
    return _document(f"Links for {name}", [_anchor(entry) for entry in entries])


def root(names: Iterable[str]) -> str:
    """The page that lists the projects."""
    anchors = (f'<a href="{quote(name)}/">{html.escape(name)}</a>' for name in sorted(names))
    return _document("Simple index", anchors)


def _anchor(entry: Entry) -> str:
    attributes = {"href": f"{quote(entry.file)}#sha256={entry.sha256}"}
    if entry.requires_python is not None:
        attributes["data-requires-python"] = entry.requires_python
    if entry.metadata_sha256 is not None:
        attributes["data-core-metadata"] = f"sha256={entry.metadata_sha256}"
    if entry.yanked is not None:
        attributes["data-yanked"] = entry.yanked
    written = "".join(f' {key}="{html.escape(value)}"' for key, value in attributes.items())
    return f"<a{written}>{html.escape(entry.file)}</a>"


def _document(title: str, anchors: Iterable[str]) -> str:
    lines = "".join(f"    {anchor}<br>\n" for anchor in anchors)
    return f"""\
<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    {MARK}
    <title>{html.escape(title)}</title>
  </head>
  <body>
    <h1>{html.escape(title)}</h1>
{lines}  </body>
</html>
"""
