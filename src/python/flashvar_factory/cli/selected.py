"""What did the words of a command select? Shared by every command that takes words."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from flashvar_factory import native, schema, toolchain
from flashvar_factory import words as selection_words
from flashvar_factory.expand import Build, expand, select_all, select_dev
from flashvar_factory.schema import Config
from flashvar_factory.words import Words

HELP = "hdim=64,128 arch=native|all|sm_XY dtype=... op=... ptx=1 jobs=N toolkit=pypi|system"


def take_words(parser: argparse.ArgumentParser) -> None:
    """Give a command the words of a selection."""
    parser.add_argument("words", nargs="*", help=HELP)


@dataclass(frozen=True)
class Selected:
    """The configuration, and the words checked against it."""

    root: Path
    config: Config
    words: Words

    def compiler(self) -> toolchain.Toolchain:
        """The nvcc that compiles."""
        return toolchain.find(self.words.toolkit, os.environ, self.root)

    def for_development(self) -> tuple[Build, ...]:
        """What is built where nothing more is said: variants.toml's [dev]."""
        return expand(self.config, select_dev(self.words, self.config, self._devices()))

    def for_release(self) -> tuple[Build, ...]:
        """What is built where nothing more is said: everything."""
        return expand(self.config, select_all(self.words, self.config, self._devices()))

    def _devices(self) -> tuple[native.Capability, ...]:
        """The devices of this machine, asked for only where the words need them."""
        named = self.words.architectures
        return native.capabilities() if named is None or selection_words.NATIVE in named else ()


def read(arguments: argparse.Namespace) -> Selected:
    """Read variants.toml and the words."""
    config = schema.read(arguments.root / schema.FILE_NAME)
    return Selected(arguments.root, config, selection_words.parse(arguments.words, config))
