"""The commands that a page types in a project of its own kernels."""

from __future__ import annotations

from pathlib import Path

from documented import ROOT, Block, blocks

PAGE = Path("docs", "other-kernels.md")


def typed() -> Block:
    """The block in a project that is there; test_second_project.py types it, and no other test."""
    (block,) = (one for one in blocks(ROOT / PAGE) if one.mark("continued") is not None)
    return block
