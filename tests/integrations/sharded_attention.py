"""Attention of DTensors over two processes on the CPU, each with half of the batch or of the heads.

    python -m torch.distributed.run --standalone --nproc-per-node=2 sharded_attention.py FOLDER

Each writes errors against attention of the whole, and where the results lie, to
FOLDER/found-RANK.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import flashvar
from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_
from flashvar.errors import InvalidInputError
from flashvar.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flashvar.integrations import torch as ours
from flashvar.integrations.torch import attribute

BATCH, HEADS, ROWS, DIM = 2, 4, 6, 8
Attention = Callable[..., Any]  # a result or several


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads_kv: int, layout: str) -> list[torch.Tensor]:
    shapes = [(BATCH, ROWS, number, DIM) for number in (HEADS, heads_kv, heads_kv)]
    if layout != "bshd":
        shapes = [(batch, heads, rows, dim) for batch, rows, heads, dim in shapes]
    return [made(*shape) for shape in shapes]


def compared(
    attention: Attention, tensors: list[torch.Tensor], places: list[Any], whole: Attention
) -> dict[str, Any]:
    """Errors of the results and the gradients, and where they lie."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = with_gradients(whole, [x.clone() for x in tensors])
    parts = [distribute_tensor(x, mesh, [place]) for x, place in zip(tensors, places, strict=True)]
    found = with_gradients(attention, parts)
    assert all(isinstance(x, DTensor) for x in found)
    pairs = zip(found, wanted, strict=True)
    return {
        "errors": [(have.full_tensor() - want).abs().max().item() for have, want in pairs],
        "places": [place_of(x) for x in found],
    }


def place_of(x: Any) -> str:
    """Where a DTensor lies; torch before 2.9 leaves out how the parts of a sum are reduced."""
    place = x.placements[0]
    return f"P({place.reduce_op})" if place.is_partial() else str(place)


def with_gradients(function: Attention, leaves: list[Any]) -> list[Any]:
    """The results of a function, and the gradients of their squares' sum."""
    results = function(*(x.requires_grad_() for x in leaves))
    results = results if isinstance(results, tuple) else (results,)
    total = sum(x.square().sum() for x in results)
    return [*results, *torch.autograd.grad(total, leaves)]


def sharded(heads_kv: int, layout: str, dim: int, **options: Any) -> dict[str, Any]:
    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v, *bias = tensors
        given = {"bias": bias[0]} if bias else {}
        return flashvar.attention(q, k, v, layout=layout, **given, **options)

    tensors, places = qkv(heads_kv, layout), [Shard(dim)] * 3
    return compared(attention, tensors, places, attention)


def biased(shape: tuple[int, ...], dim: int) -> dict[str, Any]:
    def attention(q: Any, k: Any, v: Any, bias: Any) -> torch.Tensor:
        return flashvar.attention(q, k, v, bias=bias, causal=True)

    place = Shard(1 if dim == 2 else 0) if shape[1 if dim == 2 else 0] > 1 else Replicate()
    tensors, places = [*qkv(HEADS, "bshd"), made(*shape)], [*[Shard(dim)] * 3, place]
    return compared(attention, tensors, places, attention)


def with_sinks(dim: int, place: Any) -> dict[str, Any]:
    def attention(q: Any, k: Any, v: Any, sinks: Any) -> torch.Tensor:
        return flashvar.attention(q, k, v, sinks=sinks, causal=True)

    tensors, places = [*qkv(HEADS, "bshd"), made(HEADS)], [*[Shard(dim)] * 3, place]
    return compared(attention, tensors, places, attention)


def packed() -> dict[str, Any]:
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [made(ROWS, HEADS, DIM) for _ in "qkv"]

    def of(given: torch.Tensor) -> Attention:
        return lambda q, k, v: flashvar.attention_varlen(
            q, k, v, cu_seqlens_q=given, cu_seqlens_k=given, max_seqlen_q=4, max_seqlen_k=4
        )

    everywhere = distribute_tensor(lengths, mesh, [Replicate()])
    return compared(of(everywhere), tensors, [Shard(1)] * 3, of(lengths))


def packed_queries() -> dict[str, Any]:
    """Packed queries on keys of a static cache, which are not packed."""
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [made(ROWS, HEADS, DIM), *(made(BATCH, 2 * ROWS, 2, DIM) for _ in "kv")]

    def of(given: torch.Tensor) -> Attention:
        return lambda q, k, v: flashvar.attention_varlen(q, k, v, cu_seqlens_q=given, causal=True)

    everywhere = distribute_tensor(lengths, mesh, [Replicate()])
    return compared(of(everywhere), tensors, [Shard(1), Shard(2), Shard(2)], of(lengths))


