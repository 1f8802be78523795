"""Sharding rules of ops for torch's DTensor, from descriptions of what may be sharded together.

Rules are registered once DTensor is imported: flashvar does not import it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from flashvar.errors import InvalidInputError

DTENSORS: Final = "torch.distributed.tensor"

# A rule gets the op's arguments, specs in place of tensors, and gives pairs of placements: those of
# the results, and those of the arguments, lists of tensors laid flat.
Rule = Callable[..., "list[tuple[list[Any], list[Any]]]"]

# In place of a dimension: each rank has a part of a sum.
PARTIAL: Final = "a sum over the ranks"


class Way(NamedTuple):
    """A way to compute an op on shards; tensors without an entry are whole on every rank."""

    arguments: Mapping[str, int]  # dimensions by name; of lists that of each tensor
    results: Mapping[str, int | str]  # dimensions, or PARTIAL


_WHOLE: Final = Way({}, {})

# Gives the ways for the arguments of a call, by name; specs in place of tensors.
Ways = Callable[[dict[str, Any]], Iterable[Way]]

_registered: set[Any] = set()


def dtensor() -> Any:
    """The class DTensor; None before it is imported, also while another thread imports it."""
    return getattr(sys.modules.get(DTENSORS), "DTensor", None)


def register(rules: dict[Any, Rule]) -> None:
    """Register rules, by op, if DTensor is imported and they are not registered yet."""
    kind = dtensor()
    if kind is None or _registered.issuperset(rules):
        return
    register_sharding: Any = import_module(f"{DTENSORS}.experimental").register_sharding
    propagator = kind._op_dispatcher.sharding_propagator
    for op, rule in rules.items():
        _registered.add(op)
        register_sharding(op)(rule)
        # DTensor keeps what a rule gave, by the arguments from this one on. By default it ignores
        # those that are no tensors, such as the layout.
        info = propagator.op_to_schema_info[op]
        info.static_argnum = 0
        strategies = propagator.op_strategy_funcs
        strategies[op] = _for_older_torch(strategies[op], info)


def _for_older_torch(strategy: Callable[[Any], Any], info: Any) -> Callable[[Any], Any]:
    """A strategy of DTensor that accepts a None in the first place, and lists of tensors.

    Before torch 2.12 DTensor reads the mesh from the first argument alone, and at first it does not
    look for tensors in lists.
    """

    def wrapped(schema: Any) -> Any:
        arguments = schema.args_schema
        if arguments[0] is None:
            mesh = next(x.mesh for x in arguments if x is not None)
            schema.get_mesh_from_args = lambda: mesh
        elif _is_opaque(arguments[0]):
            mesh = arguments[0].child_mesh(0)
            schema.get_mesh_from_args = lambda: mesh
        if any(map(_is_opaque, arguments)):
            schema.args_schema = tuple(tuple(x.childs) if _is_opaque(x) else x for x in arguments)
            schema.schema_info = info
        return strategy(schema)

    return wrapped


def _is_opaque(argument: Any) -> bool:
    """Whether it is a list of tensors that pytree takes for one leaf."""
    return hasattr(argument, "child_mesh") and tree_leaves(argument)[0] is argument


def rule_of(op: Any, ways: Ways, written: str | None = None) -> Rule:
    """The rule of an op that has these ways, beside the one of whole tensors.

    What the op has `written` in place is never redistributed: the op would write a copy.
    """

    def rule(*given: Any) -> list[tuple[list[Any], list[Any]]]:
        arguments = _named(op, given)
        return [
            (
                [_placement(way.results.get(result.name)) for result in op._schema.returns],
                [
                    placement
                    for name, value in arguments.items()
                    for placement in _placements(value, way.arguments.get(name))
                ],
            )
            for way in (_WHOLE, *ways(arguments))
            if written is None
            or _placement(way.arguments.get(written)) in arguments[written].placements
        ]

    return rule


def _named(op: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of an op by name; those of the last that have their defaults may be absent."""
    names = (argument.name for argument in op._schema.arguments)
    return dict(zip(names, map(_specs, given), strict=False))


