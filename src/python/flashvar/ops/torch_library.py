"""How torch knows the ops: their schemas, implementations, fakes and derivatives.

Registered with `Library.define` and `impl` (2 us a call; `custom_op` takes 11). Everything that is
traced, compiled, exported, differentiated or intercepted by a mode comes through here.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.backends import reference
from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention_inputs import inspect
from flashvar.ops.attention_plan import plan

_LIBRARY: Final = torch.library.Library("flashvar", "DEF")
_TAGS: Final = (torch.Tag.pt2_compliant_tag,)

_LIBRARY.define(
    "attention_fwd(Tensor q, Tensor k, Tensor v, bool causal, float? scale, str layout, "
    "str backend) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
_LIBRARY.define(
    "attention_bwd(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, bool causal, "
    "float? scale, str layout) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    tags=_TAGS,
)


def _attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = plan(q, k, v, causal, scale, layout, backend).run(q, k, v, with_lse=True)
    assert lse is not None
    return out, lse


def _attention_fwd_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    # A scale may be symbolic here; its value is checked when the op runs.
    problem = inspect(q, k, v, causal=causal, scale=None, layout=layout, backend=backend)
    return (
        q.new_empty(problem.out_shape),
        q.new_empty(problem.lse_shape, dtype=problem.lse_dtype),
    )


def _attention_bwd(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    problem = inspect(q, k, v, causal=causal, scale=scale, layout=layout, backend="reference")
    return reference.attention_bwd(problem, grad_out, grad_lse, q, k, v)


def _attention_bwd_fake(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, causal, scale, layout, _backend = inputs
    ctx.save_for_backward(q, k, v)
    ctx.options = (causal, scale, layout)
    # An output that nothing used has gradient None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    none = (None,) * 7
    if grad_out is None and grad_lse is None:
        return none
    grads = torch.ops.flashvar.attention_bwd(grad_out, grad_lse, *ctx.saved_tensors, *ctx.options)
    return (*grads, *none[3:])


def _differentiate_twice(ctx: Any, *grads: torch.Tensor) -> None:
    raise BackendUnavailableError(
        "flashvar.attention has first derivatives only, got a request for the second (a backward "
        "through create_graph=True): use torch.nn.functional.scaled_dot_product_attention with "
        "SDPBackend.MATH there"
    )


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_fwd", _attention_fwd, _key)
    _LIBRARY.impl("attention_bwd", _attention_bwd, _key)
torch.library.register_fake("flashvar::attention_fwd", _attention_fwd_fake, lib=_LIBRARY)
torch.library.register_fake("flashvar::attention_bwd", _attention_bwd_fake, lib=_LIBRARY)
torch.library.register_autograd(
    "flashvar::attention_fwd", _differentiate, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd("flashvar::attention_bwd", _differentiate_twice, lib=_LIBRARY)

attention_fwd: Final = torch.ops.flashvar.attention_fwd.default
