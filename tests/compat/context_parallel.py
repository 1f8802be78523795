"""Two packages of PyPI that import flash_attn, over two processes on the CPU, on flashvar.

    python context_parallel.py RANK FOLDER

Each process holds half of a sequence; the largest errors against attention of the whole go to
FOLDER/errors-RANK.json.
"""

from __future__ import annotations

import json
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from flashvar.compat import flash_attn

WORLD = 2
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attentions() -> dict[str, tuple[bool, Attention]]:
    """By package and function: whether it is causal, and the call."""
    flash_attn.install()
    # Its hook into transformers wants an older one than there is; nothing here does.
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules[adapters.__name__] = adapters
    import ring_flash_attn
    import yunchang
    from yunchang.kernels import AttnType

    assert yunchang.globals.HAS_FLASH_ATTN
    yunchang.set_seq_parallel_pg(WORLD, 1, dist.get_rank(), WORLD)
    ulysses = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)
    return {
        "ring-flash-attn": (False, ring_flash_attn.ring_flash_attn_func),
        "ring-flash-attn causal": (
            True,
            lambda q, k, v: ring_flash_attn.ring_flash_attn_func(q, k, v, causal=True),
        ),
        "yunchang": (False, ulysses),
        "yunchang causal": (True, lambda q, k, v: ulysses(q, k, v, causal=True)),
    }


def errors(causal: bool, attention: Attention) -> dict[str, float]:
    """The largest error of this process' part of the output and the gradients."""
    torch.manual_seed(0)
    # In 16 bits: ring-flash-attn adds up what is the same tensor in 32.
    q, k, v, weights = (torch.randn(2, 64, 4, 32).bfloat16().float() for _ in range(4))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    whole = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), is_causal=causal
    ).transpose(1, 2)
    expected = [whole, *torch.autograd.grad(whole, tensors, weights)]

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.detach().chunk(WORLD, 1)[dist.get_rank()].bfloat16()

    halves = [part(x).requires_grad_() for x in tensors]
    out = attention(*halves)
    found = [out, *torch.autograd.grad(out, halves, part(weights))]
    pairs = zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
    return {name: (have - part(want)).abs().max().item() for name, have, want in pairs}


def main(rank: int, folder: Path) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    with warnings.catch_warnings():  # they use what torch deprecates
        warnings.simplefilter("ignore")
        found = {name: errors(*what) for name, what in attentions().items()}
    (folder / f"errors-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
