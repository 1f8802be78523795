"""`flash_attn_with_kvcache`: new keys written into a cache, then attention on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import torch

from flashvar.ops.arguments import as_bool, count
from flashvar.ops.attention import append as appending
from flashvar.ops.attention.append import append
from flashvar.ops.attention.cache import Cache
from flashvar.ops.attention.call import call
from flashvar.ops.attention.kv_cache_arguments import (
    Arguments,
    are_of_sequences,
    check,
    check_apart,
    check_lengths,
    refuse_mapped,
)
from flashvar.ops.attention.options import plain_number, window_pair, window_side
from flashvar.ops.attention.paged import Paged, compute, in_graph, launch_of, may_be_in_place
from flashvar.ops.attention.problem import pack_options, pack_tensors
from flashvar.ops.attention.validate import rows_contiguous
from flashvar.ops.autocast import dtype_on
from flashvar.ops.derivatives import Refused, attach, likenesses, refuse
from flashvar.ops.dispatch_modes import (
    are_plain,
    autocasts,
    is_compiling,
    no_dispatch_mode_active,
)
from flashvar.ops.plans import Plans
from flashvar.ops.sequences import as_int32
from flashvar.ops.sharding import everywhere
from flashvar.ops.unknown_sizes import is_known
from flashvar.selection.request import Overrides

if TYPE_CHECKING:
    from flashvar.backends.triton.attention.append import AppendLaunch
    from flashvar.backends.triton.attention.paged import PagedLaunch

__all__ = ["Arguments", "Rotate", "with_kv_cache"]


# x, the tables, the position of the first row of each sequence, and whether pairs are interleaved.
Rotate: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor
]


_Made = TypeVar("_Made")
_Parts: TypeAlias = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor | None, Cache, torch.Tensor
]


class _Plan(NamedTuple):
    """What calls share whose tensors differ in values and addresses alone."""

    options: tuple[Any, ...]  # of attention: the fields of Options in order
    append: AppendLaunch | None  # None: chosen at each call
    attend: PagedLaunch | None  # None: the keys are in order, or copied
    clamps: bool = True  # whether a negative length is made 0; kernels do so too


# Recent calls whose q and k are rotated, which passed check(); and other recent calls.
_rotated: Final[Plans[None]] = Plans()
_plans: Final[Plans[_Plan]] = Plans()

# Of options that plans may depend on: equal ones of other types may mean something else, and the
# value of a tensor may change.
_PLAIN: Final = (type(None), bool, int, float)

_NO_REVERSE_MODE: Final = (
    "flash_attn_with_kvcache has no derivatives, found a request for a gradient: use "
    "flash_attn_func of all keys, which has them"
)


class _WithCache(Refused):
    """The results of attention on a cache, which have no derivatives."""

    no_reverse_mode = _NO_REVERSE_MODE
    no_forward_mode = (
        "flash_attn_with_kvcache has no derivatives, found an input with a tangent: use "
        "flash_attn_func of all keys, detached"
    )
    written = (2, 3)  # k_cache and v_cache


class _WithCacheInGraph(torch.autograd.Function):  # type: ignore[misc]
    """As `_WithCache` for one result, in a form that torch.compile traces."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = likenesses(inputs)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[1:]
        return None, *refuse(ctx.inputs, wanted, (grad,), _NO_REVERSE_MODE)


def with_kv_cache(given: Arguments, rotate: Rotate, return_lse: bool) -> Any:
    """The output [batch, seqlen_q, heads_q, head_dim of v], and the log-sum-exp if wanted."""
    rows = given
    if not (given.rotary_cos is given.rotary_sin is None):
        _recent(_rotated, given, check)
        with torch.no_grad():
            rows = _rotate(given, rotate)
    plan = _recent(_plans, rows, _make_plan)
    with torch.no_grad():
        out, lse = _computed(rows, plan)
    results = (out, lse) if as_bool("return_softmax_lse", return_lse) else (out,)
    if torch.is_grad_enabled():
        inputs = [x for x in given if isinstance(x, torch.Tensor)]
        if is_compiling():
            results = _refusing_in_graph(results, inputs)
        elif torch._C._any_requires_grad(*inputs):
            results = attach(_WithCache, results, *inputs)
    return results if len(results) == 2 else results[0]


