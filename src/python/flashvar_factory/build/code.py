"""Whether two contents of a source file are the same code.

So a comment can be rewritten without new GPU runs. Numbers of lines are no part of the code: what
asks for them, as __LINE__ does, does not decide kernels.
"""

from __future__ import annotations

import ast
import re
from pathlib import PurePath
from typing import Final

from flashvar.errors import ConfigurationError
from flashvar_factory.config import toml_table

__all__ = ["CPP", "is_same"]

CPP: Final = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"})
# Tokens that are kept come first: inside them // and /* begin no comment, and spaces count. Numbers
# are among them because of their ' separators, and line splices because an empty line after one
# ends a macro.
_CPP_TOKEN: Final = re.compile(
    rb"""
    (?P<kept> [0-9](?:[eEpP][+-]|['\w.])* | (?:u8|[uUL])?R"(?P<end>[^(\s]{0,16})\(.*?\)(?P=end)"
            | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | [A-Za-z_]\w*
            | \\[ \t]*\n )
    | (?: \s | //(?:\\[ \t]*\n|[^\n])* | /\*.*?\*/ )+
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT: Final = re.compile(rb"/\*.*?\*/|//(?:\\[ \t]*\n|[^\n])*", re.DOTALL)
# Files with // in a header's name, or with a message of the preprocessor, are compared whole.
# Of CMake, too, tokens in which # begins no comment come first: escapes, and arguments in quotes or
# brackets.
_CMAKE_TOKEN: Final = re.compile(
    rb"""
    (?P<kept> \\. | "(?:\\.|[^"\\])*" | (?<!\#)\[(?P<level>=*)\[.*?\](?P=level)\] )
    | (?: \s | \#\[(?P<hidden>=*)\[.*?\](?P=hidden)\] | \#[^\n]* )+
    """,
    re.VERBOSE | re.DOTALL,
)
_UNREAD: Final = re.compile(rb"include[^\"]{0,80}?<[^>\n]*/[/*]|#[ \t]*(?:error|warning)")


def is_same(name: str, one: bytes, other: bytes) -> bool:
    """Whether two contents of a file are the same code.

    Of C++, CUDA and CMake, comments, empty lines and indentation may differ; of Python also
    docstrings, and all that syntax trees do not have; of TOML all but the values. Any other file is
    compared as it is.
    """
    return one == other or _code(name, one) == _code(name, other)


def _code(name: str, content: bytes) -> bytes:
    suffix = PurePath(name).suffix
    if suffix in CPP and not _UNREAD.search(content):
        return _CPP_TOKEN.sub(_shortened, content.replace(b"\r\n", b"\n")).strip()
    if suffix == ".py":
        try:
            return _of_python(content)
        except (SyntaxError, ValueError):
            return content
    if suffix == ".cmake" or PurePath(name).name == "CMakeLists.txt":
        return _CMAKE_TOKEN.sub(_shortened, content).strip()
    if suffix == ".toml":
        try:
            return repr(toml_table.loads(content.decode(), name)).encode()
        except (UnicodeDecodeError, ConfigurationError):
            return content
    return content


def _shortened(match: re.Match[bytes]) -> bytes:
    """A kept token, or what stands for spaces and comments: a line end or a space.

    Line ends are told from spaces because they end directives.
    """
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
    """Whether a statement is a literal text, as docstrings are: none is read as data."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
