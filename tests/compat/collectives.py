"""`flash_attn.utils.distributed` of the stand-in over processes on the CPU.

    python collectives.py RANK WORLD FOLDER

Ends with an assertion where one is wrong.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from flashvar.compat.flash_attn.utils import distributed as ours
from flashvar.errors import ShapeError


def main(rank: int, world: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    group = dist.group.WORLD
    # What every process has; each reads its own and can tell what the others give.
    torch.manual_seed(0)
    parts = torch.randn(world, 2 * world, 3)
    weights = torch.randn(world, world * 2 * world, 3)

    x = parts[rank].clone().requires_grad_()
    out = ours.all_gather(x, group)
    torch.testing.assert_close(out, parts.flatten(0, 1))
    out.backward(weights[rank])
    torch.testing.assert_close(x.grad, weights.sum(0).unflatten(0, (world, -1))[rank])

    x = parts[rank].clone().requires_grad_()
    out = ours.reduce_scatter(x, group)
    torch.testing.assert_close(out, parts.sum(0).unflatten(0, (world, -1))[rank])
    grads = torch.randn(world, 2, 3)
    out.backward(grads[rank])
    torch.testing.assert_close(x.grad, grads.flatten(0, 1))

    x = parts[rank].clone().requires_grad_()
    out = ours.all_reduce(x, group)
    torch.testing.assert_close(out, parts.sum(0))
    torch.testing.assert_close(x, parts[rank])
    out.backward(parts[0])
    torch.testing.assert_close(x.grad, parts[0])

    strided = parts[rank].T.contiguous().T
    out, handle = ours.all_gather_raw(strided, group, async_op=True)
    handle.wait()
    torch.testing.assert_close(out, parts.flatten(0, 1))
    out, handle = ours.all_reduce_raw(mine := parts[rank].clone(), group)
    assert out is mine
    assert handle is None
    torch.testing.assert_close(out, parts.sum(0))
    with pytest.raises(ShapeError, match=f"multiple of {world} rows"):
        ours.reduce_scatter(parts[rank][1:], group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
