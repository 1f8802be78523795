"""A program of a test: a script of the shell."""

from __future__ import annotations

from pathlib import Path


def script(path: Path, text: str) -> Path:
    """Write a program that runs a text; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
