"""Values of packed offsets and lengths: their checks, and their dtype in kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from flashvar.errors import ShapeError
from flashvar.ops.attention.problem import Inputs, Options
from flashvar.ops.sequences import as_int32, check_ends


def check_values(inputs: Inputs, options: Options) -> None:
    """Read packed offsets and lengths; refuse those that decrease or leave the tensor.

    On a CUDA device this waits for the device, so it is done only with FLASHVAR_STRICT=1. Otherwise
    kernels clamp the offsets to stay inside the tensors.
    """
    for name, offsets, rows, bound in (
        ("cu_seqlens_q", inputs.cu_seqlens_q, inputs.q, options.max_seqlen_q),
        ("cu_seqlens_k", inputs.cu_seqlens_k, inputs.k, options.max_seqlen_k),
    ):
        if offsets is None:
            continue
        values = offsets.tolist()
        check_ends(name, values, rows.shape[0], padding=True)
        longest = max((stop - start for start, stop in pairwise(values)), default=0)
        if bound is not None and longest > bound:
            raise ShapeError(
                f"max_seqlen_{name[-1]} must be at least the longest sequence, found {bound} and a "
                f"sequence of {longest}: pass int(lengths.max())"
            )
    if inputs.seqused_k is not None:
        _check_used(inputs.seqused_k.tolist(), inputs, options.layout)


def _check_used(used: list[int], inputs: Inputs, layout: str) -> None:
    if inputs.cu_seqlens_k is None:
        lengths = [inputs.k.shape[2 if layout.startswith("bhsd") else 1]] * len(used)
    else:
        lengths = inputs.cu_seqlens_k.diff().tolist()
    for number, (one, length) in enumerate(zip(used, lengths, strict=False)):
        if not 0 <= one <= length:
            raise ShapeError(
                f"seqused_k must be from 0 to the keys of each sequence, found {one} in sequence "
                f"{number} of {length} keys: pass how many keys to use"
            )


def are_int32(inputs: Inputs) -> bool:
    """Whether the offsets and lengths of a call have the dtype that launches take."""
    return all(x is None or x.dtype == torch.int32 for x in _numbers(inputs))


def cast_launch(launch: Callable[..., None]) -> Callable[..., None]:
    """The launch of a call with int64 offsets or lengths, made from that of int32."""

    def run(inputs: Inputs, *others: Any) -> None:
        offsets_q, offsets_k, used = _numbers(inputs)
        of_q = _cast(offsets_q)
        of_k = of_q if offsets_k is offsets_q else _cast(offsets_k)
        numbers = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "seqused_k": _cast(used)}
        launch(inputs._replace(**numbers), *others)

    return run


def _cast(numbers: torch.Tensor | None) -> torch.Tensor | None:
    return None if numbers is None else as_int32(numbers)


def _numbers(inputs: Inputs) -> tuple[torch.Tensor | None, ...]:
    return inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k
