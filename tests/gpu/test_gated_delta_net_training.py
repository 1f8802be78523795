"""A small gated delta network learns the same on the kernels as in torch's own functions.

It learns to recall: after pairs of a key and a value, keys come again, and their values are asked.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from device_call import DEVICE, skip_unless_compiled
from torch import nn
from torch.nn import functional

from flashvar.backends.reference import gated_delta_rule as reference
from flashvar.backends.reference.gated_delta_rule import recurrence
from flashvar.layers import GatedDeltaNet, gated_deltanet
from flashvar.layers.norms import RMSNorm
from flashvar.ops.gated_delta_rule.spec import BACKWARD, FORWARD

STEPS = 500
PAIRS, KEYS = 4, 16  # in a sequence, of a vocabulary; as many values
# Tokens: the pairs, and questions with their answers; more than a chunk, and no whole ones.
TOKENS = 100
BATCH, HEADS, HEAD_DIM, LAYERS = (32, 2, 64, 2) if DEVICE == "cuda" else (2, 1, 16, 1)
HIDDEN = HEADS * HEAD_DIM
RATE = 4e-3
# Steps before which rounding has not been amplified, and those whose mean is the loss at the end.
EARLY, LATE = 10, 50
# Nats: how far the losses may be apart.
NEAR_EARLY, NEAR_LATE = 0.03, 0.02


class Block(nn.Module):  # type: ignore[misc]
    """A layer in front of a small MLP, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = GatedDeltaNet(HIDDEN, expand_v=1, head_dim=HEAD_DIM, num_heads=HEADS)
        self.norms = nn.ModuleList(RMSNorm(HIDDEN) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norms[0](x))[0]
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * KEYS, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(RMSNorm(HIDDEN), nn.Linear(HIDDEN, 2 * KEYS, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


def sequences() -> torch.Tensor:
    """[batch, tokens]: PAIRS of different keys and their values, then such pairs in any order."""
    keys = torch.rand(BATCH, KEYS).argsort(-1)[:, :PAIRS]
    values = torch.randint(KEYS, (BATCH, PAIRS)) + KEYS
    asked = torch.randint(PAIRS, (BATCH, TOKENS // 2 - PAIRS))
    order = torch.cat((torch.arange(PAIRS).expand(BATCH, -1), asked), 1)
    pairs = torch.stack([x.gather(1, order) for x in (keys, values)], -1)
    return pairs.flatten(1).to(DEVICE)


def trained(backend: str, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The loss of each step. The seed decides the model and the sequences, whatever the backend."""
    for name in ("gated_delta_rule", "causal_conv1d"):
        function = getattr(gated_deltanet, name)
        while isinstance(function, partial):
            function = function.func
        monkeypatch.setattr(gated_deltanet, name, partial(function, backend=backend))
    torch.manual_seed(seed)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    losses = []
    for _ in range(steps):
        tokens = sequences()
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(tokens)
        # A value is asked where its key is the last token; the pairs themselves are not known.
        answers = logits[:, 2 * PAIRS : -1 : 2].float()
        loss = functional.cross_entropy(
            answers.flatten(0, 1), tokens[:, 2 * PAIRS + 1 :: 2].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def test_training(backend: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal compares the reference's chunks with its recurrence, over the early steps."""
    rehearsed = backend == "reference"
    for function in (FORWARD, BACKWARD):
        skip_unless_compiled(backend, torch.bfloat16, HEAD_DIM, function)
    steps = EARLY if rehearsed else STEPS
    found = trained(backend, seed, steps, monkeypatch)
    if rehearsed:
        monkeypatch.setattr(reference, "_algorithm", lambda terms: recurrence)
    expected = trained("reference", seed, steps, monkeypatch)
    assert found.isfinite().all()
    assert expected.isfinite().all()
    early = (found - expected)[:EARLY].abs().max()
    print(f"{backend}: first {float(found[0]):.3f}, early difference {float(early):.5f}", end=", ")
    assert early <= NEAR_EARLY
    if rehearsed:
        return
    means = [float(losses[-LATE:].mean()) for losses in (found, expected)]
    print(f"mean of the last {LATE}: {means[0]:.4f}, of the reference {means[1]:.4f}")
    assert means[1] < 0.1 < float(expected[0])
    assert abs(means[0] - means[1]) <= NEAR_LATE
