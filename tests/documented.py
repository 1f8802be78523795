"""The fenced blocks of the documentation, and who runs each of them.

A block says its language, and behind it what a reader does not need to see:

    ```python              runs on the CPU, with the page's other blocks, in their order
    ```python needs=gpu    runs in tests/gpu, with all Python of the page
    ```sh                  runs without a GPU, in tests/documentation, command by command
    ```sh needs=gpu        runs in tests/gpu; `without` is what it prints where there is none
    ```sh needs=toolkit    runs in tests/packaging, in a checkout that compiles
    ```sh needs=network    runs there with `--network`
    ```sh by=FILE,FILE     the suites themselves: these workflows run each of its commands
    ```text shown          what the commands before it print
    ```text, toml, ...     is no program

A command ends with 0, or with a code of `exits=0,1`; the block prints what `prints="a ... b"` says.
`given="pip install nox"` is what a reader did before. `...` stands for any text, there and where
output is shown. A block runs in an environment of its
own, or in that of the block before it if it is `continued`; the folder is that of the page.

Whatever else a block says is an error, so nothing in the documentation goes without being run.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PROGRAMS: Final = {
    "python": {"needs"},
    "sh": {"by", "continued", "exits", "given", "needs", "prints", "without"},
}
OTHERS: Final = {"c", "cmake", "cpp", "json", "text", "toml"}
NEEDS: Final = {"python": {"gpu"}, "sh": {"gpu", "network", "toolkit"}}
_MARKS: Final = {**PROGRAMS, "text": {"shown"}}

_FENCE: Final = re.compile(r"^( *)(`{3,}|~{3,}) *(.*?) *$")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line, counted from 1."""

    page: Path
    line: int
    language: str
    marks: tuple[tuple[str, str], ...]
    text: str

    def mark(self, name: str) -> str | None:
        """The value of a mark, "" where it has none; None where it is absent."""
        return dict(self.marks).get(name)

    @property
    def needs(self) -> str | None:
        """What a program needs beside Python and flashvar."""
        return self.mark("needs")

    def __str__(self) -> str:
        """Where it is, for people and test ids."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that a user reads; fewer where the tests were copied without them."""
    root = [path for name in ("README.md", "CONTRIBUTING.md") if (path := ROOT / name).is_file()]
    return [*root, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page; ValueError on a block that does not say what it is."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    opened: tuple[int, str, str, str] | None = None  # line, indent, fence, what it says
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if opened is None and match:
            opened = (number + 1, match[1], match[2], match[3])
        elif opened and match and match[2].startswith(opened[2]) and not match[3]:
            first, indent, _, said = opened
            inside = [text.removeprefix(indent) for text in lines[first - 1 : number - 1]]
            yield _block(page, first, said, "\n".join(inside) + "\n")
            opened = None
    if opened:
        raise ValueError(f"{page.name}:{opened[0]}: expected the end of the block, found none")


def _block(page: Path, line: int, said: str, text: str) -> Block:
    language, *words = shlex.split(said) or [""]
    where = f"{page.name}:{line}"
    known = {*PROGRAMS, *OTHERS}
    if language not in known:
        raise ValueError(f"{where}: expected a language of {sorted(known)}, found {language!r}")
    marks = tuple((key, value) for key, _, value in (word.partition("=") for word in words))
    strange = {key for key, _ in marks} - _MARKS.get(language, set())
    if strange:
        valid = sorted(_MARKS.get(language, set())) or "none"
        raise ValueError(f"{where}: expected marks of {valid}, found {sorted(strange)}")
    block = Block(page, line, language, marks, text)
    if block.needs not in {None, *NEEDS.get(language, set())}:
        valid = sorted(NEEDS[language])
        raise ValueError(f"{where}: expected needs of {valid}, found {block.needs!r}")
    return block


def program(page: Path, *, on_gpu: bool) -> str:
    """The Python of a page as one file with the page's line numbers; "" where there is none."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and (on_gpu or block.needs is None):
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "".join(f"{line}\n" for line in lines)


def shown_after(program: Block) -> str:
    """The output that the page shows of a program, "" if none."""
    for before, block in itertools.pairwise(blocks(program.page)):
        if before.line == program.line and block.mark("shown") is not None:
            return block.text
    return ""
