"""Parsers of command lines that suggest the nearest word for a misspelled one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


# How alike a word and what was given must be, from 0 to 1, for a suggestion.
CUTOFF: Final = 0.6


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that lists commands without a line of their metavar above them."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        is_list = isinstance(action, argparse._SubParsersAction)
        return text.partition("\n")[2] if is_list else text


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest command or option for a misspelled one."""

    def __init__(self, **settings: Any) -> None:
        # An abbreviation that works today may become ambiguous with a new option.
        settings["allow_abbrev"] = False
        settings.setdefault("formatter_class", _Help)
        if sys.version_info >= (3, 14):
            settings["suggest_on_error"] = False  # it suggests only values
        super().__init__(**settings)
        self.arguments: list[str] = []  # of the command line that is parsed
        self.help_of = self.prog  # what the help that lists the options is of
        self.elsewhere: Callable[[], dict[str, str]] = dict  # options it lacks: who has them

    def parse_known_args(  # type: ignore[override]  # of its overloads, one
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """The same as of every parser; suggestions are made for what was given."""
        self.arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message, a suggestion if there is one, and where to look; exit code 2."""
        suggestion = _suggestion(self.arguments, self._known())
        lines = [f"{self.prog}: {message}"]
        others = self.elsewhere()
        given = [word.partition("=")[0] for word in self.arguments]
        if misplaced := [
            f"{name} is an option of {others[name]}" for name in given if name in others
        ]:
            lines += misplaced
        elif suggestion is not None:
            lines.append(f"did you mean {suggestion}?")
        listed = "options" if isinstance(self, Command) else "commands and options"
        lines.append(f"`{self.help_of} --help` lists the {listed}.")
        self.exit(2, "\n".join(lines) + "\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print a message; argparse itself hides that help or a version was not written."""
        if message and file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def _known(self) -> list[str]:
        """The options, commands and values of this parser."""
        known = self.option_names()
        for action in self._actions:
            known += map(str, action.choices or ())
        return known

    def option_names(self) -> list[str]:
        """The options of this parser."""
        return [name for action in self._actions for name in action.option_strings]


class Command(Parser):
    """The parser of one command, whose options are suggested for those that it does not know."""

    def parse_known_args(  # type: ignore[override]  # of its overloads, one
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """The same as of every parser, but nothing is left over: exits with 2 instead."""
        chosen, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return chosen, unknown


def _suggestion(arguments: Iterable[str], known: list[str]) -> str | None:
    """The known name nearest to the first unknown argument that has one."""
    for argument in arguments:
        bare = argument.partition("=")[0]
        if bare in known:
            continue
        # Their dashes do not make two options alike.
        words = {one.lstrip("-"): one for one in known if one[:1] == "-" or bare[:1] != "-"}
        near = get_close_matches(bare.lstrip("-"), words, n=1, cutoff=CUTOFF)
        if near:
            return words[near[0]]
    return None
