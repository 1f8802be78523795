"""What a compiler reads of a source file: its code, without comments and empty lines.

So a comment can be rewritten without a new binary, and without new GPU runs.
"""

from __future__ import annotations

import ast
import re
from pathlib import PurePath
from typing import Final

__all__ = ["of"]

_CPP: Final = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"})
# Tokens in which // and /* begin no comment come first: numbers, because of their ' separators.
_CPP_TOKEN: Final = re.compile(
    rb"""
    (?P<kept> [0-9](?:[eEpP][+-]|['\w.])* | (?:u8|[uUL])?R"(?P<end>[^(\s]{0,16})\(.*?\)(?P=end)"
            | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | [A-Za-z_]\w* )
    | //(?:\\\n|[^\n])* | /\*.*?\*/
    """,
    re.VERBOSE | re.DOTALL,
)


def of(name: str, content: bytes) -> bytes:
    """The code of a file, to be compared; what is neither C++, CUDA nor Python is returned whole.

    Two files of equal code may differ in comments, empty lines, and spaces around a line; Python
    files in docstrings and in all that its syntax tree does not have.
    """
    suffix = PurePath(name).suffix
    if suffix in _CPP:
        without = _CPP_TOKEN.sub(lambda match: match["kept"] or b" ", content)
        lines = (line.strip() for line in without.splitlines())
        return b"\n".join(line for line in lines if line)
    if suffix == ".py":
        try:
            return _of_python(content)
        except (SyntaxError, ValueError):
            return content
    return content


def _of_python(content: bytes) -> bytes:
    tree = ast.parse(content)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a literal text, as docstrings are."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
