"""How a public function reaches the kernels: straight, through autograd, or through torch's op."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd import forward_ad

from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention_autograd import differentiable
from flashvar.ops.attention_flops import tell_flop_counters
from flashvar.ops.attention_inputs import inspect
from flashvar.ops.attention_plan import NO_EXTRAS, Extras, plan
from flashvar.ops.attention_problem import Inputs, Options
from flashvar.ops.torch_library import attention_fwd

Outputs = tuple[torch.Tensor, torch.Tensor | None]

# Any 63 bits make a seed.
_SEEDS: Final = 2**63 - 1


def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    options: tuple[Any, ...],
    with_lse: bool,
) -> Outputs:
    """Attention of tensors that may be anything; `options` are the fields of Options in order."""
    if torch.compiler.is_compiling():
        out, lse = attention_fwd(*_cast(q, k, v, extras), *options)
        return out, lse
    if not _is_plain(q, k, v) or (extras is not NO_EXTRAS and not _are_plain(extras)):
        inputs = Inputs(*_cast(q, k, v, extras))
        # Here too the words of an error are ours rather than the dispatcher's.
        if torch._C._functorch.peek_interpreter_stack() is None and _concrete(inputs):
            inspect(inputs, Options._make(options))
        _refuse_forward_mode(inputs)
        tell_flop_counters()
        out, lse = attention_fwd(*inputs, *options)
        return out, lse
    found = plan(q, k, v, extras, options)
    inputs = Inputs(q, k, v, *extras)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (extras is not NO_EXTRAS and _any_requires_grad(extras))
    ):
        return differentiable(found, inputs, options)
    return found.run(inputs, with_lse)


def draw_rng_state(q: torch.Tensor) -> torch.Tensor:
    """Seed and offset of a dropout mask from torch's generator of the device of q."""
    return torch.randint(_SEEDS, (2,), dtype=torch.int64, device=q.device)


def _is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether nothing but autograd needs to know of the call: then the dispatcher is not asked."""
    plain = torch.Tensor
    return (
        (type(q) is plain or type(q) is torch.nn.Parameter)
        and (type(k) is plain or type(k) is torch.nn.Parameter)
        and (type(v) is plain or type(v) is torch.nn.Parameter)
        and not q.is_meta
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and not torch._C._is_any_autocast_enabled()
    )


def _are_plain(extras: Extras) -> bool:
    return all(x is None or type(x) in (torch.Tensor, torch.nn.Parameter) for x in extras)


def _any_requires_grad(extras: Extras) -> bool:
    return any(x is not None and x.requires_grad for x in extras)


def _concrete(inputs: Inputs) -> bool:
    return not any(isinstance(size, torch.SymInt) for x in inputs[:3] for size in x.shape)


def _cast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras
) -> tuple[torch.Tensor | None, ...]:
    """The tensors as autocast wants them: as for scaled_dot_product_attention, all but float64."""
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return (q, k, v, *extras)
    dtype = torch.get_autocast_dtype(device)
    bias, *others = extras
    q, k, v = (_lower(x, dtype) for x in (q, k, v))
    return (q, k, v, None if bias is None else _lower(bias, dtype), *others)


def _lower(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _refuse_forward_mode(inputs: Inputs) -> None:
    """Torch would take the tangent of an op that it cannot differentiate forward for 0."""
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise BackendUnavailableError(
            "flashvar.attention has no forward-mode derivative, got an input with a tangent (jvp, "
            "jacfwd or a dual tensor): use reverse mode, or "
            "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH there"
        )
