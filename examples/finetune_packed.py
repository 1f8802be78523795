"""Fine-tune a language model on documents of very different lengths, packed instead of padded.

    python examples/finetune_packed.py                     # 30 steps, on a GPU if there is one
    python examples/finetune_packed.py --steps 3
    python examples/finetune_packed.py --model FOLDER      # a model and a tokenizer on your disk

The documents are the docstrings of torch. Each step takes as many of them as fill a budget of
tokens. Packed, they lie end to end in one row, and `position_ids` begin again with each: flashvar
keeps them apart, and nothing is computed for padding. Padded, each has a row as long as the longest
of the batch. Both learn the same from the same batches; it ends with 1 where their losses differ,
or where they do not fall. Needs transformers; without --model the model is a small one of random
weights over bytes.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from flashvar.integrations import transformers as transformers

END = 0  # of a document, where the tokens are bytes
LEAVE_OUT = -100  # label of a token that nobody has to predict
MEAN_DIFFERENCE = 0.02  # nats; on a GPU, in bfloat16

Batch = dict[str, torch.Tensor]


def documents() -> list[str]:
    """The docstrings of what torch and torch.nn show."""
    found = {}
    for module in (torch, torch.nn, torch.nn.functional, torch.optim):
        for name in sorted(dir(module)):
            text = inspect.getdoc(getattr(module, name)) or ""
            if len(text) > 40 and not name.startswith("_"):
                found[text] = None
    return list(found)


def of_bytes(text: str) -> list[int]:
    """The tokens of a model without a tokenizer."""
    return [*text.encode("ascii", "replace"), END]


def groups(tokens: list[list[int]], budget: int, seed: int) -> Iterator[list[list[int]]]:
    """Documents in random order, as many at a time as the budget of tokens allows, forever."""
    shuffled, group, size = random.Random(seed), [], 0
    while True:
        for document in shuffled.sample(tokens, len(tokens)):
            document = document[: budget // 2]
            if size + len(document) > budget:
                yield group
                group, size = [], 0
            group.append(document)
            size += len(document)


def packed(group: list[list[int]]) -> Batch:
    """One row of all documents. The first token of each is not predicted from the one before."""
    labels = [token for document in group for token in (LEAVE_OUT, *document[1:])]
    return {
        "input_ids": torch.tensor([[token for document in group for token in document]]),
        "position_ids": torch.cat([torch.arange(len(document)) for document in group])[None],
        "labels": torch.tensor([labels]),
    }


def padded(group: list[list[int]]) -> Batch:
    """A row for each document, as long as the longest."""
    longest = max(map(len, group))

    def rows(fill: int, lines: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[*line, *[fill] * (longest - len(line))] for line in lines])

    return {
        "input_ids": rows(END, group),
        "attention_mask": rows(0, [[1] * len(document) for document in group]),
        "labels": rows(LEAVE_OUT, group),
    }


def train(
    model: Any, batches: list[list[list[int]]], form: Callable[..., Batch], rate: float
) -> tuple[list[float], float, int]:
    """The loss of each step, the seconds of all, and the rows of tokens that were computed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    device, losses, computed = model.device.type, [], 0
    start = time.perf_counter()
    for group in batches:
        batch = {name: tensor.to(device) for name, tensor in form(group).items()}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        computed += batch["input_ids"].numel()
    curve = torch.stack(losses).tolist()  # waits for the device
    return curve, time.perf_counter() - start, computed


def load(folder: str | None) -> tuple[Any, Callable[[str], list[int]]]:
    """A model, and what makes tokens of a text."""
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flashvar")
        return model, lambda text: tokenizer(text)["input_ids"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=128, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="flashvar"), of_bytes


def main() -> int:
    """Train twice, compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", metavar="FOLDER", help="of a pretrained model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, help="in a batch; 1024, on a GPU 16384")
    parser.add_argument("--rate", type=float, default=3e-3)
    options = parser.parse_args()
    transformers.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    budget = options.tokens or (16384 if device == "cuda" else 1024)
    model, tokenize = load(options.model)
    model = model.to(device).train()
    drawn = groups([tokenize(text) for text in documents()], budget, seed=1)
    batches = [next(drawn) for _ in range(options.steps)]
    curves = []
    for name, form in (("packed", packed), ("padded", padded)):
        train(copy.deepcopy(model), batches[:1], form, options.rate)  # compiles what is compiled
        losses, seconds, computed = train(copy.deepcopy(model), batches, form, options.rate)
        curves.append(losses)
        print(
            f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps, "
            f"{computed} rows of tokens, {seconds:.2f} s"
        )
    difference = sum(abs(a - b) for a, b in zip(*curves, strict=True)) / len(batches)
    print(f"{difference:.5f} nats apart in the mean of {len(batches)} steps")
    falls = all(curve[-1] < curve[0] for curve in curves) or options.steps < 2
    return 0 if difference < MEAN_DIFFERENCE and falls else 1


if __name__ == "__main__":
    sys.exit(main())
