"""Drawings of the kernels' pages fit a phone, with words that can be read there."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))
DRAWINGS = import_module("drawings").DRAWINGS
sys.path.pop(0)
WIDTH = 460  # of which a phone of 390 pixels makes 358, and of letters of 13 a little over 10
LETTER = 6.9  # of 13, on average
STARTS = {"start": 0.0, "middle": 0.5, "end": 1.0}


def outside(svg: str) -> list[str]:
    """Words of a drawing that do not end before its edge."""
    root = ElementTree.fromstring(svg)[0]
    assert root.get("viewBox", "").split()[:3] == ["0", "0", str(WIDTH)]
    height = float(root.get("viewBox", "").split()[3])
    found = []
    for text in root.iter("text"):
        says, length = text.text or "", LETTER * len(text.text or "")
        x = float(text.get("x", "")) - length * STARTS[text.get("text-anchor", "start")]
        inside = x >= 0 and x + length <= WIDTH and 10 <= float(text.get("y", "")) <= height - 4
        found += [] if inside else [says]
    return found


@pytest.mark.parametrize("name", DRAWINGS)
def test_words_are_inside(name: str) -> None:
    assert outside(str(DRAWINGS[name]())) == []


def test_words_outside_are_found() -> None:
    drawing = import_module("svg").Drawing(50, "a test")
    drawing.words(200, 20, "as long as a line that does not fit here")
    drawing.words(450, 20, "ends here", "end")
    drawing.words(4, 60, "below")
    assert outside(str(drawing)) == ["as long as a line that does not fit here", "below"]


def test_drawings_take_the_width_of_the_page() -> None:
    style = (ROOT / "docs" / "style.css").read_text(encoding="utf-8")
    assert re.search(r"\.drawing svg \{[^}]*width: 100%", style)
    assert "min-width" not in str(DRAWINGS["ring"]())
