"""torch's context_parallel on flashvar, on as many devices as there are ranks: right, and how fast.

    python -m torch.distributed.run --standalone --nproc-per-node=2 tests/gpu/context_parallel.py \
        --results tests/gpu/results/h200-context-parallel-2.json
    ... --nproc-per-node=2 tests/gpu/context_parallel.py --rehearse     # on the CPU, over gloo

Every rank holds its part of a sequence. Outputs and gradients are compared with attention of the
whole in float32 (float64 on the CPU), and may differ from it by three times what torch's own
attention of the whole does. Where flashvar is active, its kernels are counted: one forward for each
step of the ring, and none of torch's flash attention or cuDNN's among the kernels that ran. What
torch does without flashvar is written down, and fails nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashvar.integrations import torch as ours

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import environment, result_file

SEQUENCE = 2
NAMES = ("out", "dq", "dk", "dv")
# An error may be so many times that of torch's own attention of the whole.
NEAR = 3.0
# Kernels of torch's own attentions.
FOREIGN = re.compile(r"pytorch_flash|cudnn|fmha|flash_fwd_kernel|flash_bwd", re.IGNORECASE)
Tensors = list[torch.Tensor]


class Case(NamedTuple):
    """One way to run it."""

    mode: str  # "plain": without flashvar; "before", "inside": activated before it or inside
    causal: bool
    rotation: str  # "allgather" or "alltoall"
    balanced: bool  # head and tail of the sequence on one rank; of causal calls alone
    heads_kv: int = 4
    chosen: str = "default"  # the attention that torch is let choose

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        balance = "balanced" if self.balanced else "in order"
        heads = f"{self.heads_kv} heads of keys"
        return f"{self.mode}, {mask}, {self.rotation}, {balance}, {heads}, {self.chosen}"


HEADS = 4


def cases(on_cpu: bool) -> Iterator[Case]:
    """All combinations; torch itself has no context_parallel on the CPU."""
    masks = ((True, True), (True, False), (False, False))
    modes = ("before", "inside") if on_cpu else ("plain", "before", "inside")
    for mode, (causal, balanced), rotation in product(modes, masks, ("allgather", "alltoall")):
        yield Case(mode, causal, rotation, balanced)
    for mode in ("before", "inside"):
        yield Case(mode, True, "allgather", True, heads_kv=2)
    if not on_cpu:
        for mode, chosen in product(modes, ("FLASH_ATTENTION", "CUDNN_ATTENTION")):
            yield Case(mode, True, "allgather", True, chosen=chosen)


@contextmanager
def options_of(case: Case) -> Iterator[None]:
    """Torch's settings of a case."""
    settings = experimental._cp_options
    before = settings.enable_load_balance, settings.rotate_method
    settings.enable_load_balance = case.balanced
    experimental.set_rotate_method(case.rotation)
    chosen = nullcontext()
    if case.chosen != "default":
        chosen = sdpa_kernel(getattr(SDPBackend, case.chosen))
    try:
        with chosen:
            yield
    finally:
        settings.enable_load_balance, settings.rotate_method = before


def through(tensors: Tensors, weights: torch.Tensor, causal: bool) -> Tensors:
    """Output and gradients of torch's function, whatever it is now."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=gqa)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def in_parts(case: Case, mesh: DeviceMesh, tensors: Tensors, weights: torch.Tensor) -> Tensors:
    """The same in parts, put together again."""
    buffers = [x.clone() for x in (*tensors, weights)]
    backend = "reference" if mesh.device_type == "cpu" else "auto"
    with options_of(case), ExitStack() as stack:
        if case.mode == "before":
            stack.enter_context(ours.activate(backend))
        places = [SEQUENCE] * len(buffers)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=places):
            if case.mode == "inside":
                stack.enter_context(ours.activate(backend))
            found = through(buffers[:3], buffers[3], case.causal)
        unshard = experimental.context_parallel_unshard
        return [unshard(mesh, [x.contiguous()], [SEQUENCE])[0] for x in found]


def made(device: str, dtype: torch.dtype, heads: tuple[int, int], rows: int, dim: int) -> Tensors:
    """q, k, v and the weights of the loss, the same on every rank."""
    torch.manual_seed(7)
    shapes = ((1, number, rows, dim) for number in (heads[0], heads[1], heads[1], heads[0]))
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    for tensor in tensors:
        dist.broadcast(tensor, 0)
    return tensors


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, in norms of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def steps_of(case: Case, rank: int, world: int) -> int:
    """How many forwards a rank computes: in order, none of the keys that come later."""
    return rank + 1 if case.causal and not case.balanced else world


def kernels_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and the names of the kernels that it ran on the device."""
    if not torch.cuda.is_available():
        return call(), []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        found = call()
        torch.cuda.synchronize()
    return found, sorted({event.key for event in profile.key_averages()})


