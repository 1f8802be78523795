"""Ops of linear attention on DTensors over two processes on the CPU.

    python -m torch.distributed.run --standalone --nproc-per-node=2 sharded_linear.py FOLDER

Each writes errors against calls of the whole tensors, and where the results lie, to
FOLDER/found-RANK.json.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_attention import Attention, compared, made, place_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashvar
from flashvar.errors import FlashvarError

BATCH, ROWS, K, V = 4, 6, 8, 4
ENDS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
# Of q, k, v, g, beta, A_log, dt_bias and the initial state.
HEADS_OF = (2, 2, 2, 2, 2, 0, 0, 1)


def everywhere(x: torch.Tensor) -> Any:
    return distribute_tensor(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])


def rule_tensors(heads: int, heads_v: int, packed: bool = False) -> list[torch.Tensor]:
    rows = (1 if packed else BATCH, ROWS)
    sequences = len(ENDS) - 1 if packed else BATCH
    of_heads = [made(*rows, heads_v) for _ in range(2)]
    qkv = [made(*rows, heads, K), made(*rows, heads, K), made(*rows, heads_v, V)]
    return [*qkv, *of_heads, made(heads_v), made(heads_v), made(sequences, heads_v, K, V)]


def rule(*tensors: Any, cu_seqlens: Any = None, layout: str = "kv") -> Any:
    *inputs, a_log, dt_bias, state = tensors
    out, final_state = flashvar.gated_delta_rule(
        *inputs,
        A_log=a_log,
        dt_bias=dt_bias,
        initial_state=state if layout == "kv" else state.transpose(-1, -2),
        return_final_state=True,
        cu_seqlens=cu_seqlens,
        state_layout=layout,
        qk_l2norm=True,
        beta_sigmoid=True,
    )
    return out, final_state


def ruled(heads: int, heads_v: int, places: list[Any], packed: bool = False) -> dict[str, Any]:
    tensors = rule_tensors(heads, heads_v, packed)
    if not packed:
        return compared(rule, tensors, places, rule)
    ends = everywhere(ENDS)
    return compared(
        lambda *given: rule(*given, cu_seqlens=ends),
        tensors,
        places,
        lambda *given: rule(*given, cu_seqlens=ENDS),
    )


def plain_rule() -> dict[str, Any]:
    """Without a gate or states: gradients of what is absent are none."""

    def call(q: Any, k: Any, v: Any, beta: Any) -> Any:
        return flashvar.gated_delta_rule(q, k, v, None, beta.sigmoid(), qk_l2norm=True)[0]

    q, k, v, _, beta, *_ = rule_tensors(2, 4)
    return compared(call, [q, k, v, beta], [Shard(2)] * 4, call)


def convolved(layout: str, places: list[Any], packed: bool = False) -> dict[str, Any]:
    """causal_conv1d of x, weight, bias, residual and a state."""
    shape = (1 if packed else BATCH, ROWS, K)
    sequences = len(ENDS) - 1 if packed else BATCH
    x, residual = (made(*shape) for _ in range(2))
    if layout == "bdt":
        x, residual = x.transpose(1, 2).contiguous(), residual.transpose(1, 2).contiguous()
    tensors = [x, made(K, 4), made(K), residual, made(sequences, K, 3)]

    def of(ends: Any) -> Attention:
        return lambda x, weight, bias, residual, state: flashvar.causal_conv1d(
            x,
            weight,
            bias,
            activation="silu",
            residual=residual,
            initial_state=state,
            return_final_state=True,
            cu_seqlens=ends,
            layout=layout,
        )

    if packed:
        return compared(of(everywhere(ENDS)), tensors, places, of(ENDS))
    return compared(of(None), tensors, places, of(None))


def anywhere(seed: int) -> dict[str, Any]:
    """An op whose tensors lie anywhere: DTensor gathers what must be."""
    choose = random.Random(seed)
    packed, heads = choose.random() < 0.5, choose.choice([1, 2, 3, 4])
    tensors = rule_tensors(heads, heads * choose.choice([1, 2]), packed)
    places = [choose.choice([Replicate(), *map(Shard, range(x.dim()))]) for x in tensors]
    layout = choose.choice(["kv", "vk"])
    ends = (everywhere(ENDS), ENDS) if packed else (None, None)
    calls = [lambda *given, one=one: rule(*given, cu_seqlens=one, layout=layout) for one in ends]
    found = compared(calls[0], tensors, places, calls[1])
    of_convolution = [choose.choice([Replicate(), Shard(0), Shard(1)]) for _ in range(5)]
    of_convolution[2] = choose.choice([Replicate(), Shard(0)])
    other = convolved(choose.choice(["btd", "bdt"]), of_convolution, packed)
    return {"errors": found["errors"] + other["errors"]}


def updated(heads: Any, channels: Any) -> dict[str, Any]:
    """Both updates, whose states are sharded over heads and channels, or whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def lie(x: torch.Tensor, dim: int, place: Any) -> Any:
        return distribute_tensor(x.clone(), mesh, [Shard(dim) if place is Shard else Replicate()])

    q, k, v, g, beta, a_log, dt_bias, pool = rule_tensors(2, 4)
    indices = torch.tensor([2, -1, 0, 3])
    inputs = (q, k, v, g, beta, a_log, dt_bias, pool)

    def rule_of(indices: Any, *given: Any) -> Any:
        *inputs, a_log, dt_bias, pool = given
        options = {"state_indices": indices, "initial_state": pool, "beta_sigmoid": True}
        return flashvar.gated_delta_rule(*inputs, A_log=a_log, dt_bias=dt_bias, **options)[0]

    parts = [lie(x, dim, heads) for x, dim in zip(inputs, HEADS_OF, strict=True)]
    found = [rule_of(everywhere(indices), *parts), parts[-1]]
    wanted = [rule_of(indices, *inputs), pool]

    of_conv = (made(BATCH, K), made(BATCH, K, 4), made(K, 4), made(K))
    parts = [lie(x, dim, channels) for x, dim in zip(of_conv, (1, 1, 0, 0), strict=True)]
    found += [flashvar.causal_conv1d_update(*parts, activation="silu"), parts[1]]
    wanted += [flashvar.causal_conv1d_update(*of_conv, activation="silu"), of_conv[1]]
    pairs = zip(found, wanted, strict=True)
    return {
        "errors": [(have.full_tensor() - want).abs().max().item() for have, want in pairs],
        "places": [place_of(x) for x in found],
    }


