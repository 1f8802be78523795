"""Train a small GPT with torch's attention and with flashvar's: the loss curves are the same.

    python examples/train_gpt.py --json curves.json --plot curves.png

Three million parameters, 4 layers of 4 heads of 64, causal, bfloat16 autocast over float32 weights.
The text is what the installed package torch.nn is made of, Python and the English of its
docstrings, byte by byte; every run sees the same batches from the same first weights. Ends with 1
where a run's losses differ from the first one's by 0.01 nats or more in the mean, or its loss on
text that it was not trained on by 0.5 % or more. `--steps 3` is enough to try it on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashvar

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

MEAN_DIFFERENCE = 0.01  # nats
FINAL_DIFFERENCE = 0.005  # of the loss


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run, but who computes attention."""

    layers: int = 4
    heads: int = 4
    head_dim: int = 64
    length: int = 512
    batch: int = 32
    steps: int = 500
    warm_up: int = 50
    rate: float = 6e-4
    seed: int = 1234
    held_out_batches: int = 8

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


def sdpa(backend: SDPBackend) -> Attention:
    """Torch's attention, held to one backend on a GPU."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(backend if q.is_cuda else SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        return out.transpose(1, 2)

    return attention


def ours(backend: Any) -> Attention:
    """flashvar's attention, held to one backend."""
    return lambda q, k, v: flashvar.attention(q, k, v, causal=True, backend=backend)


# The first is what the others are compared with; the second shows how far two of torch's are apart.
ATTENTIONS: dict[str, Attention] = {
    "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "flashvar-cuda": ours("cuda"),
    "flashvar-triton": ours("triton"),
    "flashvar-reference": ours("reference"),
}
# Their names in the picture.
LABELS = {
    "sdpa-flash": "SDPA FlashAttention-2",
    "sdpa-efficient": "SDPA memory-efficient",
    "flashvar-cuda": "flashvar (CUDA)",
    "flashvar-triton": "flashvar (Triton)",
    "flashvar-reference": "flashvar (reference)",
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and around a residual."""

    def __init__(self, settings: Settings, attention: Attention) -> None:
        super().__init__()
        width = settings.width
        self.heads, self.head_dim, self.attention = settings.heads, settings.head_dim, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, self.head_dim))
        x = x + self.projection(self.attention(*qkv.unbind(2)).flatten(-2))
        y: torch.Tensor = x + self.mlp(self.norm_2(x))
        return y


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, settings: Settings, attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, settings.width)
        self.places = nn.Embedding(settings.length, settings.width)
        self.blocks = nn.Sequential(*(Block(settings, attention) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                residual = name.endswith(("projection.weight", "mlp.2.weight"))
                scale = (2 * settings.layers) ** -0.5 if residual else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [batch, length + 1] to the mean loss in nats of each next one."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        places = torch.arange(inputs.shape[1], device=ids.device)
        x = self.norm(self.blocks(self.tokens(inputs) + self.places(places)))
        logits = functional.linear(x, self.tokens.weight).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> tuple[torch.Tensor, dict[str, Any]]:
    """All of torch.nn's Python files as bytes, and what exactly was read."""
    spec = importlib.util.find_spec("torch.nn")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    about = {
        "package": f"torch {torch.__version__}",
        "folder": "torch/nn",
        "files": len(files),
        "bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
    }
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), about


def batches(text: torch.Tensor, count: int, settings: Settings, seed: int) -> torch.Tensor:
    """[count, batch, length + 1] ids, cut out of the text at random places."""
    generator = torch.Generator().manual_seed(seed)
    last = len(text) - settings.length - 1
    starts = torch.randint(last, (count, settings.batch, 1), generator=generator)
    return text[starts + torch.arange(settings.length + 1)]


