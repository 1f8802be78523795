"""Check the arguments of a session before it makes an environment (nox calls this)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from flashvar.errors import ConfigurationError
from flashvar_factory.cli import selected
from flashvar_factory.config import schema, selection_arguments
from flashvar_factory.config.schema import Config


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments, and the kind of session that they are of."""
    selected.add_arguments(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--development", action="store_true", help="check it as a development build would"
    )
    kind.add_argument(
        "--tests",
        metavar="SESSION",
        help="check that the arguments of this pytest session contain no selection",
    )


def run(arguments: argparse.Namespace) -> None:
    """ConfigurationError for what the session would refuse, minutes later."""
    if arguments.tests is not None:
        config = schema.read(arguments.root / schema.FILE_NAME)
        refuse_selection(arguments.selection, arguments.tests, config)
        refuse_absent_tests(arguments.selection, arguments.root)
        return
    selection = selected.read(arguments)
    _ = selection.for_development() if arguments.development else selection.for_release()


def refuse_selection(words: Sequence[str], session: str, config: Config) -> None:
    """Refuse a selection of kernels among the arguments of pytest."""
    for before, word in itertools.pairwise(["", *words]):
        if word.startswith("-") or before.startswith("-") or "::" in word:
            continue
        try:
            selection_arguments.parse([word], config)
        except ConfigurationError:
            if "=" not in word:  # the name of a file or folder
                continue
        raise ConfigurationError(
            f"{word}: expected arguments of pytest, found a selection of kernels: {session} builds "
            f"its own; `nox -s wheels -- {word}` builds what is selected"
        )


def refuse_absent_tests(words: Sequence[str], root: Path) -> None:
    """Refuse a path of tests that is not there: pytest's worker processes do not report it."""
    for before, word in itertools.pairwise(["", *words]):
        path = word.partition("::")[0]
        if before.startswith("-") or not path.startswith("tests/") or (root / path).exists():
            continue
        others = sorted((root / "tests").rglob(Path(path).name))
        known = f"; did you mean {others[0].relative_to(root)}?" if others else ""
        raise ConfigurationError(f"{path}: expected a file or folder of tests, found none{known}")
