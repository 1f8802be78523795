"""Turns the selection arguments of a command into builds; every command that takes them uses it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashvar.errors import ConfigurationError
from flashvar_factory.config import names, schema, selection_arguments, this_machine
from flashvar_factory.config.expand import Build, expand, select_all, select_dev
from flashvar_factory.config.schema import Config
from flashvar_factory.config.selection_arguments import SelectionArguments
from flashvar_factory.toolchain import compiler_cache, cross, nvcc

HELP = (
    "what to build: architectures (sm_90, all, native), and KEY=VALUE, where KEY is an axis of "
    "variants.toml, arch, op, ptx, platform, jobs, toolkit, cache or shard, as dtype=bf16 "
    "(default: {})"
)
EVERYTHING = "every wheel for this machine's processor"
DEVELOPMENT = "the kernels of [dev] in variants.toml, for the GPUs of this machine"


def add_arguments(parser: argparse.ArgumentParser, default: str = EVERYTHING) -> None:
    """Give a command selection arguments; `default` is what it does without."""
    parser.add_argument("selection", nargs="*", help=HELP.format(default))


@dataclass(frozen=True)
class Selected:
    """The configuration, and the arguments checked against it."""

    root: Path
    config: Config
    arguments: SelectionArguments

    def compiler(self) -> nvcc.Toolchain:
        """The nvcc that compiles, behind the cache that was asked for."""
        cache = compiler_cache.launcher(self.arguments.cache, self.root)
        found = nvcc.find(self.arguments.toolkit, os.environ, self.root)
        platform = self.arguments.platform or this_machine.PROCESSOR
        other = cross.find(platform, found.nvcc, found.version, environ=os.environ, root=self.root)
        return dataclasses.replace(found, cross=other, launcher=cache)

    def for_development(self) -> tuple[Build, ...]:
        """The selected builds; this machine's GPUs and [dev] decide what is left open."""
        arguments, config = self.arguments, self.config
        here = self._devices(arguments.targets or (names.NATIVE,))
        return self._shard(expand(config, select_dev(arguments, config, here)))

    def for_release(self) -> tuple[Build, ...]:
        """The selected builds; what the arguments leave open is everything for one processor.

        ConfigurationError if that is nothing.
        """
        return self._shard(self.require(self.whole_release()))

    def whole_release(self) -> tuple[Build, ...]:
        """The same of all shards."""
        arguments, config = self.arguments, self.config
        here = self._devices(arguments.targets or ())
        return expand(config, select_all(arguments, config, here))

    def require(self, builds: tuple[Build, ...]) -> tuple[Build, ...]:
        """The builds; ConfigurationError where no architecture has wheels for the processor."""
        if not builds:
            raise ConfigurationError(
                f"platform={self.arguments.platform or this_machine.PROCESSOR}: expected "
                "architectures with wheels for it, found none; "
                "`platforms` in variants.toml adds one"
            )
        return builds

    def first_shard(self) -> bool:
        """Whether this shard also builds the pure wheels."""
        return self.arguments.shard[0] == 1

    def _shard(self, builds: tuple[Build, ...]) -> tuple[Build, ...]:
        """Every n-th build: a binary distribution is of one shard."""
        part, of = self.arguments.shard
        return builds[part - 1 :: of]

    def _devices(self, named: Sequence[str]) -> tuple[this_machine.Capability, ...]:
        """The devices of this machine, asked for only where the architectures need them."""
        return this_machine.capabilities() if names.NATIVE in named else ()


def read(arguments: argparse.Namespace) -> Selected:
    """Read variants.toml and the arguments."""
    config = schema.read(arguments.root / schema.FILE_NAME)
    return Selected(arguments.root, config, selection_arguments.parse(arguments.selection, config))