def _recent(plans: Plans[_Made], given: Arguments, make: Callable[[Arguments], _Made]) -> _Made:
    """What was made for a recent call like this one, or else is made now, after all checks."""
    if is_compiling():
        return make(given)
    key, tensors = _key(given), _tensors(given)
    found = None if key is None else plans.recent(key, tensors)
    if found is not None:
        return found[0]
    refuse_mapped(given)
    made = make(given)
    plain = are_plain(*[x for x in tensors if x is not None])
    if key is not None and plain and no_dispatch_mode_active():
        plans.remember(key, tensors, made)
    return made


def _key(given: Arguments) -> tuple[Any, ...] | None:
    """What a plan depends on beside the tensors; None: no plan is kept for such options."""
    window = given.window_size
    if type(window) is not tuple:
        return None
    options = given.softmax_scale, given.causal, given.softcap, *window
    types = (*map(type, options),)
    if not all(kind in _PLAIN for kind in types):
        return None
    # Dispatch keys say whether autocast is on, but not its dtype.
    lowered = dtype_on("cuda") if autocasts() else None
    return options, types, type(given.cache_seqlens), lowered


def _tensors(given: Arguments) -> tuple[torch.Tensor | None, ...]:
    lengths = given.cache_seqlens
    return (
        *(given.q, given.k_cache, given.v_cache, given.k, given.v),
        *(given.rotary_cos, given.rotary_sin, given.alibi_slopes),
        *(given.cache_batch_idx, given.cache_leftpad, given.block_table),
        lengths if isinstance(lengths, torch.Tensor) else None,
    )


def _make_plan(given: Arguments) -> _Plan:
    check(given)
    left, right = (window_side(side, given.window_size) for side in window_pair(given.window_size))
    # Dense queries: the heads of a group share a read of the keys by strides alone, with a softcap
    # too. Packed ones need a second kernel for it.
    options = pack_options(
        *(as_bool("causal", given.causal), plain_number(given.softmax_scale), left, right),
        *(given.softcap, 0.0, False, "bshd", "auto"),
    )
    if is_compiling():
        return _Plan(options, None, None)
    q, k, v, cache, before = _parts(given)
    begins = given.cache_leftpad
    if not _is_in_order(given):
        attend = launch_of(_paged(given, q, cache, before), options)
    elif k is None:
        overrides = Overrides.from_environment()
        # Checked or read by the reference, they would be an error.
        read = overrides.strict or overrides.backend == "reference"
        in_kernels = q.is_cuda and before.dtype == torch.int32 and not read
        return _Plan(options, None, None, clamps=not in_kernels)
    else:
        attend = None
    return _Plan(options, appending.launch_of(cache, k, v, before, begins), attend)


def _parts(given: Arguments) -> _Parts:
    """What kernels take: q, k, v, the cache, and how many keys each sequence has in it before."""
    cache = Cache(given.k_cache, given.v_cache, given.cache_batch_idx, given.block_table)
    k, v = given.k, given.v
    if k is None or v is None or is_known(k.shape[1] == 0):
        k = v = None
    else:
        k, v = rows_contiguous(k), rows_contiguous(v)
    return rows_contiguous(given.q), k, v, cache, _as_lengths(given, cache.capacity())


def _is_in_order(given: Arguments) -> bool:
    """Whether the slots are those of the sequences, which are used from the first key on."""
    return given.block_table is given.cache_batch_idx is given.cache_leftpad is None


def _paged(given: Arguments, q: torch.Tensor, cache: Cache, before: torch.Tensor) -> Paged:
    new = 0 if given.k is None else given.k.shape[1]
    return Paged(q, *cache, before, given.cache_leftpad, given.alibi_slopes, None, new)


