"""The launches of the Triton kernel that writes new keys and values into a KV cache."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import torch

from flashvar.backends.triton.attention.append_kernel import append_kernel
from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.repeated import RepeatedLaunch, on_device
from flashvar.ops.attention.cache import Cache
from flashvar.ops.plans import Maker, Plans, maker_of

# Elements of a 16-bit dtype in a load of 16 bytes for each thread of 4 warps.
_MAX_BLOCK: Final = 128 * 8
_BLOCK_PAGES: Final = 128

_Optional: TypeAlias = torch.Tensor | None


class AppendLaunch(NamedTuple):
    """The kernel of a call, and how the lengths that it writes are made."""

    run: RepeatedLaunch | None  # None: there are no sequences
    make_lengths: Maker
    device: int | None
    # Bytes from the first element to the end of the last: of k, v, cache.k and cache.v.
    spans: tuple[int, ...]

    def __call__(
        self, cache: Cache, k: _Optional, v: _Optional, before: torch.Tensor, begins: _Optional
    ) -> torch.Tensor:
        """As `append`, where k and v do not share memory with the cache."""
        lengths = self.make_lengths()
        if self.run is None:
            return lengths
        slots = cache.slots
        with on_device(self.device):
            self.run(
                lengths,
                before.contiguous(),
                None if begins is None else begins.contiguous(),
                None if slots is None else slots.contiguous(),
                cache.table,
                cache.k,
                cache.v,
                k,
                v,
            )
        return lengths

    def are_apart(self, cache: Cache, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether no tensor begins before another ends, apart from k and v."""
        first: list[int] = [k.data_ptr(), v.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr()]
        end = [begin + span for begin, span in zip(first, self.spans, strict=True)]
        pairs = ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
        return all(end[x] <= first[y] or end[y] <= first[x] for x, y in pairs)


_launches: Final[Plans[AppendLaunch]] = Plans()


def prepared(
    cache: Cache, k: _Optional, v: _Optional, before: torch.Tensor, begins: _Optional
) -> AppendLaunch:
    """The launch of such tensors, which is made once."""
    given = (*cache, k, v, before, begins)
    key = (*[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given],)
    if key not in _launches:
        _launches.keep(key, _make(cache, k, v, before))
    return _launches[key]


def _make(cache: Cache, k: _Optional, v: _Optional, before: torch.Tensor) -> AppendLaunch:
    batch = len(before)
    new = 0 if k is None else k.shape[1]
    slots, size, heads, k_dim = cache.k.shape
    v_dim = cache.v.shape[3]
    table = (0, 0) if cache.table is None else cache.table.stride()
    arguments: dict[str, Any] = {
        "table_row": table[0],
        "table_page": table[1],
        "new": new,
        "slots": slots,
        "size": size,
        "pages": 1 if cache.table is None else cache.table.shape[1],
        "HEADS": heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK_K": min(power_of_2(heads * k_dim), _MAX_BLOCK),
        "BLOCK_V": min(power_of_2(heads * v_dim), _MAX_BLOCK),
        "BLOCK_PAGES": _BLOCK_PAGES,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    for name, x, axes in (
        ("k_cache", cache.k, ("slot", "row", "head", "dim")),
        ("v_cache", cache.v, ("slot", "row", "head", "dim")),
        ("k", k, ("batch", "row", "head")),
        ("v", v, ("batch", "row", "head")),
    ):
        strides = (0, 0, 0) if x is None else x.stride()
        arguments |= {f"{name}_{axis}": by for axis, by in zip(axes, strides, strict=False)}
    run = RepeatedLaunch(append_kernel, (batch * max(new, 1),), arguments)
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    device = before.device
    spans = (*[0 if x is None else _span(x) for x in (k, v, cache.k, cache.v)],)
    return AppendLaunch(run if batch else None, maker_of(lengths, device), device.index, spans)


def _span(x: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if x.numel() == 0:
        return 0
    last: int = sum(by * (size - 1) for by, size in zip(x.stride(), x.shape, strict=True))
    return (last + 1) * int(x.element_size())
