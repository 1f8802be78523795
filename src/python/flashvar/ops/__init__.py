"""The ops, one folder each, and the table that lists them."""

from __future__ import annotations

import importlib
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from flashvar.ops.attention.api import attention
    from flashvar.ops.attention.varlen import attention_varlen
    from flashvar.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_update
    from flashvar.ops.gated_delta_rule.api import gated_delta_rule
    from flashvar.ops.merge_states.api import merge_states
    from flashvar.ops.op import OpSpec

__all__ = [
    "attention",
    "attention_varlen",
    "causal_conv1d",
    "causal_conv1d_update",
    "gated_delta_rule",
    "merge_states",
]

# Op -> public function -> its module in the op's folder. Each folder has a module `spec`.
TABLE: Final = MappingProxyType(
    {
        "attention": {"attention": "api", "attention_varlen": "varlen"},
        "merge_states": {"merge_states": "api"},
        "causal_conv1d": dict.fromkeys(("causal_conv1d", "causal_conv1d_update"), "api"),
        "gated_delta_rule": {"gated_delta_rule": "api"},
    }
)
# Public function -> its module, which is imported on first use.
HOMES: Final = MappingProxyType(
    {
        name: f"flashvar.ops.{op}.{module}"
        for op, functions in TABLE.items()
        for name, module in functions.items()
    }
)


@cache
def specs() -> tuple[OpSpec, ...]:
    """The descriptions of all ops, in the order of the table."""
    return tuple(importlib.import_module(f"flashvar.ops.{op}.spec").SPEC for op in TABLE)


def modules(name: str) -> dict[str, Any]:
    """The modules that a field of the descriptions names, such as `warmup`, by op.

    Ops whose field is None are left out.
    """
    named = {spec.name: getattr(spec, name) for spec in specs()}
    return {op: importlib.import_module(path) for op, path in named.items() if path is not None}


def find(function: str) -> OpSpec | None:
    """The op of a function such as "attention_fwd"; None if no op has it."""
    return next((spec for spec in specs() if function in spec.functions), None)


def spec_of(function: str) -> OpSpec:
    """The op of a function, as `find`.

    Raises:
        InvalidInputError: no op has such a function.
    """
    found = find(function)
    if found is None:
        from flashvar.errors import InvalidInputError

        every = ", ".join(name for spec in specs() for name in spec.functions)
        raise InvalidInputError(f"expected a function of an op ({every}), found {function!r}")
    return found
