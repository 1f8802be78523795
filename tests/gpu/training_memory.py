"""Memory of a training step of a Llama on the device: what its graph keeps, and its peak.

    python tests/gpu/training_memory.py
    python tests/gpu/training_memory.py --attention flashvar --explain

prints a line of JSON for each implementation, which has a process of its own: bytes above those of
the model and its gradients. `--explain` lists what is there at the peak, by the line of Python that
allocated it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from flashvar.integrations import torch as sdpa
from flashvar.integrations import transformers as ours

ATTENTIONS = ("sdpa", "flashvar", "sdpa by flashvar")
PRECISIONS = ("bfloat16", "autocast")
LOSSES = ("tokens", "states")  # cross entropy of the logits; the mean of the last layer
# 0.9 billion weights with 16 layers.
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
BATCH, ROWS = 2, 8192


def made(attention: str, precision: str, layers: int) -> Any:
    """The model, on the device, in training."""
    ours.register()
    configuration = transformers.LlamaConfig(num_hidden_layers=layers, **SIZES)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(configuration).to(dtype)
    model.set_attn_implementation(attention.split()[0])
    return model.train()


def measured(
    attention: str,
    precision: str,
    loss: str,
    layers: int,
    *,
    cache: bool = False,
    explain: bool = False,
    backend: Any = "auto",
) -> dict[str, Any]:
    """Bytes that the graph of a second step keeps, and its peak, above what was there before."""
    model = made(attention, precision, layers)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, ROWS), device="cuda")
    by_ours = sdpa.activate(backend) if "by" in attention else contextlib.nullcontext()

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            if loss == "tokens":
                found: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=cache).loss
                return found
            states = model.model(input_ids=ids, use_cache=cache).last_hidden_state
            return states.float().mean()

    with by_ours:
        forward().backward()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        if explain:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
        found = forward()
        kept = torch.cuda.memory_allocated() - before
        found.backward()
        torch.cuda.synchronize()
    answer: dict[str, Any] = {
        "kept": kept,
        "peak": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved() - reserved,
        "all": torch.cuda.max_memory_allocated(),
    }
    if explain:
        answer["holders"] = _holders(torch.cuda.memory._snapshot()["device_traces"][0])
        torch.cuda.memory._record_memory_history(enabled=None)
    return answer


def _holders(events: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """Bytes and blocks that are there at the peak, by who allocated them, largest first."""
    there: dict[int, dict[str, Any]] = {}
    now = most = 0
    at_peak: list[dict[str, Any]] = []
    for event in events:
        if event["action"] == "alloc":
            there[event["addr"]] = event
            now += event["size"]
            if now > most:
                most, at_peak = now, []
        elif event["action"] == "free_requested" and event["addr"] in there:
            if now == most and not at_peak:
                at_peak = list(there.values())
            now -= there.pop(event["addr"])["size"]
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in at_peak or there.values():
        who = " < ".join(
            f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
            for frame in event.get("frames", ())[:4]
        )
        sizes[who] += event["size"]
        counts[who] += 1
    return [(size, counts[who], who) for who, size in sizes.most_common(40)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=ATTENTIONS)
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--loss", choices=LOSSES, default="tokens")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--cache", action="store_true", help="use_cache, as models have it")
    parser.add_argument("--explain", action="store_true")
    given = parser.parse_args()
    if given.attention is None:
        for attention in ATTENTIONS:
            subprocess.run([sys.executable, *sys.argv, "--attention", attention], check=True)
        return
    options = {"cache": given.cache, "explain": given.explain}
    found = measured(given.attention, given.precision, given.loss, given.layers, **options)
    holders = found.pop("holders", [])
    print(json.dumps({**vars(given), **found}), flush=True)
    for size, count, who in holders:
        print(f"{size / 2**20:10.1f} MiB in {count:4d}  {who or 'outside of Python'}", flush=True)


if __name__ == "__main__":
    main()