def _rotate(given: Arguments, rotate: Rotate) -> Arguments:
    """The arguments of the same call without rotation: with q and k that are rotated."""
    q, _, _, cache, before = _parts(given)
    assert given.k is not None
    assert given.rotary_cos is not None
    assert given.rotary_sin is not None
    batch, rows, heads, dim = q.shape
    interleaved = as_bool("rotary_interleaved", given.rotary_interleaved)
    rotation = (given.rotary_cos, given.rotary_sin, before.clamp(min=0), interleaved)
    # As in FlashAttention, a side that hides no key of the cache is none.
    sides = [window_side(side, given.window_size) for side in window_pair(given.window_size)]
    hides = any(0 <= side < cache.capacity() for side in sides)
    if hides or as_bool("causal", given.causal):
        q = rotate(q, *rotation)
    else:  # every query is at the position of the first
        q = rotate(q.reshape(batch, 1, rows * heads, dim), *rotation)
        q = q.unflatten(2, (rows, heads)).squeeze(1)
    # Dynamo of torch 2.8 does not trace _replace().
    return Arguments(
        *(q, given.k_cache, given.v_cache, rotate(rows_contiguous(given.k), *rotation), given.v),
        *(None, None, before, given.cache_batch_idx, given.cache_leftpad, given.block_table),
        *(given.softmax_scale, given.causal, given.window_size, given.softcap),
        *(given.rotary_interleaved, given.alibi_slopes),
    )


def _refusing_in_graph(results: tuple[Any, ...], inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """The results, whose gradients are refused if an input requires one."""
    differentiable: list[torch.Tensor] = []
    for x in inputs:  # torch.compile refuses an input that is given twice
        if x.requires_grad and all(x is not other for other in differentiable):
            differentiable.append(x)
    if not differentiable:
        return results
    return tuple(_WithCacheInGraph.apply(one, *differentiable) for one in results)


def _computed(given: Arguments, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, cache, before = _parts(given)
    begins, slopes, options = given.cache_leftpad, given.alibi_slopes, plan.options
    longest = None
    if plan.attend is None:
        longest = check_lengths(cache, before, begins, 0 if k is None else k.shape[1])
    if _is_in_order(given):
        if k is not None:
            lengths = _append(given, plan, k, v, before)
        else:
            lengths = as_int32(before.clamp(min=0)) if plan.clamps else before
        keys, values, batch = cache.k, cache.v, q.shape[0]
        if not is_known(keys.shape[0] <= batch):
            keys, values = keys[:batch], values[:batch]
        return _attend(q, keys, values, slopes, lengths, options)
    lengths = _append(given, plan, k, v, before)
    if plan.attend is not None:
        return compute(plan.attend, _paged(given, q, cache, before), lengths)
    if is_compiling() and may_be_in_place(q):
        return in_graph(_paged(given, q, cache, before), lengths, options)
    begins = torch.zeros_like(lengths) if begins is None else begins
    keys, values = cache.read(begins, lengths, cache.capacity() if longest is None else longest)
    return _attend(q, keys, values, slopes, lengths, options)


def _append(
    given: Arguments,
    plan: _Plan,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    before: torch.Tensor,
) -> torch.Tensor:
    """The lengths after k and v are written."""
    cache = Cache(given.k_cache, given.v_cache, given.cache_batch_idx, given.block_table)
    launch, begins = plan.append, given.cache_leftpad
    if k is None or v is None:
        if launch is None:
            return append(cache, None, None, before, begins)
        return launch(cache, None, None, before, begins)
    if launch is not None and launch.are_apart(cache, k, v):
        return appending.write(launch, cache, k, v, before, begins)
    check_apart(given)
    return append(cache, k, v, before, begins)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    lengths: torch.Tensor,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = pack_tensors(None, None, slopes, None, None, None, lengths.contiguous())
    out, lse = call(q, k, v, tensors, options, True)
    assert lse is not None
    return out, lse


def _as_lengths(given: Arguments, capacity: int) -> torch.Tensor:
    """How many keys of each sequence are in the cache before the call."""
    lengths = given.cache_seqlens
    if are_of_sequences(lengths):
        return lengths
    number = capacity if lengths is None else count("cache_seqlens", lengths)
    batch = given.q.shape[0]
    made = torch.full((batch,), number, dtype=torch.int32, device=given.q.device)
    return made if is_compiling() else everywhere(made, given.q)
