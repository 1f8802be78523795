"""A small diffusion U-Net in plain torch, whose attention is flashvar's `Attend`.

It learns to draw discs, squares and crosses of 16 x 16 pixels, which are made on the fly, and is
sampled at the end. Besides torch it needs nothing.

    python examples/unet_diffusion.py                          # under a minute on two CPU cores
    python examples/unet_diffusion.py --image samples.png      # and shows what it draws
    python examples/unet_diffusion.py --backend reference      # flashvar on the CPU, slower

On a GPU the model runs in bfloat16 and flashvar computes its attention; on the CPU torch's own
does, unless a backend is named. Ends with 1 where the loss does not fall to a third.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from flashvar.integrations.attend import Attend

SIZE = 16
NOISE_STEPS = 200


class Residual(nn.Module):
    """Two convolutions that know the time, beside a way around them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.time = nn.Linear(time, outputs)
        self.first = nn.Sequential(
            nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.second = nn.Sequential(
            nn.GroupNorm(4, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.around = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Images [batch, channels, height, width] and times [batch, features]."""
        inner = self.first(x) + self.time(time)[:, :, None, None]
        return self.around(x) + self.second(inner)


class PixelAttention(nn.Module):
    """Every pixel attends to all."""

    def __init__(self, channels: int, backend: str, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)
        self.heads = heads
        self.attend = Attend(flash=True, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [batch, channels, height, width]."""
        batch, channels, height, width = x.shape
        rows = self.qkv(self.norm(x)).view(batch, 3, self.heads, -1, height * width)
        q, k, v = rows.transpose(3, 4).contiguous().unbind(1)  # [batch, heads, pixels, head dim]
        out = self.attend(q, k, v).transpose(2, 3).reshape(batch, channels, height, width)
        return x + self.out(out)


class UNet(nn.Module):
    """The noise in an image: 16 x 16 pixels, 8 x 8, and 16 x 16 again."""

    def __init__(self, backend: str = "auto", width: int = 32) -> None:
        super().__init__()
        time = 4 * width
        self.frequencies = nn.Buffer(torch.exp(-math.log(1e4) * torch.arange(16) / 16))
        self.time = nn.Sequential(nn.Linear(32, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.wide = Residual(width, width, time)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = Residual(2 * width, 2 * width, time)
        self.attention = PixelAttention(2 * width, backend)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.joined = Residual(2 * width, width, time)
        self.leave = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 1, 1))

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Images [batch, 1, 16, 16] and how many steps of noise are in each, [batch]."""
        angles = steps[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        wide = self.wide(self.enter(x), time)
        deep = self.attention(self.middle(self.down(wide), time))
        return self.leave(self.joined(torch.cat([self.up(deep), wide], 1), time))


def shapes(count: int, device: str) -> torch.Tensor:
    """Images [count, 1, 16, 16] of a disc, a square or a cross each, from -1 to 1."""
    places = torch.arange(SIZE, device=device)
    x0, y0 = torch.randint(5, SIZE - 5, (2, count, 1, 1), device=device)
    radius = torch.randint(2, 5, (count, 1, 1), device=device)
    x, y = (places[None, None, :] - x0).abs(), (places[None, :, None] - y0).abs()
    inside = torch.maximum(x, y) <= radius
    disc, cross = x**2 + y**2 <= radius**2, inside & (torch.minimum(x, y) <= 1)
    kind = torch.randint(3, (count, 1, 1), device=device)
    images = torch.where(kind == 0, disc, torch.where(kind == 1, inside, cross))
    return images[:, None].float() * 2 - 1


def kept_signal(device: str) -> torch.Tensor:
    """How much of the image is left after each number of steps, [NOISE_STEPS + 1]."""
    angle = torch.arange(NOISE_STEPS + 1, device=device) / NOISE_STEPS * math.pi / 2
    return angle.cos().square().clamp(1e-3, 1)


def train(model: UNet, steps: int, batch: int, device: str) -> list[float]:
    """The loss at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    signal, losses = kept_signal(device), []
    for _ in range(steps):
        images = shapes(batch, device)
        noise = torch.randn_like(images)
        time = torch.randint(1, NOISE_STEPS + 1, (batch,), device=device)
        kept = signal[time][:, None, None, None]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            guess = model(kept.sqrt() * images + (1 - kept).sqrt() * noise, time)
        loss = functional.mse_loss(guess.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def sample(model: UNet, count: int, device: str, strides: int = 4) -> torch.Tensor:
    """Images [count, 1, 16, 16] out of noise, some steps at a time and without new noise (DDIM)."""
    signal, x = kept_signal(device), torch.randn(count, 1, SIZE, SIZE, device=device)
    for step in range(NOISE_STEPS, 0, -strides):
        time = torch.full((count,), step, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            noise = model(x, time)
        kept, next_kept = signal[step], signal[step - strides]
        image = ((x - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1, 1)
        noise = (x - kept.sqrt() * image) / (1 - kept).sqrt()
        x = next_kept.sqrt() * image + (1 - next_kept).sqrt() * noise
    return x


def write_png(images: torch.Tensor, path: Path, columns: int = 8, zoom: int = 4) -> None:
    """Images [count, 1, height, width] from -1 to 1 as one picture."""
    grid = functional.pad(images[:, 0], (1, 1, 1, 1)).unflatten(0, (-1, columns))
    picture = grid.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    picture = picture.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
    pixels = ((picture.clamp(-1, 1) + 1) * 127.5).to(torch.uint8).cpu()
    height, width = pixels.shape
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def main() -> int:
    """Train, sample, report; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    parser.add_argument("--batch", type=int, default=32, help="images in each (32)")
    parser.add_argument("--backend", default="auto", help="of flashvar: auto, triton, reference")
    parser.add_argument("--image", type=Path, metavar="FILE", help="write 32 samples as a PNG")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(words.seed)
    model = UNet(words.backend).to(device)
    probe = torch.empty(1, 4, 64, 16, device=device)
    probe = probe.bfloat16() if device == "cuda" else probe
    reason = model.attention.attend.why_not(probe, probe, probe)
    print("attention: " + ("flashvar" if reason is None else f"torch's own ({reason})"))
    losses = train(model, words.steps, words.batch, device)
    tenth = max(1, words.steps // 10)
    first, last = losses[0], sum(losses[-tenth:]) / tenth
    print(f"loss: {first:.3f} at first, {last:.3f} over the last {tenth} of {words.steps} steps")
    if words.image is not None:
        write_png(sample(model, 32, device), words.image)
        print(f"samples: {words.image}")
    return 0 if last < first / 3 else 1


if __name__ == "__main__":
    sys.exit(main())
