"""Where a line may break within inline code: between parts of a long name, never in an option."""

from __future__ import annotations

import re

CODE = re.compile(r"<pre\b.*?</pre>|(<code\b[^>]*>)(.*?)(?=</code>)", re.DOTALL)
BEFORE_BRACKET = re.compile(r"(?<=</code>)\s+(?=\))")  # which mkdocstrings writes there
WORD = re.compile(r"<[^>]*>|[^\s<]+")  # a tag, or text without a space
# The lengths from which a word may break: in a column of a table on a phone, and anywhere.
IN_A_COLUMN, ANYWHERE = 17, 38
PARTS = re.compile(
    r"(?<=/)(?=.)"  # folders
    r"|(?<=\.)(?=\w{5})"  # modules, but no suffix of a file
    r"|(?<=[^\W_]_)(?=[^\W_]{3})|(?<=;_)(?=[^\W_]{3})"  # words of a name
    r"|(?<=[=(])(?=[^)])"  # arguments
    r"|(?<=[a-z])(?=[A-Z][a-z])"  # words of a class
)


def in_code(html: str) -> str:
    """The page with these breaks; blocks of code stay as they are."""
    return CODE.sub(_broken, BEFORE_BRACKET.sub("", html))


def _broken(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    return found[1] + WORD.sub(_word, found[2])


def _word(found: re.Match[str]) -> str:
    word = found[0]
    if word.startswith("<") or word == "-":
        return word
    if word.startswith("-") or len(word) < IN_A_COLUMN:
        return f'<span class="whole">{word}</span>' if "-" in word else word
    return PARTS.sub("<wbr>" if len(word) >= ANYWHERE else '<wbr class="column">', word)