def dropped() -> dict[str, Any]:
    """One mask for all ranks, whose state every one of them has."""
    state = torch.tensor([5, 6])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def of(given: torch.Tensor) -> Attention:
        return lambda q, k, v: flashvar.attention(q, k, v, dropout_p=0.5, rng_state=given)

    everywhere = distribute_tensor(state, mesh, [Replicate()])
    return compared(of(everywhere), qkv(HEADS, "bshd"), [Shard(2)] * 3, of(state))


def through_torch(heads_kv: int, dim: int) -> dict[str, Any]:
    """torch's function on tensor-parallel heads."""
    own = attribute.OWN
    gqa = heads_kv != HEADS

    def attention(q: Any, k: Any, v: Any) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

    def whole(q: Any, k: Any, v: Any) -> torch.Tensor:
        return own(q, k, v, is_causal=True, enable_gqa=gqa)

    with ours.activate("reference"):
        found = compared(attention, qkv(heads_kv, "bhsd"), [Shard(dim)] * 3, whole)
        return {**found, "report": ours.report()}


def merged(layout: str, dim: int, stacked: bool = False) -> dict[str, Any]:
    """merge_states of two parts whose outs are sharded over a dimension, and lses likewise."""
    shapes = {
        "bshd": ((BATCH, ROWS, HEADS, DIM), (0, 2, 1)),
        "bhsd->bshd": ((BATCH, HEADS, ROWS, DIM), (0, 1, 2)),
        "packed": ((ROWS, HEADS, DIM), (1, 0)),
    }
    shape, of_lse = shapes[layout]
    options = {} if layout == "packed" else {"layout": layout}
    tensors = [made(*shape) for _ in range(2)]
    lse_shape = [0] * (len(shape) - 1)
    for place, size in zip(of_lse, shape[:-1], strict=True):
        lse_shape[place] = size
    tensors += [made(*lse_shape) for _ in range(2)]
    places = [Shard(dim)] * 2 + [Shard(of_lse[dim])] * 2
    if stacked:
        tensors = [torch.stack(tensors[:2]), torch.stack(tensors[2:])]
        places = [Shard(dim + 1), Shard(of_lse[dim] + 1)]

    def attention(*given: torch.Tensor) -> torch.Tensor:
        half = len(given) // 2
        parts = given if stacked else (list(given[:half]), list(given[half:]))
        return flashvar.merge_states(*parts, **options)[0]

    return compared(attention, tensors, places, attention)


def merged_constants() -> dict[str, Any]:
    """merge_states where the lses alone have gradients."""

    def merge(*lses: torch.Tensor) -> torch.Tensor:
        outs = [x.detach().transpose(1, 2).unsqueeze(-1) for x in lses]
        return flashvar.merge_states(outs, lses)[0]

    tensors = [made(BATCH, HEADS, ROWS) for _ in range(2)]
    return compared(merge, tensors, [Shard(1)] * 2, merge)


def merged_alike() -> dict[str, Any]:
    """Two layouts of the same tensors, whose shards are alike too: the sequence, then the heads."""
    tensors = [made(BATCH, ROWS, ROWS, DIM) for _ in range(2)]
    tensors += [made(BATCH, ROWS, ROWS) for _ in range(2)]

    def of(layout: str) -> Attention:
        return lambda *given: flashvar.merge_states(given[:2], given[2:], layout=layout)

    found = {}
    for layout in ("bshd", "bhsd", "bhsd->bshd"):
        merge, places = of(layout), [*[Shard(1)] * 2, *[Shard(1 if "bhsd" in layout else 2)] * 2]
        found[layout] = compared(merge, tensors, places, merge)
    return {
        "errors": [error for one in found.values() for error in one["errors"]],
        "places": found["bhsd->bshd"]["places"],
    }


def only_lse() -> dict[str, Any]:
    """Gradients of lse alone, without one of the output."""

    def lse(q: Any, k: Any, v: Any) -> torch.Tensor:
        return flashvar.attention(q, k, v, return_lse=True)[1]

    return compared(lse, qkv(2, "bshd"), [Shard(2)] * 3, lse)


