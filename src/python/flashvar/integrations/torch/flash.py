"""Flashvar as torch's flash attention, below the dispatcher.

Needs the registry of torch 2.11 and newer (torch.nn.attention.register_flash_attention_impl).
Flashvar runs every call for which torch chooses flash attention on a CUDA device, also from C++,
in the steps of torch.distributed's context_parallel and for the parts of a DTensor. It also
replaces cuDNN's attention, which torch prefers on newer devices, unless flash attention is switched
off. Calls that flashvar does not support go to the kernel that was registered before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

from flashvar.errors import BackendUnavailableError
from flashvar.integrations.call_counts import CallCounts
from flashvar.integrations.support import unsupported
from flashvar.ops.arguments import is_scale
from flashvar.ops.attention import plan as plans
from flashvar.ops.attention.problem import Inputs, Options, Wanted
from flashvar.ops.sharding import dtensor
from flashvar.selection.request import BackendName

__all__ = ["CALLS", "NAME", "Implementation", "set_up_dtensors", "switch_off", "switch_on"]

NAME: Final = "flashvar"
_FLASH: Final = "_scaled_dot_product_flash_attention"
_CUDNN: Final = "_scaled_dot_product_cudnn_attention"
_ON_CPU: Final = "_scaled_dot_product_flash_attention_for_cpu"

# Marks a forward of the cuDNN op that flashvar computed, so that flashvar may compute the backward:
# the storage offset of its Philox seed, which is not used.
_SEED_OFFSET: Final = 1

# The flash attention that was active before flashvar, to be restored.
_before: list[str | None] = []
_on_cpu: list[Implementation] = []
_backend: BackendName = "auto"
_wants_cpu = False
# The forwards that flashvar computed below the dispatcher since it was switched on.
CALLS: Final = CallCounts()


def switch_on(backend: BackendName = "auto", on_cpu: bool = False) -> bool:
    """Make flashvar torch's flash attention; False where this torch has no such registry.

    With `on_cpu` also for DTensors on the CPU, for which torch has no flash attention.
    """
    global _backend, _wants_cpu
    registry: Any = torch.nn.attention
    if not (
        hasattr(registry, "register_flash_attention_impl")
        and hasattr(registry, "restore_flash_attention_impl")
        and hasattr(torch.library, "get_kernel")
        and torch.version.hip is None  # ROCm's kernels save another state of dropout
    ):
        return False
    _backend, _wants_cpu = backend, on_cpu
    current = registry.current_flash_attention_impl()
    if current != NAME:
        registry.register_flash_attention_impl(NAME, register_fn=Implementation)
        registry.activate_flash_attention_impl(NAME)
        _before.append(current)
        CALLS.clear()
    set_up_dtensors()
    return True


def switch_off() -> None:
    """Restore the flash attention before `switch_on`; does nothing without one."""
    global _wants_cpu
    _wants_cpu = False
    set_up_dtensors()
    if not _before:
        return
    registry: Any = torch.nn.attention
    before = _before.pop()
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()
        if before is not None:
            registry.activate_flash_attention_impl(before)


def set_up_dtensors() -> None:
    """Run DTensors on the CPU if requested, once the DTensor module is imported."""
    requested = _wants_cpu and dtensor() is not None
    if requested and not _on_cpu:
        _on_cpu.append(Implementation("CPU"))
    elif _on_cpu and not requested:
        _on_cpu.pop().remove()


class Implementation:
    """Replaces the kernels of torch's flash attention at one dispatch key, until `remove`."""

    def __init__(self, key: str = "CUDA") -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        self._replaced: dict[str, Any] = {}
        self._replace(_FLASH, key, self._forward)
        self._replace(f"{_FLASH}_backward", key, self._backward)
        self._replace(_CUDNN, key, self._cudnn_forward)
        self._replace(f"{_CUDNN}_backward", key, self._cudnn_backward)
        if key == "CPU":
            self._replace(_ON_CPU, "AutogradCPU", self._for_cpu)

    def remove(self) -> None:
        """Restore torch's own kernels."""
        self._library._destroy()

    def _replace(self, name: str, key: str, kernel: Callable[..., Any]) -> None:
        self._replaced[name] = _kernel(getattr(torch.ops.aten, name).default, key)
        with warnings.catch_warnings():  # torch warns that a kernel is replaced
            warnings.simplefilter("ignore", UserWarning)
            self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)

    def _own(
        self, name: str, reason: str, keys: Any, arguments: tuple[Any, ...], scale: Any
    ) -> Any:
        """Call the kernel that was registered before."""
        kernel = self._replaced[name]
        if kernel is None:
            raise BackendUnavailableError(
                f"expected a flash attention of torch's own for a call with {reason}, found none: "
                "choose another attention with torch.nn.attention.sdpa_kernel"
            )
        return kernel.call_boxed(keys, *arguments, scale=scale)

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
        reason = "a debug mask is wanted" if return_debug_mask else _why_not(q, v, dropout_p, scale)
        if reason is not None:
            arguments = (q, k, v, dropout_p, is_causal, return_debug_mask)
            return self._own(_FLASH, reason, keys, arguments, scale)
        out, lse = _attend(q, k, v, is_causal, scale)
        return (
            out,
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            torch.empty(2, dtype=torch.uint64, device=q.device),
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
        reason = _why_not(q, v, dropout_p, scale)
        if reason is not None:
            arguments = (grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p)
            rest = (is_causal, rng_state, unused)
            return self._own(f"{_FLASH}_backward", reason, keys, (*arguments, *rest), scale)
        return _gradients(grad_out, q, k, v, out, lse, is_causal, scale)

    def _cudnn_forward(
        self,
        keys: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        reason: str | None = None
        if not torch._C._get_flash_sdp_enabled():
            reason = "flash attention switched off"
        elif attn_bias is not None or return_debug_mask:
            reason = "a mask or a debug mask"
        elif is_causal and q.shape[2] != k.shape[2]:  # cuDNN aligns to the top left, flash does not
            reason = "a causal mask that is not square"
        reason = reason or _why_not(q, v, dropout_p, scale)
        if reason is not None:
            arguments = (q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal)
            return self._own(_CUDNN, reason, keys, (*arguments, return_debug_mask), scale)
        out, lse = _attend(q, k, v, is_causal, scale)
        seeds = torch.empty(_SEED_OFFSET + 1, dtype=torch.int64, device=q.device)
        sizes = q.shape[2], k.shape[2]
        seed, offset = seeds[_SEED_OFFSET], torch.empty_like(seeds[0])
        return out, lse.unsqueeze(-1), None, None, *sizes, seed, offset, None

    def _cudnn_backward(
        self,
        keys: Any,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        attn_bias: Any,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> Any:
        reason = _why_not(q, v, dropout_p, scale)
        if philox_seed.storage_offset() != _SEED_OFFSET:
            reason = "a forward of cuDNN's"
        if reason is not None:
            arguments = (grad_out, q, k, v, out, lse, philox_seed, philox_offset, attn_bias)
            rest = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
            return self._own(f"{_CUDNN}_backward", reason, keys, (*arguments, *rest), scale)
        return _gradients(grad_out, q, k, v, out, lse.squeeze(-1), is_causal, scale)

    def _for_cpu(
        self,
        keys: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        """Torch's CPU op. DTensor does not support it, so DTensors go to flash attention."""
        kind = dtensor()
        if kind is not None and isinstance(q, kind) and attn_mask is None:
            flash = getattr(torch.ops.aten, _FLASH).default
            return flash(q, k, v, dropout_p, is_causal, scale=scale)[:2]
        own = self._replaced[_ON_CPU]
        return own.call_boxed(keys, q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, in the strides of q, and the log-sum-exp [batch, heads, sequence]."""
    permute, options = _layout(q, causal, scale)
    out, lse = plans.forward(Inputs(permute(q), permute(k), permute(v)), options)
    CALLS.add(_FLASH)
    return _with_strides_of(permute(out), q), lse


def _gradients(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v, each in the strides of its tensor."""
    permute, options = _layout(q, causal, scale)
    inputs = Inputs(permute(q), permute(k), permute(v))
    grads = plans.backward(permute(grad_out), None, inputs, permute(out), lse, options, Wanted())
    pairs = zip((q, k, v), grads[:3], strict=True)
    return tuple(_with_strides_of(permute(grad), tensor) for tensor, grad in pairs)


def _kernel(op: Any, key: str) -> Any:
    """The kernel that is currently registered at a dispatch key, or None."""
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key):
        return None
    return torch.library.get_kernel(op, key)


def _why_not(q: torch.Tensor, v: torch.Tensor, dropout_p: float, scale: float | None) -> str | None:
    # A call may begin with one kernel and end with another, when flashvar is activated between its
    # forward and its backward. Each drops other elements, and a seed does not tell whose it is.
    if dropout_p > 0:
        return "dropout"
    if not is_scale(scale):
        return "a scale that is not a finite number of float32"
    if v.shape[3] != q.shape[3]:  # torch promises an output in the shape of q
        return "a head dim of v that differs"
    return unsupported(q.dtype, q.device, q.shape[3], v.shape[3], True, _backend)


def _layout(
    q: torch.Tensor, causal: bool, scale: float | None
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Options]:
    """The permutation of [batch, heads, sequence, head_dim] that avoids a copy of the output."""
    options = Options(causal=causal, scale=scale, backend=_backend)
    if q.stride(1) < q.stride(2):
        return _swapped, options
    return _unchanged, options._replace(layout="bhsd")


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _with_strides_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor in the strides that torch's fakes promise: those of empty_like(like)."""
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
