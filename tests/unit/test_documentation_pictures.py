"""Pictures stand in the order of a reader, each with its words; none is left without them."""

from __future__ import annotations

import hashlib
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def page(root: Path, *names: str) -> str:
    folder = root / "docs" / "pictures"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    return str(import_module("pictures").pictures(root))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))


def test_they_are_in_order_and_lead_to_their_outlines(tmp_path: Path) -> None:
    found = page(tmp_path, "sizes.png", "h200-backward.png", "h200-forward.png", "h200-forward.svg")
    images = [line for line in found.splitlines() if line.startswith("[")]
    assert [image.partition("](")[2] for image in images] == [
        "pictures/h200-forward.png)](pictures/h200-forward.svg)",
        "pictures/h200-backward.png)](pictures/h200-backward.png)",
        "pictures/sizes.png)](pictures/sizes.png)",
    ]
    assert found.startswith("The forward: rates by length")


PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_drawn_from_the_newest_record(picture: Path) -> None:
    source = re.search(r"<dc:source>(.+)</dc:source>", picture.read_text(encoding="utf-8"))
    assert source is not None
    for name, drawn in (one.split() for one in source[1].split(", ")):
        (file,) = (ROOT / "benchmarks").rglob(name)
        assert hashlib.sha256(file.read_bytes()).hexdigest().startswith(drawn), (
            f"{picture.name}: expected one of this {name}, found an older one: draw it again"
        )


def test_a_picture_without_words_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected pictures of forward, .*found h200-else\.png"):
        page(tmp_path, "h200-else.png")
