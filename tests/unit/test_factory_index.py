"""The static index: pages that pip reads, from wheels that exist."""

from __future__ import annotations

import hashlib
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flashvar.errors import PackagingError
from flashvar_factory import index


class Anchors(HTMLParser):
    """Every anchor's attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found and not self.found[-1][1]:
            self.found[-1] = (self.found[-1][0], data)


def anchors(page: Path) -> list[tuple[dict[str, str | None], str]]:
    parser = Anchors()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def wheel(folder: Path, name: str, version: str, requires_python: str | None = ">=3.10") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires_python:
        metadata += f"Requires-Python: {requires_python}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
    return path


def test_pages(tmp_path: Path) -> None:
    path = wheel(tmp_path / "dist", "flashvar_sm89", "1.0+hdim64", ">=3.10,<4")
    wheel(tmp_path / "dist", "flashvar", "1.0", None)
    assert index.write(tmp_path / "dist", tmp_path / "site") == ["flashvar", "flashvar-sm89"]
    assert [(a["href"], text) for a, text in anchors(tmp_path / "site" / "index.html")] == [
        ("flashvar/", "flashvar"),
        ("flashvar-sm89/", "flashvar-sm89"),
    ]
    page = tmp_path / "site" / "flashvar-sm89" / "index.html"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    address = f"flashvar_sm89-1.0%2Bhdim64-py3-none-any.whl#sha256={digest}"
    assert anchors(page) == [({"href": address, "data-requires-python": ">=3.10,<4"}, path.name)]
    assert "data-requires-python=&quot;" not in page.read_text(encoding="utf-8")
    assert "&gt;=3.10,&lt;4" in page.read_text(encoding="utf-8")
    assert (page.parent / path.name).read_bytes() == path.read_bytes()


def test_several_versions_side_by_side(tmp_path: Path) -> None:
    for version in ("1.0", "1.1"):
        wheel(tmp_path / "dist", "flashvar", version)
    index.write(tmp_path / "dist", tmp_path / "site")
    texts = [text for _, text in anchors(tmp_path / "site" / "flashvar" / "index.html")]
    assert texts == ["flashvar-1.0-py3-none-any.whl", "flashvar-1.1-py3-none-any.whl"]


def test_no_wheels(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match="expected wheels, found none"):
        index.write(tmp_path, tmp_path / "site")


def test_not_a_wheel(tmp_path: Path) -> None:
    (tmp_path / "flashvar-1.0-py3-none-any.whl").write_bytes(b"PK broken")
    with pytest.raises(PackagingError, match="expected a wheel with one METADATA"):
        index.write(tmp_path, tmp_path / "site")


def test_names_are_normalized() -> None:
    assert index.normalized("Flash.Var__SM80") == "flash-var-sm80"