def _specs(value: Any) -> Any:
    """The specs of a list of strategies; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(map(_specs, value))
    return value.strategies[0].output_spec if hasattr(value, "strategies") else value


def _placements(value: Any, dim: int | None) -> list[Any]:
    """One placement for each tensor of an argument; None for an argument without tensors."""
    is_list = isinstance(value, (list, tuple))
    if is_list and value and all(_is_tensor(one) for one in value):
        return [_placement(dim)] * len(value)
    return [_placement(dim) if _is_tensor(value) else None]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "placements")


def _placement(dim: int | str | None) -> Any:
    if dim is None:
        return replicate()
    return partial() if isinstance(dim, str) else shard(dim)


def present(arguments: Mapping[str, Any], dims: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `dims` for the arguments that are given: results may be empty without them."""
    return {name: dim for name, dim in dims.items() if arguments.get(name) is not None}


def groups_stay_together(heads: int, group: int, mesh: Any) -> bool:
    """Whether shards over heads hold whole groups: `group` heads of another tensor for each.

    DTensor shards a dimension over one dimension of the mesh or over several of them, but never
    over more ranks than it has entries.
    """
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    chosen = (
        math.prod(some)
        for count in range(1, mesh.ndim + 1)
        for some in itertools.combinations(sizes, count)
    )
    return group == 1 or all(heads % ranks == 0 for ranks in chosen if ranks <= heads)


def are_dtensors(op: str, tensors: Mapping[str, Any]) -> bool:
    """Whether the tensors of a call, by name, are DTensors.

    Raises:
        InvalidInputError: some are and some are not: the placement of the plain ones is unknown.
    """
    kind = dtensor()
    if kind is None:
        return False
    found = {
        name: isinstance(tensor, kind) for name, tensor in tensors.items() if tensor is not None
    }
    if len(set(found.values())) > 1:
        plain = ", ".join(name for name, is_dtensor in found.items() if not is_dtensor)
        raise InvalidInputError(
            f"all tensors of {op} must be DTensors, or none, found DTensors with plain {plain}: "
            "distribute_tensor() them too, with Replicate() if every rank has the whole tensor"
        )
    return any(found.values())


def everywhere(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x, whole on every rank, as a DTensor if `like` is one."""
    kind = dtensor()
    if kind is None or not isinstance(like, kind):
        return x
    mesh = like.device_mesh
    whole: torch.Tensor = kind.from_local(x, mesh, [replicate()] * mesh.ndim, run_check=False)
    return whole


def check_in_place(op: Any, name: str, written: str, given: tuple[Any, ...], ways: Ways) -> None:
    """Refuse DTensors that would have to be redistributed before an op writes one of them.

    It would write the redistributed copy instead.

    Raises:
        InvalidInputError: with the placements that are possible.
    """
    arguments = _named(op, given)
    tensors = {one: x for one, x in arguments.items() if _is_tensor(x)}
    possible = [
        {one: _placement(way.arguments.get(one)) for one in tensors}
        for way in (_WHOLE, *ways(arguments))
    ]
    _check_shards(name, written, tensors[written])
    for dim in range(tensors[written].device_mesh.ndim):
        found = {one: x.placements[dim] for one, x in tensors.items()}
        if found not in possible:
            raise InvalidInputError(
                f"DTensors of {name}, which writes {written} in place, must be placed as "
                f"{' or '.join(map(_listed, possible))}, found {_listed(found)}: redistribute() "
                "them"
            )


def _check_shards(name: str, written: str, x: Any) -> None:
    """Refuse a dimension over more ranks than it has entries, which DTensor redistributes."""
    for dim, size in enumerate(x.shape):
        over = (mesh_dim for mesh_dim, one in enumerate(x.placements) if one == shard(dim))
        ranks = math.prod(x.device_mesh.size(mesh_dim) for mesh_dim in over)
        if size < ranks:
            raise InvalidInputError(
                f"{written} of {name} must have an entry for each rank in the dimensions that are "
                f"sharded, found {size} in dimension {dim} over {ranks} ranks: replicate them"
            )


def _listed(placements: dict[str, Any]) -> str:
    return f"({', '.join(f'{name} {placement}' for name, placement in placements.items())})"


def shard(dim: int) -> Any:
    """Over a dimension."""
    return import_module(DTENSORS).Shard(dim)


def replicate() -> Any:
    """Whole on every rank."""
    return import_module(DTENSORS).Replicate()


def partial() -> Any:
    """A sum over the ranks."""
    return import_module(DTENSORS).Partial()
