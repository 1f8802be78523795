"""Runs torch.nn.functional.scaled_dot_product_attention with flashvar.

    import flashvar.integrations.torch

    with flashvar.integrations.torch.activate():    # or activate() ... deactivate()
        model(batch)

Calls that flashvar does not support go to torch's own function, and `last_reason` has the reason.
So do calls that a mode, a tensor subclass or another replacement of the function must see; of
these, flashvar still runs the ones for which torch chooses flash attention, below the dispatcher
(`flash`).
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final

import torch
from torch.overrides import handle_torch_function

from flashvar.integrations.call_counts import CallCounts
from flashvar.integrations.fallback import report_fallback
from flashvar.integrations.support import explicit_backend
from flashvar.integrations.torch import attribute as torch_attribute
from flashvar.integrations.torch import causal_bias as torch_causal_bias
from flashvar.integrations.torch import flash as torch_flash
from flashvar.integrations.torch.sdpa import attend, attend_fast, non_plain_type, why_not
from flashvar.ops.dispatch_modes import active_mode, is_compiling, no_dispatch_mode_active
from flashvar.selection.request import BackendName

__all__ = [
    "RUN",
    "RUN_BELOW_DISPATCHER",
    "Activation",
    "activate",
    "active",
    "deactivate",
    "last_reason",
    "report",
]

RUN: Final = "run by flashvar"
RUN_BELOW_DISPATCHER: Final = "run by flashvar below torch's dispatcher"
_ON_CPU: Final = (
    "CPU tensors, where torch's own is faster; activate(backend='reference') takes them"
)
_SWITCHED_OFF: Final = "flash attention is switched off (torch.nn.attention.sdpa_kernel)"
_MISFIT: Final = "attn_mask is a CausalBias of other lengths than q and k have"

_torchs_own: Final = torch_attribute.OWN

# One thread at a time: of two that register kernels, each may wait for the other in torch forever.
_lock: Final = threading.RLock()
_stack: list[Activation] = []
# The settings of the innermost activation, in globals because calls read them fastest there.
_active = False
_backend: BackendName = "auto"
_on_cpu = False
_had_fastpath = True
_calls: Final = CallCounts()


class _Thread(threading.local):
    reason: str | None = None  # of the last call


_last: Final = _Thread()


class Activation:
    """One `activate()`, as a context manager that undoes it on exit."""

    def __init__(self, backend: BackendName) -> None:
        self.backend = backend
        self.on_cpu = explicit_backend(backend) != "auto"

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            if self in _stack:
                _stack.remove(self)
                _switch()


def activate(backend: BackendName = "auto") -> Activation:
    """Run torch.nn.functional.scaled_dot_product_attention with flashvar, in this process.

    Every call is checked separately. Calls that flashvar does not support go to torch's own
    function, with one line in the log for each reason; with FLASHVAR_STRICT=1 they raise. CPU
    tensors go there without a log line, unless a backend is named. The fused inference path of
    torch.nn.MultiheadAttention and TransformerEncoder does not call the function, and is switched
    off while flashvar is active.

    Modules that imported the function by name before keep torch's own. Calls that a mode, a tensor
    subclass (DTensor) or another replacement of the function must see also go to torch's own. Torch
    2.11 and newer has a registry of flash attentions: there flashvar becomes the active one and
    runs all of these calls without dropout on CUDA devices, also where torch would choose cuDNN,
    unless flash attention is switched off.

    Args:
        backend: As in `flashvar.attention`; "reference" runs on the CPU too.

    Returns:
        A context manager that undoes the activation on exit; without `with`, the activation lasts
        until `deactivate`.

    Raises:
        InvalidInputError: `backend` is not the name of a backend.
    """
    activation = Activation(backend)
    with _lock:
        _stack.append(activation)
        _switch()
    return activation


def deactivate() -> None:
    """Undo every `activate`; does nothing without one."""
    with _lock:
        if _stack:
            _stack.clear()
            _switch()


def active() -> bool:
    """Whether scaled_dot_product_attention is currently flashvar's."""
    return _active


def last_reason() -> str | None:
    """Why this thread's last call went to torch's own function; None if flashvar ran it.

    Also None before the first call. Calls in code that torch.compile compiled do not count.
    """
    return _last.reason


def report() -> dict[str, int]:
    """The number of calls since the first `activate`, by what became of them.

    The key RUN counts those that flashvar ran. The key RUN_BELOW_DISPATCHER counts those that
    reached it through torch's dispatcher; several of them may be steps of one attention call, as in
    torch's context_parallel. Each other key is a reason for which calls went to torch's function.
    """
    below = sum(torch_flash.CALLS.counts().values())
    return {**_calls.counts(), RUN_BELOW_DISPATCHER: below} if below else _calls.counts()


