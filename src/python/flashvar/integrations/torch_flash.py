"""Flashvar as a flash attention of torch's own registry: the kernels below torch's dispatcher.

Of newer torch (torch.nn.attention.register_flash_attention_impl). Wherever torch itself chooses
flash attention on a CUDA device, in C++ as well, flashvar computes; calls that it does not serve
keep the kernel that was there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from flashvar.errors import BackendUnavailableError
from flashvar.integrations.serving import unserved
from flashvar.ops import attention_run
from flashvar.ops.attention_call import draw_rng_state
from flashvar.ops.attention_problem import Inputs, Options

__all__ = ["NAME", "Implementation", "switch_off", "switch_on"]

NAME: Final = "flashvar"
_FORWARD: Final = "_scaled_dot_product_flash_attention"
_BACKWARD: Final = "_scaled_dot_product_flash_attention_backward"

# What was active before flashvar, to be put back.
_before: list[str | None] = []


def switch_on() -> bool:
    """Make flashvar torch's flash attention; False where this torch has no such registry."""
    registry: Any = torch.nn.attention
    if not (
        hasattr(registry, "register_flash_attention_impl")
        and hasattr(torch.library, "get_kernel")
        and torch.version.hip is None  # its kernels keep another state of dropout
    ):
        return False
    current = registry.current_flash_attention_impl()
    if current != NAME:
        registry.register_flash_attention_impl(NAME, register_fn=Implementation)
        registry.activate_flash_attention_impl(NAME)
        _before.append(current)
    return True


def switch_off() -> None:
    """Put back what was there before `switch_on`; does nothing without one."""
    if not _before:
        return
    registry: Any = torch.nn.attention
    before = _before.pop()
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()
        if before is not None:
            registry.activate_flash_attention_impl(before)


class Implementation:
    """The kernels of torch's flash attention at one dispatch key, until `remove`."""

    def __init__(self, key: str = "CUDA") -> None:
        ops = torch.ops.aten
        self._own_forward = _kernel(getattr(ops, _FORWARD).default, key)
        self._own_backward = _kernel(getattr(ops, _BACKWARD).default, key)
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns of what is wanted here: a kernel replaced
            warnings.simplefilter("ignore", UserWarning)
            self._library.impl(_FORWARD, self._forward, key, with_keyset=True)
            self._library.impl(_BACKWARD, self._backward, key, with_keyset=True)

    def remove(self) -> None:
        """Put torch's own kernels back."""
        self._library._destroy()

    def _forward(
        self,
        keys: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = "a debug mask is wanted" if return_debug_mask else _why_not(q, v)
        if reason is not None:
            words = (q, k, v, dropout_p, is_causal, return_debug_mask)
            return _existing(self._own_forward, reason).call_boxed(keys, *words, scale=scale)
        state = draw_rng_state(q) if dropout_p > 0 else None
        turn, options = _layout(q, dropout_p, is_causal, scale)
        out, lse = attention_run.forward(
            Inputs(turn(q), turn(k), turn(v), rng_state=state), options
        )
        if state is None:
            state = torch.empty(2, dtype=torch.int64, device=q.device)
        return (
            _laid_out(turn(out), q),
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            state.view(torch.uint64),
            torch.empty((), dtype=torch.uint64, device=q.device),
            torch.empty(0, dtype=q.dtype, device=q.device),
        )

    def _backward(
        self,
        keys: Any,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: torch.Tensor,
        unused: Any,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = _why_not(q, v)
        if reason is not None:
            words = (grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p)
            rest = (is_causal, rng_state, unused)
            own = _existing(self._own_backward, reason)
            return own.call_boxed(keys, *words, *rest, scale=scale)
        state = rng_state.view(torch.int64) if dropout_p > 0 else None
        turn, options = _layout(q, dropout_p, is_causal, scale)
        inputs = Inputs(turn(q), turn(k), turn(v), rng_state=state)
        grads = attention_run.backward(
            turn(grad_out), None, inputs, turn(out), lse, options, wants_bias=False
        )
        pairs = zip((q, k, v), grads[:3], strict=True)
        return tuple(_laid_out(turn(grad), tensor) for tensor, grad in pairs)


def _kernel(op: Any, key: str) -> Any:
    """The kernel that a key has now, or None."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return None
    return torch.library.get_kernel(op, key)


def _existing(kernel: Any, reason: str) -> Any:
    if kernel is None:
        raise BackendUnavailableError(
            f"expected a flash attention of torch's own for a call with {reason}, found none: "
            "leave it to another one, with torch.nn.attention.sdpa_kernel"
        )
    return kernel


def _why_not(q: torch.Tensor, v: torch.Tensor) -> str | None:
    if v.shape[3] != q.shape[3]:  # torch promises an output in the shape of q
        return "a head dim of v that differs"
    return unserved(q.dtype, q.device, q.shape[3], v.shape[3], True, "auto")


def _layout(
    q: torch.Tensor, dropout_p: float, causal: bool, scale: float | None
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Options]:
    """How to turn [batch, heads, sequence, head_dim] so that the output need not be copied."""
    options = Options(causal=causal, dropout_p=dropout_p, scale=scale)
    if q.stride(1) < q.stride(2):
        return _swapped, options
    return _as_it_is, options._replace(layout="bhsd")


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor in the strides that torch promises its compiler: those of the input, dense."""
    strides = _dense(tuple(like.shape), like.stride())
    found = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(size == 1 or have == want for size, have, want in found):
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


@lru_cache
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    found: tuple[int, ...] = torch.empty_like(
        torch.empty_strided(shape, strides, device="meta")
    ).stride()
    return found
