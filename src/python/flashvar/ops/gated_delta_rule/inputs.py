"""Checks that the arguments of gated_delta_rule fit together."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import torch

from flashvar.errors import (
    DtypeError,
    InvalidInputError,
    LayoutError,
    ShapeError,
)
from flashvar.ops.arguments import (
    check_backend,
    check_device,
    check_flag,
    check_operand,
    check_scale,
    float32_scale,
)
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.gated_delta_rule.problem import Inputs
from flashvar.ops.sequences import (
    check_cu_seqlens,
    check_offsets,
    check_one_for_each,
    check_own_memory,
)
from flashvar.ops.unknown_sizes import differ

# "kv": states are [..., K, V]; "vk": [..., V, K].
StateLayout = Literal["kv", "vk"]
STATE_LAYOUTS: Final[tuple[str, ...]] = get_args(StateLayout)
_DEFAULT_SCALE: Final = "K ** -0.5"
_REQUIRED: Final = ("q", "k", "v", "beta")


def check_kinds(
    tensors: dict[str, Any], switches: dict[str, Any], scale: Any, backend: Any
) -> None:
    """Refuse what the dispatcher could not hand on: no tensors, other kinds, unknown options."""
    for name, x in tensors.items():
        if x is None and name not in _REQUIRED:
            continue
        check_operand(name, x, "sequences packed as [1, total, ...], and pass cu_seqlens")
    for name, value in switches.items():
        check_flag(name, value)
    check_scale(scale, _DEFAULT_SCALE)
    if scale is not None:
        float32_scale(scale, _DEFAULT_SCALE)
    check_backend(backend)


def check_state_layout(layout: Any) -> None:
    """Refuse an unknown order of a state's dimensions."""
    if type(layout) is not str or layout not in STATE_LAYOUTS:
        raise LayoutError(
            f"state_layout must be one of {', '.join(map(repr, STATE_LAYOUTS))}, found {layout!r}: "
            'name the order of the last two dimensions of states, "kv" for [..., K, V]'
        )


def check(inputs: Inputs) -> None:
    """Refuse inputs that do not fit together."""
    _check_rows(inputs)
    _check_gates(inputs)
    if inputs.allow_neg_eigval and not inputs.beta_sigmoid:
        raise InvalidInputError(
            "allow_neg_eigval must come with beta_sigmoid=True, whose result it doubles, found "
            "beta_sigmoid=False: pass beta up to 2 itself"
        )
    if inputs.cu_seqlens is not None:
        check_cu_seqlens(inputs.cu_seqlens, "q", inputs.q, *inputs.q.shape[:2])
    for name in ("k", "v", "g", "beta", "a_log", "dt_bias", "cu_seqlens"):
        if (x := getattr(inputs, name)) is not None:
            check_device(_public(name), x, inputs.q.device, "q")


