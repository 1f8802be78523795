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
# What is kept comes first: in it // and /* begin no comment, and spaces count. Numbers, because of
# their ' separators; a line that goes on, because an empty line after it ends a macro.
_CPP_TOKEN: Final = re.compile(
    rb"""
    (?P<kept> [0-9](?:[eEpP][+-]|['\w.])* | (?:u8|[uUL])?R"(?P<end>[^(\s]{0,16})\(.*?\)(?P=end)"
            | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | [A-Za-z_]\w*
            | \#[ \t]*include[ \t]*<[^>\n]*> | \\\n )
    | (?: \s | //(?:\\\n|[^\n])* | /\*.*?\*/ )+
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT: Final = re.compile(rb"/\*.*?\*/|//(?:\\\n|[^\n])*", re.DOTALL)


def of(name: str, content: bytes) -> bytes:
    """The code of a file, to be compared; what is neither C++, CUDA nor Python is returned whole.

    Two files of equal code may differ in comments, empty lines and indentation; Python files in
    docstrings, and in all that their syntax trees do not have.
    """
    suffix = PurePath(name).suffix
    if suffix in _CPP:
        return _CPP_TOKEN.sub(_shortened, content.replace(b"\r\n", b"\n")).strip()
    if suffix == ".py":
        try:
            return _of_python(content)
        except (SyntaxError, ValueError):
            return content
    return content


def _shortened(match: re.Match[bytes]) -> bytes:
    """A token as it is; of spaces and comments whether the line ends, which decides directives."""
    kept = match["kept"]
    if kept is not None:
        return kept
    return b"\n" if b"\n" in _COMMENT.sub(b"", match[0]) else b" "


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
