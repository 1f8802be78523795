"""The public functions of all ops are alike: positions, options, what they raise, their types."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest

import flashvar
from flashvar import ops

FUNCTIONS = [getattr(flashvar, name) for name in ops.__all__]
RAISED = ["InvalidInputError", "BackendUnavailableError", "BinaryError"]
# Flags that decide what a function returns.
RETURN = re.compile(r"return_\w+")

of_each = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [*inspect.signature(function).parameters.values()]


@of_each
def test_positions_are_those_of_tensors(function: Callable[..., Any]) -> None:
    """Options are given by name alone, but for one that is positional in causal-conv1d as well."""
    positional = [one for one in parameters(function) if one.kind is not one.KEYWORD_ONLY]
    assert positional
    others = [one.name for one in positional if "torch.Tensor" not in one.annotation]
    assert others == (["activation"] if function is flashvar.causal_conv1d_update else [])


@of_each
def test_the_backend_is_the_last_option(function: Callable[..., Any]) -> None:
    last = parameters(function)[-1]
    assert (last.name, last.annotation, last.default) == ("backend", "BackendName", "auto")


def section(function: Callable[..., Any], title: str) -> list[str]:
    """The names that a section of a docstring explains, in order."""
    text = inspect.getdoc(function) or ""
    _, found, rest = text.partition(f"\n{title}:\n")
    assert found, title
    return re.findall(r"^    (\w+): ", re.split(r"\n\S", rest)[0], re.MULTILINE)


@of_each
def test_every_argument_is_explained(function: Callable[..., Any]) -> None:
    assert section(function, "Args") == [one.name for one in parameters(function)]


@of_each
def test_errors_are_those_of_all_ops(function: Callable[..., Any]) -> None:
    assert section(function, "Raises") == RAISED


@pytest.mark.skipif(
    not hasattr(typing, "get_overloads"), reason="Python 3.10 does not list overloads"
)
@of_each
def test_flags_that_decide_the_result_are_typed(function: Callable[..., Any]) -> None:
    flags = {one.name for one in parameters(function) if RETURN.fullmatch(one.name)}
    overloads = typing.get_overloads(function)
    assert bool(overloads) is bool(flags)
    for one in overloads:
        assert [one.name for one in parameters(one)] == [one.name for one in parameters(function)]
    for flag in flags:
        types = [inspect.signature(one).parameters[flag].annotation for one in overloads]
        assert {"Literal[True]", "bool"} <= {*types}
