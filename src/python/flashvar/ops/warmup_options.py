"""Options of `flashvar warmup` that several ops have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from flashvar.cli.comma_lists import names


class AnyKind:
    """A kind of call of any op."""

    @property
    def triton_too(self) -> bool:
        """Whether Triton runs some of such calls where a binary is installed."""
        return False


def add_sizes(
    parser: argparse.ArgumentParser, name: str, kind: Any, default: list[Any], text: str
) -> None:
    """Add an option that takes lists, each read by `kind`; it may be given several times."""
    parser.add_argument(name, type=kind, nargs="+", default=[default], metavar="N", help=text)


def add_dtype(parser: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    """Add --dtype."""
    dtypes = tuple(dtypes)
    parser.add_argument(
        "--dtype",
        type=names(dtypes),
        nargs="+",
        default=[["bf16"]],
        metavar="T",
        help=f"of {', '.join(dtypes)} (default: bf16)",
    )


def add_varlen(parser: argparse.ArgumentParser) -> None:
    """Add --varlen."""
    parser.add_argument("--varlen", action="store_true", help="packed sequences")


def add_backward(parser: argparse.ArgumentParser) -> None:
    """Add --backward; `training` reads it."""
    parser.add_argument("--backward", action="store_true", help="training too, with gradients")


def training(chosen: argparse.Namespace) -> tuple[bool, ...]:
    """Whether calls are of training: no, and with --backward also yes."""
    return (False, True) if chosen.backward else (False,)
