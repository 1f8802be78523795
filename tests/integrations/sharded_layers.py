"""Layers of linear attention over two processes on the CPU: tensor parallel, and fully sharded.

    python -m torch.distributed.run --standalone --nproc-per-node=2 sharded_layers.py FOLDER

Each writes errors against the layer of one process to FOLDER/found-RANK.json.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from flashvar.errors import InvalidInputError
from flashvar.layers import GatedDeltaNet

HIDDEN, TOKENS, BATCH = 16, 5, 2
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")


def layer(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(5)
    sizes = {"hidden_size": HIDDEN, "head_dim": 8, "expand_v": 1, "num_heads": 2, "num_v_heads": 4}
    return GatedDeltaNet(**sizes, **options).double()


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def errors(found: nn.Module, wanted: nn.Module, out: Any, expected: torch.Tensor) -> list[float]:
    """Of the output and of the gradients of every parameter."""
    names = dict(wanted.named_parameters())
    pairs = [(out, expected)]
    pairs += [(one.grad, names[name].grad) for name, one in found.named_parameters()]
    return [(whole(have) - want).abs().max().item() for have, want in pairs]


def heads_sharded(name: str, module: nn.Module, mesh: Any) -> None:
    """Parameters with a row for each channel or head by rows; o_proj by columns; norms whole."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        place: Any = Shard(1) if name == "o_proj" else Shard(0)
        if name == "o_norm":
            place = Replicate()
        shards = distribute_tensor(parameter.detach(), mesh, [place])
        module.register_parameter(key, nn.Parameter(shards))


def tensor_parallel(**options: Any) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = layer(**options)
    found = distribute_module(copy.deepcopy(wanted), mesh, heads_sharded)
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    out = found(distribute_tensor(x, mesh, [Replicate()]))[0].redistribute(placements=[Replicate()])
    expected = wanted(x)[0]
    out.square().sum().backward()
    expected.square().sum().backward()
    return errors(found, wanted, out, expected)


def parallelized(use_local_output: bool, **options: Any) -> str:
    """What is said of a layer of which only the projections are sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {name: ColwiseParallel(use_local_output=use_local_output) for name in PROJECTIONS}
    found = parallelize_module(layer(**options), mesh, {**plan, "o_proj": RowwiseParallel()})
    try:
        found(torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64))
    except InvalidInputError as error:
        return str(error)
    return "nothing"


def fully_sharded(**options: Any) -> list[float]:
    """Each rank has its own sequence, and a part of the parameters."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    wanted = layer(**options)
    found = copy.deepcopy(wanted)
    fully_shard(found, mesh=mesh)
    x = torch.randn(world, TOKENS, HIDDEN, dtype=torch.float64)
    out, expected = found(x[rank : rank + 1])[0], wanted(x)[0]
    # Gradients are means over the ranks.
    (out.square().sum() * world).backward()
    expected.square().sum().backward()
    return errors(found, wanted, out, expected[rank : rank + 1])


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {
        "tensor parallel": tensor_parallel(),
        "tensor parallel, without gate and convolutions": tensor_parallel(
            use_gate=False, use_short_conv=False
        ),
        "fully sharded": fully_sharded(conv_bias=True),
        "colwise, local": parallelized(True),
        "colwise, DTensors": parallelized(False),
        "colwise, no convolutions": parallelized(True, use_short_conv=False),
    }
    path = folder / f"found-{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
