"""The fenced blocks of the documentation, and who runs each of them.

A block says its language, and behind it what a reader does not need to see:

    ```python            runs on the CPU, with the page's other blocks, in their order
    ```python gpu        runs in tests/gpu, with all Python of the page
    ```sh                runs here, in an empty folder; `exits=0,1` says which codes are right
    ```sh by=FILE,FILE   runs elsewhere: one of the FILEs, workflows, runs each `nox -s NAME` of it
    ```sh by=FILE::TEST  runs elsewhere: in that test
    ```text, toml, ...   is no program

Whatever else a block says is an error, so nothing in the documentation goes without being run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PROGRAMS: Final = {"python": {"gpu"}, "sh": {"by", "exits"}}
OTHERS: Final = {"c", "cmake", "cpp", "json", "text", "toml"}

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
    language, *words = said.split() or [""]
    where = f"{page.name}:{line}"
    known = {*PROGRAMS, *OTHERS}
    if language not in known:
        raise ValueError(f"{where}: expected a language of {sorted(known)}, found {language!r}")
    marks = tuple((key, value) for key, _, value in (word.partition("=") for word in words))
    strange = {key for key, _ in marks} - PROGRAMS.get(language, set())
    if strange:
        valid = sorted(PROGRAMS.get(language, set())) or "none"
        raise ValueError(f"{where}: expected marks of {valid}, found {sorted(strange)}")
    return Block(page, line, language, marks, text)


def program(page: Path, *, on_gpu: bool) -> str:
    """The Python of a page as one file with the page's line numbers; "" where there is none."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and (on_gpu or block.mark("gpu") is None):
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "".join(f"{line}\n" for line in lines)


def why_not_run(block: Block) -> str | None:
    """What is wrong with who is said to run a block; None where that is real."""
    sessions = set(re.findall(r"nox -s ([\w-]+)", block.text))
    run_there: set[str] = set()
    for runner in (block.mark("by") or "").split(","):
        name, _, test = runner.partition("::")
        if not (ROOT / name).is_file():
            return f"expected a file that runs it, found {name!r}"
        text = (ROOT / name).read_text(encoding="utf-8")
        if not test:
            run_there.update(re.findall(r"nox\"? -s ([\w-]+)", text))
        elif test in _tests(text):
            return None
        else:
            return f"expected a test of {name}, found {test!r}"
    if not sessions or sessions - run_there:
        return f"expected one of nox -s {sorted(run_there)}, found nox -s {sorted(sessions)}"
    return None


def _tests(source: str) -> set[str]:
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