def _switch() -> None:
    """Apply the settings of the innermost activation to torch, or restore torch without one."""
    global _active, _backend, _on_cpu, _had_fastpath
    if not _stack:
        _active = False
        torch_attribute.restore()
        torch_causal_bias.restore()
        torch.backends.mha.set_fastpath_enabled(_had_fastpath)
        torch_flash.switch_off()
        return
    _backend, _on_cpu = _stack[-1].backend, _stack[-1].on_cpu
    torch_flash.switch_on(_backend, _on_cpu)
    if not _active:
        _active = True
        _calls.clear()
        _had_fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        torch_attribute.replace(_scaled_dot_product_attention)
        torch_causal_bias.recognize_own()


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention, run by flashvar where possible."""
    plain = attn_mask is None and dropout_p == 0.0 and type(enable_gqa) is bool
    if plain and _active and not _flash_is_off():
        out = attend_fast(query, key, value, is_causal, scale, _backend, _on_cpu)
        if out is not None:
            _note(None)
            return out
    given = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not _active:  # a caller kept the function
        return _own(query, key, value, *given)
    if is_compiling():
        if (mode := active_mode()) is not None:
            name = type(mode).__name__
            return _call_observed_without_graph(
                f"the mode {name} must see the call", query, key, value, *given
            )
    elif (observer := _observer(query, key, value, attn_mask)) is not None:
        return _call_observed(observer, query, key, value, *given)
    if attn_mask is not None and _is_causal_bias(attn_mask) and _misfits(attn_mask, query, key):
        call = _call_observed_without_graph if is_compiling() else _call_observed
        return call(_MISFIT, query, key, value, *given)
    bottom_right = False
    if attn_mask is not None and _is_causal_bias(attn_mask) and not is_causal:
        square = attn_mask.seq_len_q == attn_mask.seq_len_kv
        bottom_right = attn_mask.variant.name == "LOWER_RIGHT" and not square
        is_causal, attn_mask = True, None
    reason = _why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not is_compiling():
        _note(reason)
    if reason is None:
        return attend(
            *(query, key, value, attn_mask, dropout_p, is_causal, scale),
            *("bhsd", _backend, bottom_right),
        )
    if bottom_right:
        shape = query.shape[-2], key.shape[-2]
        seen = torch.ones(shape, dtype=torch.bool, device=query.device)
        attn_mask, is_causal = seen.tril(shape[1] - shape[0]), False
    return _own(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


# context_parallel of torch.distributed replaces the function that it finds under this name.
_scaled_dot_product_attention.__name__ = "scaled_dot_product_attention"


def _own(query: Any, key: Any, value: Any, *given: Any) -> Any:
    return _torchs_own(query, key, value, **_options(*given))


def _options(
    attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> dict[str, Any]:
    """The arguments that differ from torch's defaults: a mode may not support the others."""
    options: dict[str, Any] = {}
    if attn_mask is not None:
        options["attn_mask"] = attn_mask
    if dropout_p != 0.0:
        options["dropout_p"] = dropout_p
    if is_causal is not False:  # torch refuses what is no bool, also such as 0
        options["is_causal"] = is_causal
    if scale is not None:
        options["scale"] = scale
    if enable_gqa is not False:
        options["enable_gqa"] = enable_gqa
    return options


def _observer(query: Any, key: Any, value: Any, mask: Any) -> str | None:
    """The mode or tensor subclass that must see a call, in words; None without one."""
    kind = non_plain_type(query) or non_plain_type(key) or non_plain_type(value)
    if kind is not None:
        return f"a tensor has the type {kind.__name__}"
    if mask is not None and (kind := non_plain_type(mask)) and not _is_causal_bias(mask):
        return f"attn_mask has the type {kind.__name__}"
    if no_dispatch_mode_active():
        return None
    mode = active_mode()
    return None if mode is None else f"the mode {type(mode).__name__} must see the call"


def _call_observed(observer: str, query: Any, key: Any, value: Any, *given: Any) -> Any:
    """Call torch's own function, for modes and subclasses to see; flashvar may run its steps."""
    with _lock:
        torch_flash.set_up_dtensors()
    before = torch_flash.CALLS.of_this_thread()
    ours, mode = _scaled_dot_product_attention, active_mode()
    kept = getattr(mode, "__dict__", {}).values()
    if any(value is ours for value in kept):
        # The mode was entered while flashvar was active: it only knows flashvar's function.
        tensors = query, key, value
        return handle_torch_function(ours, tensors, *tensors, **_options(*given))
    with torch_attribute.read_as_own():
        out = _own(query, key, value, *given)
    if torch_flash.CALLS.of_this_thread() > before:
        _last.reason = None
    else:
        _note(observer if _on_cpu or _is_on_device(query) else _ON_CPU)
    return out


def _call_observed_without_graph(*arguments: Any) -> Any:
    """`_call_observed` outside the graph, which ends here: modes check which function they see."""
    return torch.compiler.disable(_call_observed)(*arguments)


# This is what torch.compiler.disable sets, without importing the compiler.
_call_observed_without_graph._torchdynamo_disable = True  # type: ignore[attr-defined]


def _is_on_device(tensor: Any) -> bool:
    with torch._C.DisableTorchFunction():  # modes must see only the call, not this check
        return isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu"


def _is_causal_bias(mask: Any) -> bool:
    """Whether a mask is torch's CausalBias; does not import its module, which takes a second."""
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def _misfits(bias: Any, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether torch may compute a call with the sizes of a CausalBias, and they are not the call's.

    Of an upper left or a square one, torch reads no sizes.
    """
    sizes = bias.seq_len_q, bias.seq_len_kv
    if bias.variant.name != "LOWER_RIGHT" or sizes[0] == sizes[1]:
        return False
    return sizes != (*query.shape[-2:-1], *key.shape[-2:-1])


def _why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> str | None:
    if not (_on_cpu or q.device.type != "cpu"):
        return _ON_CPU
    if _flash_is_off():
        return _SWITCHED_OFF
    return why_not(q, k, v, mask, dropout_p, causal, scale, gqa, "bhsd", _backend)


def _flash_is_off() -> bool:
    return not torch._C._get_flash_sdp_enabled()


# torch.compile treats the result at trace time as a constant, as torch's own choice of a kernel.
_flash_is_off._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _note(reason: str | None) -> None:
    _last.reason = reason
    _calls.add(reason or RUN)
    if reason is not None and reason is not _ON_CPU:
        report_fallback("scaled_dot_product_attention", reason, "torch's own")


# Makes torch.jit.script treat the function as torch's own.
if hasattr(torch.jit, "_builtins"):
    torch.jit._builtins._register_builtin(
        _scaled_dot_product_attention, "aten::scaled_dot_product_attention"
    )
