"""Runs the commands of documentation one by one, as typed into one shell, and judges the output."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from documented import ROOT, Block

# A command ends where its line does, or at `&&`.
_END: Final = re.compile(r"(?<!\\)\n|\s&&\s")
# The last letter or digit of a word.
_LAST: Final = re.compile(r"\w(?=\W*$)")
# What follows these names something to be made, which later commands miss under another name.
_MADE: Final = frozenset({">", "init", "--outdir", "--image", "--json", "--results"})
# After a command: what later commands find changed. An exit code stays what it was.
_REMEMBER: Final = (
    '\ncode=$?; { export -p; printf "cd %q\\n" "$PWD"; } > "$SHELL_STATE"; exit $code'
)


def commands(text: str) -> list[str]:
    """The commands of a block, in their order."""
    return [one.strip() for one in _END.split(text) if one.strip()]


def mutants(command: str) -> Iterator[str]:
    """The command with one word spelled wrong, each of its words in turn, the last one first."""
    return reversed(list(_mutants(command)))


def _mutants(command: str) -> Iterator[str]:
    before = ""
    for match in re.finditer(r"\S+", command):
        made = before in _MADE or "=$PWD/" in match[0]
        before = match[0]
        # A dash alone, or the end of options, has no spelling.
        if not made and _LAST.search(match[0]):
            wrong = _LAST.sub(lambda last: last[0] + "zq", match[0])
            yield command[: match.start()] + wrong + command[match.end() :]


def shows(said: str, output: str) -> bool:
    """Whether output has some words in their order; `...` is any text, spaces are alike."""
    parts = (re.escape(_plain(part)) for part in said.split("..."))
    return re.search(".*?".join(parts), _plain(output), re.DOTALL) is not None


def _plain(text: str) -> str:
    return " ".join(text.split())


class Shell:
    """A shell in a folder: what a command exports, and where it goes, the next one finds."""

    def __init__(self, folder: Path, environ: Mapping[str, str], state: Path) -> None:
        self.folder, self.state = folder, state
        self.environ = {**environ, "SHELL_STATE": str(state)}
        state.write_text("", encoding="utf-8")

    def run(self, command: str, *, remember: bool = True) -> tuple[int, str]:
        """The exit code of a command, and all it prints."""
        end = _REMEMBER if remember else ""
        done = subprocess.run(
            ["bash", "-uc", f'. "$SHELL_STATE"\n{command}{end}'],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout


def why_wrong(block: Block, shell: Shell, shown: str = "") -> str | None:
    """Run a block; what is wrong with how it ends or what it prints, None where nothing is."""
    right = {int(code) for code in (block.mark("exits") or "0").split(",")}
    printed = ""
    for command in commands(block.text):
        code, output = shell.run(command)
        printed += output
        if code not in right:
            return f"{command}: expected exit code {sorted(right)}, found {code}\n{output[-3000:]}"
    for said in filter(None, (block.mark("prints"), shown)):
        if not shows(said, printed):
            return f"expected it to print\n{said}\nfound\n{printed[-3000:]}"
    return None


def unnoticed(
    block: Block,
    shell: Shell,
    shown: str = "",
    *,
    every: bool = False,
    tried: set[str] | None = None,
) -> list[str]:
    """Run a block, each command after a mutant or all; those that nothing would have noticed.

    Nothing of what a mutant does is undone. One that ends well must be told by its output. Of a
    command that others follow, what was `tried` in another block is not tried again.
    """
    before: set[str] = set() if tried is None else tried
    right = {int(code) for code in (block.mark("exits") or "0").split(",")}
    said = [words for words in (block.mark("prints"), shown) if words]
    typed = commands(block.text)
    found, printed = [], ""
    for number, command in enumerate(typed):
        last = number == len(typed) - 1
        for mutant in itertools.islice(mutants(command), None if every else 1):
            if mutant in before and not last:
                continue
            before.add(mutant)
            code, output = shell.run(mutant, remember=False)
            told = last and not all(shows(words, printed + output) for words in said)
            if code in right and not told:
                found.append(mutant)
        code, output = shell.run(command)
        assert code in right, f"{command}\n{output[-3000:]}"
        printed += output
    for words in said:
        assert shows(words, printed), f"expected it to print\n{words}\nfound\n{printed[-3000:]}"
    return found


def why_not_of_ci(text: str, runners: str) -> str | None:
    """What is wrong with leaving commands to workflows; None where these have each of them."""
    run_there = ""
    for name in runners.split(","):
        if not (ROOT / name).is_file():
            return f"expected a file that runs it, found {name!r}"
        run_there += (ROOT / name).read_text(encoding="utf-8")
    for command in commands(text):
        # Alone on its line, whatever folder the program is in.
        if not re.search(rf"(?:^|[\s/]){re.escape(command)}$", run_there, re.MULTILINE):
            return f"expected {command!r} in {runners}, found no such line"
    return None
