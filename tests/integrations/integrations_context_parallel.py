"""Integrations inside torch's context_parallel, over two processes on the CPU.

    python -m torch.distributed.run --standalone --nproc-per-node=2 FILE FOLDER

Each holds its part of a sequence; errors against attention of the whole, or what is raised, go to
FOLDER/found-RANK.json.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from small_models import CACHE, inputs, output, small_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.experimental import context_parallel
from transformers.masking_utils import create_causal_mask

from flashvar.errors import BackendUnavailableError
from flashvar.integrations import attend, diffusers, transformers
from flashvar.integrations import torch as ours
from flashvar.integrations.torch import attribute
from flashvar.integrations.transformers import attention as transformers_attention

LENGTH = 16
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def in_parts(
    mesh: DeviceMesh, buffers: list[torch.Tensor], dims: list[int], balanced: bool = True
) -> Iterator[None]:
    """With context_parallel, whose steps flashvar computes on the CPU too."""
    options = experimental._cp_options
    before, options.enable_load_balance = options.enable_load_balance, balanced
    try:
        with (
            ours.activate("reference"),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims),
        ):
            yield
    finally:
        options.enable_load_balance = before


def whole(mesh: DeviceMesh, part: torch.Tensor, dim: int) -> torch.Tensor:
    found: list[torch.Tensor] = experimental.context_parallel_unshard(
        mesh, [part.detach().contiguous()], [dim]
    )
    return found[0]


def errors(have: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    """The largest differences, in shares of what is largest in each."""
    pairs = zip(have, want, strict=True)
    return [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]


def without_masks(made: Any) -> Any:
    """The model as the package accelerate runs it in parts."""

    def leave_out(_: Any, arguments: Any, options: dict[str, Any]) -> Any:
        return arguments, {**options, "attention_mask": None, "is_causal": True}

    for layer in made.model.layers:
        layer.self_attn.register_forward_pre_hook(leave_out, with_kwargs=True)
    return made


def model(
    mesh: DeviceMesh,
    name: str,
    mask: bool = True,
    balanced: bool = True,
    packed: bool = False,
    of: int = LENGTH,
    run: Any = None,
) -> list[float]:
    """The logits of one sequence and the gradients of parameters."""
    made = small_model(name, of)
    ids = inputs(name, LENGTH, "none")[0]["input_ids"][:1].clone()
    weights = torch.randn(1, LENGTH, made.config.vocab_size)
    places = torch.arange(LENGTH)[None] % (3 if packed else LENGTH)
    given = {"input_ids": ids, "position_ids": places}
    logits = output(made, given)
    parameters = list(made.parameters())
    expected = torch.autograd.grad((logits * weights).sum(), parameters)
    made.set_attn_implementation("flashvar")
    made = made if run is None else run(made)
    buffers = [ids, places, weights]
    with in_parts(mesh, buffers, [1] * 3, balanced):
        if mask:
            given["attention_mask"] = torch.ones_like(ids)
        part = output(made, given)
        grads = torch.autograd.grad((part * weights).sum(), parameters)
        for grad in grads:
            dist.all_reduce(grad)
        logits_found = whole(mesh, part, 1)
    return errors([logits_found, *grads], [logits.detach(), *expected])


def attention(mesh: DeviceMesh, one: Attention, dim: int) -> list[float]:
    """Output and gradients of full attention, whose sequence lies in this dimension."""
    tensors = [torch.randn(2, 4, LENGTH, 8).transpose(2, dim).contiguous() for _ in "qkvw"]
    leaves = [x.transpose(2, dim).requires_grad_() for x in tensors[:3]]
    out = attribute.OWN(*leaves).transpose(2, dim)
    expected = torch.autograd.grad(out, leaves, tensors[3])
    wanted = [out.detach(), *(x.transpose(2, dim) for x in expected)]
    with in_parts(mesh, tensors, [dim] * 4, balanced=False):
        parts = [x.detach().requires_grad_() for x in tensors[:3]]
        part = one(*parts)
        found = [part, *torch.autograd.grad(part, parts, tensors[3])]
        found = [whole(mesh, x, dim) for x in found]
    return errors(found, wanted)


def through_diffusers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with attention_backend("flashvar"):
        found: torch.Tensor = dispatch_attention_fn(q, k, v)
    return found


def compiled(made: Any) -> Any:
    return torch.compile(made, backend="aot_eager")


def compiled_layer(mesh: DeviceMesh) -> list[float]:
    """A layer's call, of which there is a graph that was made outside."""
    module = torch.nn.Module()

    @compiled  # type: ignore[untyped-decorator]
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return transformers_attention.attention(module, q, k, v, None, is_causal=False)[0]

    def through_layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(q, k, v).transpose(1, 2)
        return out

    through_layer(*torch.randn(3, 2, 4, LENGTH // 2, 8))
    return attention(mesh, through_layer, 2)


def masked_layer(mesh: DeviceMesh) -> list[float]:
    """A layer of a model's, whose mask the same graph makes; a whole model takes seconds more."""
    config = small_model("llama", LENGTH).config
    config._attn_implementation = "flashvar"
    module = torch.nn.Module()

    @compiled  # type: ignore[untyped-decorator]
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = create_causal_mask(
            config=config,
            inputs_embeds=q[:, 0],
            attention_mask=torch.ones(q.shape[0], q.shape[2]),
            **{CACHE: None},
        )
        out = transformers_attention.attention(module, q, k, v, mask)[0]
        return out.transpose(1, 2)

    return attention(mesh, layer, 2)


def words_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except BackendUnavailableError as error:
        return str(error)
    return "nothing"


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    transformers.register()
    diffusers.register()
    with attention_backend("flashvar"):  # it sends what it counts, as it is first asked
        pass

    found: dict[str, Any] = {
        "transformers": model(mesh, "llama"),
        "transformers in order": model(mesh, "llama", mask=False, balanced=False),
        "transformers by positions": model(mesh, "llama", mask=False),
        "a compiled layer": compiled_layer(mesh),
        "Attend": attention(mesh, attend.Attend(flash=True, backend="reference"), 2),
        "diffusers": attention(mesh, through_diffusers, 1),
        "transformers without masks": model(mesh, "llama", mask=False, run=without_masks),
        "packed": words_of(lambda: model(mesh, "llama", mask=False, packed=True)),
        "packed without masks": words_of(
            lambda: model(mesh, "llama", mask=False, packed=True, run=without_masks)
        ),
        "a window": words_of(lambda: model(mesh, "mistral")),
        "a window wider than a part": words_of(lambda: model(mesh, "mistral", of=2 * LENGTH)),
        "a mask in a graph": words_of(lambda: masked_layer(mesh)),
        "softcap": words_of(lambda: model(mesh, "gemma2")),
    }
    path = folder / f"found-{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
