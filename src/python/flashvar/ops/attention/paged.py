"""Attention on a KV cache that is read in place: in pages, in slots of a pool, or after padding.

A Triton kernel reads it, on every GPU that Triton compiles for. Those of wheels read the keys of a
sequence in consecutive rows: for them keys are copied, which pays where there are many queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from flashvar.ops.arguments import as_traceable, check_strided, count
from flashvar.ops.attention import run
from flashvar.ops.attention.append import append
from flashvar.ops.attention.cache import Cache, check_packed
from flashvar.ops.attention.choice import TRITON, triton_if_allowed
from flashvar.ops.attention.plan import unusual_types
from flashvar.ops.attention.problem import Inputs, Options, Problem, pack_options
from flashvar.ops.attention.spec import FORWARD, HEAD_DIM_STEP
from flashvar.ops.attention.trace import log_once
from flashvar.ops.attention.validate import inspect, inspect_symbolic
from flashvar.ops.autocast import dtype_on
from flashvar.ops.backend_choice import choose_backend
from flashvar.ops.dispatch_modes import (
    are_plain,
    autocasts,
    is_compiling,
    no_dispatch_mode_active,
)
from flashvar.ops.plans import Plans
from flashvar.ops.profiling import recorded
from flashvar.ops.sequences import as_int32, check_integers
from flashvar.selection.request import Overrides

if TYPE_CHECKING:
    from flashvar.backends.triton.attention.paged import PagedLaunch

_DTYPES: Final = (torch.bfloat16, torch.float16)
# With more rows of a key head, queries times heads of a group, a copy pays: the compiled kernels
# compute faster.
MOST_ROWS: Final = 128


class Paged(NamedTuple):
    """The tensors of a call, and how many keys of each sequence it has added to the cache."""

    q: torch.Tensor  # [batch, seqlen_q, heads_q, head_dim], or [total_q, heads_q, head_dim]
    k: torch.Tensor  # the cache, as in Cache
    v: torch.Tensor
    slots: torch.Tensor | None
    table: torch.Tensor | None
    before: torch.Tensor  # [batch], how many keys were in the cache
    begins: torch.Tensor | None  # [batch], the position of the first key of each sequence; None: 0
    slopes: torch.Tensor | None  # float32 [heads_q] or [batch, heads_q]
    offsets_q: torch.Tensor | None  # int32 [batch + 1], of packed queries; None: q is dense
    new: int

    def tensors(self, lengths: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Those that a PagedLaunch takes. `lengths`: int32 [batch], the keys of each sequence."""
        # Its kernels read these from neighboring addresses.
        slots = None if self.slots is None else self.slots.contiguous()
        begins = None if self.begins is None else self.begins.contiguous()
        places = slots, self.table, self.before.contiguous(), begins
        return (self.q, self.k, self.v, *places, lengths, self.slopes, self.offsets_q)

    def cache(self) -> Cache:
        """The cache."""
        return Cache(self.k, self.v, self.slots, self.table)


def may_be_in_place(q: Any) -> bool:
    """Whether calls of such a q are computed in place, in the dtype of autocast if it is on."""
    on_gpu = TRITON and isinstance(q, torch.Tensor) and q.is_cuda
    if not on_gpu or q.dtype not in _DTYPES:
        return False
    return not autocasts() or dtype_on("cuda") in (None, q.dtype)


_launches: Final[Plans[PagedLaunch | None]] = Plans()


def launch_of(call: Paged, options: tuple[Any, ...]) -> PagedLaunch | None:
    """The launch that reads the cache of a call in place; None: its keys must be copied.

    `options` are the fields of Options in order.
    """
    if not may_be_in_place(call.q):
        return None
    # Without max_seqlen_k, which grows with every token: only copies depend on it.
    key = call.new, options[:-1], unusual_types(options)
    try:
        recent = _launches.recent(key, call[:-1])
    except TypeError:  # an option that cannot be hashed is invalid: the checks of copies say why
        return None
    if recent is not None:
        return recent[0]
    given = [x for x in call[:-1] if x is not None]
    if not (no_dispatch_mode_active() and are_plain(*given)):
        return None
    facts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call[:-1]]
    whole_key = key, *facts
    if whole_key not in _launches:
        _launches.keep(whole_key, _make(call, options))
    made = _launches[whole_key]
    _launches.remember(key, call[:-1], made)
    return made