def rotated() -> dict[str, Any]:
    """Queries and keys of packed q, k and v, rotated in place."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    packed, tables = made(BATCH, ROWS, 3, HEADS, DIM), [made(ROWS, DIM // 2) for _ in range(2)]
    wanted = apply_rotary_emb_qkv_(packed.clone(), *tables)
    everywhere = [distribute_tensor(x, mesh, [Replicate()]) for x in tables]
    found = []
    for place in (Replicate(), *map(Shard, range(4))):
        shards = distribute_tensor(packed.clone(), mesh, [place])
        found += [shards, apply_rotary_emb_qkv_(shards, *everywhere)]
    return {"errors": [(x.full_tensor() - wanted).abs().max().item() for x in found]}


def rotated_from_offsets() -> dict[str, Any]:
    """Rows with positions of their own: with an offset for each sequence, and packed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, tables = made(BATCH, ROWS, HEADS, DIM), [made(2 * ROWS, DIM // 2) for _ in range(2)]
    everywhere = [distribute_tensor(one, mesh, [Replicate()]) for one in tables]
    errors = []
    for rows, name, numbers in (
        (x, "seqlen_offsets", torch.arange(1, BATCH + 1)),
        (x[0], "cu_seqlens", torch.tensor([0, 2, ROWS])),
    ):
        wanted = apply_rotary_emb(rows, *tables, **{name: numbers})
        for place in (Replicate(), *map(Shard, range(rows.dim()))):
            given = {name: distribute_tensor(numbers, mesh, [Replicate()])}
            found = apply_rotary_emb(distribute_tensor(rows, mesh, [place]), *everywhere, **given)
            errors.append((found.full_tensor() - wanted).abs().max().item())
    return {"errors": errors}


def on_cache() -> dict[str, Any]:
    """Attention on a cache whose lengths are one number, or not given."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors, errors, places = qkv(2, "bshd"), [], []
    for length in (None, ROWS - 1, torch.tensor(2)):
        wanted = flash_attn_with_kvcache(*tensors, cache_seqlens=length)
        for place in (Shard(2), Shard(0)):
            shards = [distribute_tensor(x, mesh, [place]) for x in tensors]
            found = flash_attn_with_kvcache(*shards, cache_seqlens=length)
            errors.append((found.full_tensor() - wanted).abs().max().item())
            places.append(place_of(found))
    return {"errors": errors, "places": places}


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = qkv(HEADS, "bshd")
    shards, table, said = distribute_tensor(q, mesh, [Shard(2)]), made(ROWS, DIM // 2), []
    numbers = distribute_tensor(torch.arange(BATCH), mesh, [Replicate()])
    offsets = distribute_tensor(torch.arange(BATCH + 1), mesh, [Replicate()])
    calls: tuple[Callable[[], Any], ...] = (
        lambda: flashvar.attention(shards, k, v),
        lambda: apply_rotary_emb(shards, table, table),
        lambda: flash_attn_with_kvcache(*[shards] * 5, cache_seqlens=0),
        lambda: flash_attn_with_kvcache(*[shards] * 3, cache_leftpad=numbers),
        lambda: flash_attn_with_kvcache(*[shards] * 3, block_table=numbers[:, None]),
        lambda: flash_attn_varlen_func(
            *(shards[0], shards, shards, offsets, offsets, 1, 1), block_table=numbers[:, None]
        ),
    )
    for call in calls:
        try:
            call()
        except InvalidInputError as error:
            said.append(str(error))
    return said


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    found: dict[str, Any] = {
        "heads": sharded(HEADS, "bshd", 2, causal=True),
        "batch": sharded(HEADS, "bshd", 0, window_size=(2, 0)),
        "heads bhsd": sharded(HEADS, "bhsd", 1),
        "heads bhsd->bshd": sharded(HEADS, "bhsd->bshd", 1),
        "grouped heads": sharded(2, "bshd", 2, softcap=2.0),
        "one head of keys": sharded(1, "bshd", 0),
        "sequence": sharded(HEADS, "bshd", 1, causal=True),
        "heads with bias": biased((BATCH, HEADS, ROWS, ROWS), 2),
        "heads with a bias for all": biased((BATCH, 1, ROWS, ROWS), 2),
        "batch with a bias for all": biased((1, HEADS, ROWS, ROWS), 0),
        "heads with sinks": with_sinks(2, Shard(0)),
        "heads with sinks of all": with_sinks(2, Replicate()),
        "batch with sinks": with_sinks(0, Replicate()),
        "packed": packed(),
        "packed queries": packed_queries(),
        "dropout": dropped(),
        "merged, heads": merged("bshd", 2),
        "merged, batch": merged("bshd", 0),
        "merged, sequence": merged("bhsd->bshd", 2),
        "merged, packed rows": merged("packed", 0),
        "merged, stacked": merged("bshd", 1, stacked=True),
        "merged, layouts alike": merged_alike(),
        "merged, constants": merged_constants(),
        "lse": only_lse(),
        "cache": on_cache(),
        "mixture": refused(),
    }
    if hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        found["torch's function, heads"] = through_torch(HEADS, 1)
        found["torch's function, batch"] = through_torch(2, 0)
        found["rotated"] = rotated()
        found["rotated from offsets"] = rotated_from_offsets()
    path = folder / f"found-{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
