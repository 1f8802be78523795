"""Compiling the Triton kernels of a kind of call before the first such call.

Only what is in a `Kind` decides how a kernel is compiled: sizes, strides and scales are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from flashvar.backends.triton.attention import launch, tiles
from flashvar.backends.triton.attention.tiles import Tile
from flashvar.binaries.variant import pair_words
from flashvar.ops.attention import run as attention_run
from flashvar.ops.attention.inputs import inspect, inspect_backward
from flashvar.ops.attention.padding import pad_inputs
from flashvar.ops.attention.plan import plan
from flashvar.ops.attention.problem import Gradients, Inputs, Options

# What a call may ask for beside q, k and v.
FEATURES: Final = ("window", "softcap", "alibi", "bias", "dropout", "varlen", "seqused")
# Bytes of shared memory that a block may have, by capability; CUDA C++ programming guide, table of
# technical specifications, less the 1 KiB that the system takes of each block.
SHARED_MEMORY: Final = {
    (7, 5): 64 << 10,
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
    (12, 1): 99 << 10,
}
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Two sequences that are longer than the window, and hold whole rows of a bias.
_SEQLEN: Final = 64
_WINDOW: Final = 16
_BATCH: Final = 2


@dataclass(frozen=True)
class Kind:
    """Calls that share their kernels. Training calls keep the log-sum-exp and have a backward."""

    dtype: str  # "bf16" or "fp16"
    head_dim: int
    head_dim_v: int
    causal: bool
    training: bool
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """In words."""
        with_what = [one for one in FEATURES if one in self.features]
        return " ".join(
            (
                "forward and backward" if self.training else "forward",
                self.dtype,
                f"head dim {pair_words(*self.dims)}",
                "causal" if self.causal else "full",
                *([f"({', '.join(with_what)})"] if with_what else []),
            )
        )

    @property
    def dims(self) -> tuple[int, int]:
        """Of queries and keys, and of values."""
        return self.head_dim, self.head_dim_v

    @property
    def options(self) -> Options:
        """Of one call."""
        packed = "varlen" in self.features
        return Options(
            causal=self.causal,
            window_left=_WINDOW if "window" in self.features else -1,
            softcap=1.0 if "softcap" in self.features else 0.0,
            dropout_p=0.5 if "dropout" in self.features else 0.0,
            backend="triton",
            max_seqlen_q=_SEQLEN if packed else None,
            max_seqlen_k=_SEQLEN if packed else None,
        )

    def inputs(self, device: torch.device) -> Inputs:
        """Of one call, zeros."""
        rows = (_BATCH * _SEQLEN,) if "varlen" in self.features else (_BATCH, _SEQLEN)
        make: Any = partial(torch.zeros, device=device)
        dtype, integers = _DTYPES[self.dtype], torch.int32
        q, k = (make(*rows, 1, self.head_dim, dtype=dtype) for _ in range(2))
        offsets, used = None, None
        if "varlen" in self.features:
            offsets = torch.arange(_BATCH + 1, dtype=integers, device=device) * _SEQLEN
        if "seqused" in self.features:
            used = torch.full((_BATCH,), _SEQLEN, dtype=integers, device=device)
        return Inputs(
            q,
            k,
            make(*rows, 1, self.head_dim_v, dtype=dtype),
            bias=make(1, 1, _SEQLEN, _SEQLEN, dtype=dtype) if "bias" in self.features else None,
            alibi_slopes=make(1) if "alibi" in self.features else None,
            rng_state=make(2, dtype=torch.int64) if "dropout" in self.features else None,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            seqused_k=used,
        )


def run(kind: Kind, device: int) -> None:
    """Make one call on `cuda:device`; what it compiles, Triton keeps."""
    inputs, options = kind.inputs(torch.device("cuda", device)), kind.options
    if not kind.training:
        plan(*inputs[:3], inputs[3:], options).run(inputs, with_lse=False)
    else:
        out, lse = attention_run.forward(inputs, options)
        attention_run.backward(out, None, inputs, out, lse, options, inputs.bias is not None)
    torch.cuda.synchronize(device)


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile for a device that is not here; Triton finds it where one is.

    Afterwards this process can start no kernel of Triton's.
    """
    _pretend(capability)
    inputs, options = pad_inputs(kind.inputs(torch.device("cpu"))), kind.options
    choose = _chooser(kind, inputs, capability)
    problem = inspect(inputs, options)
    out = inputs.q.new_empty(problem.out_shape)
    lse = torch.empty(problem.lse_shape)
    forward = launch.forward(problem, choose("forward"), _compile)
    if not kind.training:
        forward(inputs, out, None)
        return
    forward(inputs, out, lse)
    wants_bias = inputs.bias is not None
    backward = inspect_backward(inputs, options, out, wants_bias)
    both = choose("backward_q"), choose("backward_kv")
    grads = Gradients(inputs.q, inputs.k, inputs.v, torch.empty(1) if wants_bias else None)
    run = launch.backward(backward, *both, choose("backward_bias"), _compile)
    run(inputs, out, lse, out, None, grads)


def _compile(kernel: Any, grid: tuple[int, ...]) -> Any:
    return partial(kernel.warmup, grid=grid)


def _chooser(kind: Kind, inputs: Inputs, capability: tuple[int, int]) -> Callable[[str], Tile]:
    dims = inputs.q.shape[-1], inputs.v.shape[-1]
    bias = launch.BIAS_BYTES[kind.dtype if inputs.bias is not None else None]
    shared_memory = SHARED_MEMORY[capability]
    return lambda direction: tiles.choose(direction, capability, shared_memory, *dims, bias)


def _pretend(capability: tuple[int, int]) -> None:
    """Make Triton compile for a capability; it asks its driver for nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    number = 10 * capability[0] + capability[1]

    class Absent:
        """The driver of a device that is not here."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", number, 32)

        def get_current_device(self) -> str:
            return f"sm_{number}"  # Triton keeps apart by it what it has compiled

        def get_current_stream(self, device: str) -> int:
            return 0

    driver.set_active(Absent())
