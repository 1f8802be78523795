"""One call of flashvar.attention on this machine's device, next to PyTorch's own attention.

Run it after an installation: `python examples/first_call.py`. Ends with 1 where the two differ.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashvar


def main() -> int:
    """Compare the two on fresh random input: bf16 on a GPU, float32 on the CPU; the exit code."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch, seqlen, heads_q, heads_kv, head_dim = 2, 333, 8, 2, 64
    q = torch.randn(batch, seqlen, heads_q, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, seqlen, heads_kv, head_dim, device=device, dtype=dtype)

    out = flashvar.attention(q, k, v, causal=True)

    def oracle(*tensors: torch.Tensor) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in tensors)
        return scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    exact = oracle(q.double(), k.double(), v.double())
    error = (out - exact).abs().max().item()
    peer_error = (oracle(q, k, v) - exact).abs().max().item()
    print(f"attention {tuple(q.shape)} {dtype} on {device}: largest error {error:.1e}")
    print(f"scaled_dot_product_attention there:            {peer_error:.1e}")
    # Twice the peer's error, and a few roundings of values of this size.
    return 0 if error <= 2 * peer_error + 8 * torch.finfo(dtype).eps else 1


if __name__ == "__main__":
    sys.exit(main())