def over_two_dimensions() -> dict[str, Any]:
    """A batch over one dimension of a mesh, and heads over another one."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    tensors = rule_tensors(2, 4)
    places = [(Shard(0) if dim else Replicate(), Shard(dim)) for dim in HEADS_OF]
    parts = [distribute_tensor(x, mesh, two) for x, two in zip(tensors, places, strict=True)]
    pairs = zip(rule(*parts), rule(*tensors), strict=True)
    return {"errors": [(have.full_tensor() - want).abs().max().item() for have, want in pairs]}


def second_derivative(tensors: list[Any]) -> None:
    q, *others = (x.requires_grad_() for x in tensors)
    out, _ = flashvar.gated_delta_rule(q, *others)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    grad.square().sum().backward()


def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v, g, beta, *_, pool = rule_tensors(2, 4)
    heads = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v, -g.abs(), beta)]
    indices = torch.arange(BATCH)
    x, weight = made(BATCH, ROWS, K), made(K, 4)
    calls = {
        "mixture": lambda: flashvar.gated_delta_rule(heads[0], k, v, g, beta),
        "shape": lambda: flashvar.gated_delta_rule(*heads[:3], None, heads[0]),
        "copied": lambda: flashvar.gated_delta_rule(
            *heads,
            initial_state=distribute_tensor(pool, mesh, [Shard(0)]),
            state_indices=everywhere(indices),
        ),
        "fewer channels than ranks": lambda: flashvar.causal_conv1d_update(
            distribute_tensor(made(BATCH, 1), mesh, [Shard(1)]),
            distribute_tensor(made(BATCH, 1, 4), mesh, [Shard(1)]),
            distribute_tensor(made(1, 4), mesh, [Shard(0)]),
        ),
        "convolution": lambda: flashvar.causal_conv1d(everywhere(x), weight),
        "copied columns": lambda: flashvar.causal_conv1d_update(
            everywhere(x[:, 0]),
            distribute_tensor(made(BATCH, K, 4), mesh, [Shard(2)]),
            everywhere(weight),
        ),
        "named sequences": lambda: flashvar.causal_conv1d(
            everywhere(x),
            everywhere(weight),
            seq_idx=everywhere(torch.zeros(BATCH, ROWS, dtype=torch.int32)),
        ),
        "second derivative": lambda: second_derivative(heads),
        "parts": lambda: flashvar.merge_states([everywhere(q), q], [g, g]),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except FlashvarError as error:
            said[name] = str(error)
    return said


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    heads, batch = [Shard(dim) for dim in HEADS_OF], [Shard(0)] * 5
    found: dict[str, Any] = {
        "heads": ruled(2, 2, heads),
        "grouped heads": ruled(2, 4, heads),
        "three heads in groups": ruled(3, 6, heads),
        "batch": ruled(1, 2, [*batch, Replicate(), Replicate(), Shard(0)]),
        "packed, heads": ruled(2, 4, heads, packed=True),
        "sequence": ruled(2, 2, [*[Shard(1)] * 5, Replicate(), Replicate(), Replicate()]),
        "no gate": plain_rule(),
        "channels": convolved("btd", [Shard(2), Shard(0), Shard(0), Shard(2), Shard(1)]),
        "channels bdt": convolved("bdt", [Shard(1), Shard(0), Shard(0), Shard(1), Shard(1)]),
        "channels, packed": convolved(
            "btd", [Shard(2), Shard(0), Shard(0), Shard(2), Shard(1)], packed=True
        ),
        "convolved batch": convolved(
            "btd", [Shard(0), Replicate(), Replicate(), Shard(0), Shard(0)]
        ),
        "updated heads": updated(Shard, Shard),
        "updated whole": updated(Replicate, Replicate),
        "two dimensions": over_two_dimensions(),
        "refusals": refusals(),
        **{f"anywhere {seed}": anywhere(seed) for seed in range(16)},
    }
    path = folder / f"found-{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