def _check_rows(inputs: Inputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ShapeError(
                f"{name} must be [batch, seqlen, heads, head_dim], found {tuple(x.shape)}: "
                "packed sequences have batch 1, add it with .unsqueeze(0)"
            )
        if x.dtype not in DTYPES:
            raise DtypeError(
                f"{name} must be bfloat16, float16 or float32 (float64 too on the CPU), found "
                f"{x.dtype}: cast it with .to(torch.bfloat16)"
            )
        if x.dtype != q.dtype:
            raise DtypeError(
                f"q, k and v must have one dtype, found {q.dtype} and, in {name}, {x.dtype}: "
                f"cast it with .to({q.dtype})"
            )
        if x.shape[-1] == 0:
            raise ShapeError(
                f"the head dim of {name} must be at least 1, found {tuple(x.shape)}: "
                "check the projection that made it"
            )
    if differ(k.shape, q.shape):
        raise ShapeError(
            f"q and k must have one shape, found {tuple(q.shape)} and {tuple(k.shape)}: "
            "only v may have more heads and another head dim"
        )
    if differ(v.shape[:2], q.shape[:2]):
        raise ShapeError(
            f"v must have the batch and seqlen of q, {tuple(q.shape[:2])}, found "
            f"{tuple(v.shape[:2])}: check that the order is [batch, seqlen, heads, head_dim]"
        )
    qk_heads, heads = q.shape[2], v.shape[2]
    if (heads if qk_heads == 0 else heads % qk_heads) != 0:
        raise ShapeError(
            f"the heads of v must be a multiple of those of q and k, found {heads} and {qk_heads}: "
            "repeat heads of v, or check that the order is [batch, seqlen, heads, head_dim]"
        )


def _check_gates(inputs: Inputs) -> None:
    q, v = inputs.q, inputs.v
    rows, heads = tuple(v.shape[:3]), tuple(v.shape[2:3])
    for name, shape, form in (
        ("g", rows, "[batch, seqlen, heads of v]"),
        ("beta", rows, "[batch, seqlen, heads of v]"),
        ("a_log", heads, "[heads of v]"),
        ("dt_bias", heads, "[heads of v]"),
    ):
        x = getattr(inputs, name)
        if x is None:
            continue
        if differ(x.shape, shape):
            raise ShapeError(
                f"{_public(name)} must be {form}, that is {shape} with v {tuple(v.shape)}, found "
                f"{tuple(x.shape)}: check the order of its dimensions"
            )
        wide = torch.promote_types(q.dtype, torch.float32)
        if x.dtype not in (q.dtype, wide):
            kinds = " or ".join(dict.fromkeys((str(wide), str(q.dtype))))
            raise DtypeError(
                f"{_public(name)} must be {kinds} with {q.dtype} q, k and v, found {x.dtype}: "
                f"cast it with .to({wide})"
            )
    if inputs.a_log is not None and inputs.g is None:
        raise InvalidInputError(
            "g must be given with A_log, which makes a gate of it, found None: pass the raw gate, "
            "or leave A_log out for no gate"
        )
    if inputs.dt_bias is not None and inputs.a_log is None:
        raise InvalidInputError(
            "dt_bias must come with A_log, found A_log=None: pass A_log, or leave dt_bias out and "
            "pass the gate itself, g in log space"
        )


def _public(name: str) -> str:
    return "A_log" if name == "a_log" else name


def state_shape(inputs: Inputs, count: int, layout: str) -> tuple[int, ...]:
    """The shape of `count` states."""
    k, v = inputs.q.shape[-1], inputs.v.shape[-1]
    return (count, inputs.heads, *((k, v) if layout == "kv" else (v, k)))


def check_initial_state(inputs: Inputs, state: torch.Tensor, layout: str) -> None:
    """Refuse states that are none of these sequences'."""
    expected = state_shape(inputs, inputs.sequences, layout)
    if differ(state.shape, expected):
        raise ShapeError(
            f"initial_state must be [sequences, heads of v, {', '.join(layout.upper())}], that is "
            f"{expected}, found {tuple(state.shape)}: pass one state for each sequence, and name "
            "the order of its dimensions in state_layout"
        )
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    if state.dtype != wide:
        raise DtypeError(
            f"initial_state must be {wide} with {inputs.q.dtype} q, k and v, found {state.dtype}: "
            f"cast it with .to({wide})"
        )
    check_device("initial_state", state, inputs.q.device, "q")


def check_pool(inputs: Inputs, pool: torch.Tensor, indices: torch.Tensor, layout: str) -> None:
    """Refuse a pool of other states, and indices that are not one for each sequence."""
    if pool.dim() != 4 or differ(pool.shape, state_shape(inputs, pool.shape[0], layout)):
        form = ("pool", *state_shape(inputs, 0, layout)[1:])
        raise ShapeError(
            f"initial_state must be [{', '.join(map(str, form))}] with state_indices, found "
            f"{tuple(pool.shape)}: name the order of its dimensions in state_layout"
        )
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    if pool.dtype not in (wide, inputs.q.dtype):
        raise DtypeError(
            f"initial_state must be {wide} or {inputs.q.dtype}, the dtype of q, with "
            f"state_indices, found {pool.dtype}: make the pool in one of them"
        )
    check_one_for_each("state_indices", indices, inputs.sequences)
    check_own_memory("initial_state", pool)
    for name, x in (("initial_state", pool), ("state_indices", indices)):
        check_device(name, x, inputs.q.device, "q")


def check_values(inputs: Inputs) -> None:
    """Refuse gates above 0 and offsets of no sequences.

    On the CPU only: elsewhere it would wait for a device.
    """
    if inputs.q.device.type != "cpu":
        return
    g = inputs.g
    if g is not None and inputs.a_log is None and g.numel() and bool((g > 0).any()):
        raise InvalidInputError(
            f"g must be at most 0, the logarithm of a decay, found {float(g[g > 0][0])}: pass "
            "decay.log(), or A_log where g is the raw gate"
        )
    if inputs.cu_seqlens is not None:
        check_offsets(inputs.cu_seqlens, inputs.q.shape[1])