def packed_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    table: torch.Tensor,
    slopes: torch.Tensor | None,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The output and the log-sum-exp of packed queries on pages; None: the keys must be copied.

    Their gradients are those of the copies, so calls that need one are not computed in place.
    """
    if not may_be_in_place(q):
        return None
    check_packed(k, v, cu_seqlens_k, table)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("alibi_slopes", slopes)):
        if x is not None:
            check_strided(name, x)
    check_integers("cu_seqlens_q", cu_seqlens_q)
    count("max_seqlen_k", options[-1])
    if k.dtype != q.dtype or v.dtype != q.dtype:  # autocast casts copies
        return None
    given = [x for x in (q, k, v, slopes) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return None
    ends = cu_seqlens_k.diff()
    call = Paged(q, k, v, None, table, ends, None, slopes, as_int32(cu_seqlens_q), 0)
    launch = None if is_compiling() else launch_of(call, options)
    if launch is None and not is_compiling():
        return None
    lengths = append(call.cache(), None, None, ends, None)
    if launch is not None:
        return compute(launch, call, lengths)
    return in_graph(call, lengths, options)


def compute(
    launch: PagedLaunch, call: Paged, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp; a profiler sees the call as an event."""
    out, lse = recorded("attention_paged", launch.__call__)(*call.tensors(lengths))
    return out, lse


def in_graph(
    call: Paged, lengths: torch.Tensor, options: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp by the op, while torch.compile traces."""
    numbers = map(as_traceable, (*options[:5], *options[9:]))
    out, lse = torch.ops.flashvar.attention_paged(*call, lengths, *numbers)
    return out, lse


def _make(call: Paged, options: tuple[Any, ...]) -> PagedLaunch | None:
    q, k, v = call[:3]
    if k.shape[0] == 0:
        return None
    if call.offsets_q is not None and Overrides.from_environment().strict:
        return None
    if any(x is not None and x.device != q.device for x in call[:-1]):
        return None
    problem = inspect(with_any_keys(call), Options._make(options))
    rows = problem.seqlen_q * problem.heads_q // problem.heads_kv
    if problem.empty or not 0 < rows <= MOST_ROWS or k.stride(-1) != 1 or v.stride(-1) != 1:
        return None
    # Rows of other head dims would be read an element at a time; copies are padded.
    if problem.head_dim % HEAD_DIM_STEP or problem.head_dim_v % HEAD_DIM_STEP:
        return None
    if not _takes_triton(q, problem):
        return None
    from flashvar.backends.triton.attention.paged import prepare

    log_once("attention_paged", problem, "triton, which reads the cache in place", set())
    return prepare(problem, q, call.cache(), call.new)


def with_any_keys(call: Paged) -> Inputs:
    """The inputs of a call as if the keys of each sequence were in consecutive rows."""
    sizes = call.before.shape[0], call.cache().capacity()
    # Made anew: the cache may have gaps in its rows, or no slot.
    k, v = (x.new_empty(1, 1, *x.shape[2:]).expand(*sizes, *x.shape[2:]) for x in (call.k, call.v))
    return Inputs(call.q, k, v, alibi_slopes=call.slopes, cu_seqlens_q=call.offsets_q)


def _takes_triton(q: torch.Tensor, problem: Problem) -> bool:
    """Whether Triton may run a call: where the user has named no other backend."""
    chosen, _ = choose_backend(FORWARD, q, "auto", problem)
    return triton_if_allowed(q, problem, chosen) is not None


def attention_paged(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The op that compiled graphs call: the output and its log-sum-exp.

    Its arguments are the fields of Paged, the keys of each sequence, then causal, scale,
    window_left, window_right, softcap, max_seqlen_q and max_seqlen_k.
    """
    call, lengths, options = _split(arguments)
    launch = launch_of(call, options)
    if launch is not None:
        return launch(*call.tensors(lengths))
    cache = call.cache()
    begins = torch.zeros_like(lengths) if call.begins is None else call.begins
    room = cache.capacity() if options[-1] is None else min(options[-1], cache.capacity())
    k, v = cache.read(begins, lengths, room)
    inputs = with_any_keys(call)._replace(k=k, v=v, seqused_k=lengths)
    return run.forward(*inputs, *options)


def attention_paged_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_paged`, without values."""
    call, _, options = _split(arguments)
    problem = inspect_symbolic(with_any_keys(call), Options._make(options))
    return (
        call.q.new_empty(problem.out_shape),
        call.q.new_empty(problem.lse_shape, dtype=problem.lse_dtype),
    )


def _split(arguments: tuple[Any, ...]) -> tuple[Paged, torch.Tensor, tuple[Any, ...]]:
    """The arguments of the op as a call, the keys of each sequence, and the fields of Options."""
    fields = len(Paged._fields)
    lengths, causal, scale, left, right, softcap, *bounds = arguments[fields:]
    shared = (causal, scale, left, right, softcap)
    options = pack_options(*shared, 0.0, False, "bshd", "auto", *bounds)
    return Paged._make(arguments[:fields]), lengths, options