def train(
    attention: Attention, text: torch.Tensor, settings: Settings, device: str
) -> dict[str, Any]:
    """Losses of every step, the held-out loss and the seconds of one run."""
    split = len(text) * 9 // 10
    learned = batches(text[:split], settings.steps, settings, settings.seed).to(device)
    held_out = batches(text[split:], settings.held_out_batches, settings, settings.seed + 1)
    torch.manual_seed(settings.seed)
    model = GPT(settings, attention).to(device)  # made on the CPU: the same weights everywhere
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        past = step / max(settings.steps, 1)
        return min((step + 1) / settings.warm_up, 0.5 * (1 + math.cos(math.pi * past)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses = torch.empty(settings.steps, device=device)
    start = time.perf_counter()
    for step in range(settings.steps):
        with torch.autocast(device, torch.bfloat16):
            loss = model(learned[step].long())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
    curve = losses.tolist()  # waits for the device
    seconds = time.perf_counter() - start
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        final = torch.stack([model(batch.to(device).long()) for batch in held_out]).mean()
    return {"losses": curve, "held_out": float(final), "seconds": seconds}


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How far each run is from the first one, and whether that is near enough."""
    first = next(iter(runs.values()))
    compared = {}
    for name, run in runs.items():
        pairs = list(zip(run["losses"], first["losses"], strict=True))
        mean = sum(abs(a - b) for a, b in pairs) / len(pairs)
        final = abs(run["held_out"] - first["held_out"]) / first["held_out"]
        near = mean < MEAN_DIFFERENCE and final < FINAL_DIFFERENCE
        compared[name] = {"mean_difference": mean, "final_difference": final, "near": near}
    return compared


def write(document: dict[str, Any], runs: dict[str, dict[str, Any]], target: Path) -> None:
    """The document as JSON, with what each run found, and a line a step of the losses of all."""
    found = {name: dict(run) for name, run in runs.items()}
    curves = [run.pop("losses") for run in found.values()]
    text = json.dumps({**document, "runs": found}, indent=1).removesuffix("\n}")
    steps = ",\n".join(f"  {json.dumps(step)}" for step in zip(*curves, strict=True))
    target.write_text(f'{text},\n "losses": [\n{steps}\n ]\n}}\n', encoding="utf-8")


def plot(runs: dict[str, dict[str, Any]], target: Path) -> None:
    """Curves above, their distances from the first below; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = ["#000000", "#009E73", "#D55E00", "#0072B2", "#CC79A7"]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(5, 5), sharex=True, height_ratios=[2, 1]
    )
    names = list(runs)
    first = runs[names[0]]["losses"]
    for number, (name, run) in enumerate(runs.items()):
        style = {"color": colors[number % 5], "linewidth": 3.0 - 0.6 * number}
        label = f"{LABELS[name]}, held out: {run['held_out']:.4f}"
        above.plot(run["losses"], label=label, **style)
        if number:
            differences = [abs(a - b) for a, b in zip(run["losses"], first, strict=True)]
            below.plot(differences, color=style["color"], linewidth=1.0)
    above.set_ylabel("loss, nats per byte")
    above.legend(frameon=False, fontsize=9)
    below.axhline(MEAN_DIFFERENCE, color="#999999", linewidth=0.8, linestyle="--")
    below.set_ylabel("difference from\nthe first, nats")
    below.set_xlabel("step")
    for panel in (above, below):
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    above.set_title("A small GPT, trained with each attention", loc="left")
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def main() -> int:
    """Train, compare, write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--attention", action="append", choices=ATTENTIONS, metavar="NAME")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--length", type=int, default=Settings.length)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--json", type=Path, metavar="FILE", help="settings, text and curves")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the curves as a picture")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(
        steps=options.steps, batch=options.batch, length=options.length, seed=options.seed
    )
    on_gpu = [name for name in ATTENTIONS if name != "flashvar-reference"]
    names = options.attention or (
        on_gpu if device == "cuda" else ["sdpa-flash", "flashvar-reference"]
    )
    text, about = read_text()
    runs: dict[str, dict[str, Any]] = {}
    for name in names:
        runs[name] = train(ATTENTIONS[name], text, settings, device)
        print(f"{name}: {runs[name]['losses'][-1]:.4f} in {runs[name]['seconds']:.1f} s")
    compared = compare(runs)
    if options.json is not None:
        document = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "torch": torch.__version__,
            "settings": asdict(settings),
            "text": about,
        }
        write(document, {name: run | compared[name] for name, run in runs.items()}, options.json)
    if options.plot is not None:
        plot(runs, options.plot)
    for name, found in compared.items():
        print(
            f"{name}: {found['mean_difference']:.5f} nats from {names[0]} in the mean of "
            f"{settings.steps} steps, {100 * found['final_difference']:.3f} % in the held-out loss"
        )
    return 0 if all(found["near"] for found in compared.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
