"""What did the words of a command select? Shared by every command that takes words."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashvar_factory import compiler_cache, cross, native, schema, toolchain
from flashvar_factory import words as selection_words
from flashvar_factory.expand import Build, expand, select_all, select_dev
from flashvar_factory.schema import Config
from flashvar_factory.words import Words

HELP = (
    "AXIS=VALUE,... (as hdim=64,128) arch=native|all|sm_XY op=... ptx=1 jobs=N toolkit=pypi|system "
    "cache=sccache|ccache shard=i/n"
)


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
        """The nvcc that compiles, behind the cache that was asked for."""
        cache = compiler_cache.launcher(self.words.cache, self.root)
        found = toolchain.find(self.words.toolkit, os.environ, self.root)
        platform = self.words.platform or native.MACHINE
        other = cross.find(platform, found.nvcc, found.version, environ=os.environ, root=self.root)
        return dataclasses.replace(found, cross=other, launcher=cache)

    def for_development(self) -> tuple[Build, ...]:
        """What is built where nothing more is said: variants.toml's [dev]."""
        words, config = self.words, self.config
        here = self._devices(words.architectures or (selection_words.NATIVE,))
        return self._shard(expand(config, select_dev(words, config, here)))

    def for_release(self) -> tuple[Build, ...]:
        """What is built where nothing more is said: everything."""
        return self._shard(self.whole_release())

    def whole_release(self) -> tuple[Build, ...]:
        """The same of all shards."""
        words, config = self.words, self.config
        here = self._devices(words.architectures or ())
        return expand(config, select_all(words, config, here))

    def first_shard(self) -> bool:
        """Whether this is the shard that makes what is not of an architecture."""
        return self.words.shard[0] == 1

    def _shard(self, builds: tuple[Build, ...]) -> tuple[Build, ...]:
        """Every n-th build: a binary distribution is of one shard."""
        part, of = self.words.shard
        return builds[part - 1 :: of]

    def _devices(self, named: Sequence[str]) -> tuple[native.Capability, ...]:
        """The devices of this machine, asked for only where the architectures need them."""
        return native.capabilities() if selection_words.NATIVE in named else ()


def read(arguments: argparse.Namespace) -> Selected:
    """Read variants.toml and the words."""
    config = schema.read(arguments.root / schema.FILE_NAME)
    return Selected(arguments.root, config, selection_words.parse(arguments.words, config))