def check(case: Case, mesh: DeviceMesh, rows: int) -> dict[str, Any]:
    """One case: its errors, those of attention of the whole, and what computed it."""
    on_cpu = mesh.device_type == "cpu"
    dtype, exact = (torch.float32, torch.float64) if on_cpu else (torch.bfloat16, torch.float32)
    tensors = made(mesh.device_type, dtype, (HEADS, case.heads_kv), rows, 64)
    with sdpa_kernel(SDPBackend.MATH):
        expected = through([x.to(exact) for x in tensors[:3]], tensors[3].to(exact), case.causal)
    whole = through(tensors[:3], tensors[3], case.causal)
    found, kernels = kernels_of(lambda: in_parts(case, mesh, tensors[:3], tensors[3]))
    errors = [difference(have, want) for have, want in zip(found, expected, strict=True)]
    budgets = [difference(have, want) for have, want in zip(whole, expected, strict=True)]
    steps = 0 if case.mode == "plain" else ours.report().get(ours.RUN_BELOW_DISPATCHER, 0)
    expected_steps = steps_of(case, dist.get_rank(), mesh.size())
    if case.mode == "plain" or case.chosen == "CUDNN_ATTENTION":  # who insists on cuDNN has it
        expected_steps = 0
    foreign = [name for name in kernels if FOREIGN.search(name)]
    floor = 1e-6 if on_cpu else 1e-3
    right = all(error <= NEAR * own + floor for error, own in zip(errors, budgets, strict=True))
    return {
        "case": str(case),
        "mode": case.mode,
        "right": right and steps == expected_steps and (expected_steps == 0 or not foreign),
        "errors": dict(zip(NAMES, errors, strict=True)),
        "errors_of_the_whole": dict(zip(NAMES, budgets, strict=True)),
        "forwards_of_flashvar": steps,
        "forwards_expected": expected_steps,
        "kernels_of_torch": [name[:120] for name in foreign],
    }


def milliseconds(case: Case, mesh: DeviceMesh, rows: int, repeats: int) -> list[float]:
    """Forward and backward on the parts that each rank has, the slowest rank's of each repeat."""
    tensors = made("cuda", torch.bfloat16, (16, 16), rows // mesh.size(), 128)
    times = []
    with options_of(case), ExitStack() as stack:
        if case.mode == "before":
            stack.enter_context(ours.activate())
        # A buffer that nothing reads: the parts are made here.
        nothing = torch.zeros(1, rows, device="cuda")
        with context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[1]):
            for repeat in range(repeats + 3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                dist.barrier()
                begin.record()
                through(tensors[:3], tensors[3], True)
                end.record()
                torch.cuda.synchronize()
                took = torch.tensor(begin.elapsed_time(end), device="cuda")
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if repeat >= 3:
                    times.append(took.item())
    return times


def timed(mesh: DeviceMesh, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Flashvar beside torch's own, in turns."""
    found = []
    for rotation, (name, mode, chosen) in product(
        ("allgather", "alltoall"),
        (
            ("flashvar", "before", "default"),
            ("cuDNN", "plain", "CUDNN_ATTENTION"),
            ("torch's flash attention", "plain", "FLASH_ATTENTION"),
        ),
    ):
        times = milliseconds(Case(mode, True, rotation, True, 16, chosen), mesh, rows, repeats)
        median = statistics.median(times)
        found.append(
            {
                "attention": name,
                "rotation": rotation,
                "milliseconds": round(median, 2),
                "all": [round(one, 2) for one in times],
            }
        )
        if dist.get_rank() == 0:
            print(f"{name}, {rotation}: {median:.1f} ms", flush=True)
    return found


def gathered(mine: Any) -> list[Any]:
    """What every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def record(path: Path, mesh: DeviceMesh, checked: Any, times: Any, rows: int) -> None:
    on_cpu = mesh.device_type == "cpu"
    document = {
        "ranks": mesh.size(),
        "cudnn": None if on_cpu else torch.backends.cudnn.version(),
        "environment": environment.gather(device=not on_cpu),
        "clocks_after": {} if on_cpu else environment.clocks(),
        "forward_and_backward": {
            "problem": f"{rows} tokens, 16 heads, head dim 128, bfloat16, causal, balanced",
            "times": times,
        },
        "cases": checked,
    }
    result_file.write(path, document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, without times")
    parser.add_argument("--results", type=Path, help="write a record as JSON")
    parser.add_argument("--rows", type=int, default=65536, help="of the sequence that is timed")
    parser.add_argument("--repeats", type=int, default=10)
    words = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's own, of what it deprecates
    mesh = started(words.rehearse)
    rank = dist.get_rank()
    checked: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    try:
        for case in cases(words.rehearse):
            ranks = gathered(check(case, mesh, 64 if words.rehearse else 4096))
            wrong = [one for one in ranks if not one["right"]]
            checked.append({**ranks[0], "right": not wrong, "wrong_ranks": wrong})
            if rank == 0:
                print("wrong" if wrong else "right", case, *wrong[:1], flush=True)
        if not words.rehearse:
            times = timed(mesh, words.rows, words.repeats)
    finally:
        if rank == 0 and words.results is not None:
            record(words.results, mesh, checked, times, words.rows)
    dist.destroy_process_group()
    failed = [one for one in checked if not one["right"] and one["mode"] != "plain"]
    return 1 if failed else 0


def started(on_cpu: bool) -> DeviceMesh:
    """All ranks, one for each device."""
    world = int(os.environ["WORLD_SIZE"])
    patience = timedelta(minutes=3)
    if on_cpu:
        dist.init_process_group("gloo", timeout=patience)
        return init_device_mesh("cpu", (world,))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=patience, device_id=device)
    return init_device_mesh("cuda", (world,))


if __name__ == "__main__":
    sys.exit(main())
