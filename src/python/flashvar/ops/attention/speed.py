"""The attention calls that `doctor --bench` times: flashvar and torch's backends, same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flashvar.cli.speed import OURS, Call, Cell
from flashvar.ops.attention.spec import BACKWARD, FORWARD, HEAD_DIM

if TYPE_CHECKING:
    import torch

    Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Every call has the same number of tokens and the same width (heads * head dim), as in the
# benchmarks.
DTYPE: Final = "bf16"
TOKENS: Final = 16384
WIDTH: Final = 2048
SEQLEN: Final = 4096

TITLE: Final = "Speed of causal attention, TFLOP/s"
NOTE: Final = f"{TOKENS} tokens in sequences of {SEQLEN}, {DTYPE}, {WIDTH} wide."
PEERS: Final = {"sdpa-flash": "SDPA flash", "sdpa-cudnn": "SDPA cuDNN"}
_BACKENDS: Final = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION"}
_DIRECTIONS: Final = {"forward": FORWARD, "backward": BACKWARD}
# Matrix products of a call, each 2 * heads * seqlen^2 * head_dim operations per sequence.
_PRODUCTS: Final = {"forward": 2, "backward": 5}


@dataclass(frozen=True)
class AttentionCell(Cell):
    """Causal attention over TOKENS tokens in sequences of SEQLEN."""

    direction: str = "forward"
    head_dim: int = 64

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return TOKENS // SEQLEN

    @property
    def heads(self) -> int:
        """The number of heads of queries, keys and values."""
        return WIDTH // self.head_dim


def _cell(direction: str, head_dim: int) -> AttentionCell:
    return AttentionCell(
        f"{direction}, head dim {head_dim}",
        _DIRECTIONS[direction],
        DTYPE,
        (HEAD_DIM.value(head_dim),),
        # Half of the scores are masked.
        float(_PRODUCTS[direction] * 2 * TOKENS * SEQLEN * WIDTH // 2),
        direction,
        head_dim,
    )


CELLS: Final = tuple(_cell(one, head_dim) for head_dim in (64, 128) for one in _DIRECTIONS)
MORE_CELLS: Final[tuple[AttentionCell, ...]] = ()  # the benchmark of attention has them
SMALL_CELLS: Final[tuple[AttentionCell, ...]] = ()  # the benchmark of host time has its own


def call(cell: AttentionCell, contender: str, device: torch.device) -> Call:
    """A call of flashvar (OURS) or of a peer, with its inputs."""
    import torch

    shape = (cell.batch, SEQLEN, cell.heads, cell.head_dim)
    q, k, v, grad_out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4))
    attention = _attention(contender)
    if cell.direction == "forward":
        return lambda: attention(q, k, v)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def _attention(contender: str) -> Attention:
    """The attention function of a contender, for [batch, sequence, heads, head_dim]."""
    if contender == OURS:
        from flashvar.ops.attention.api import attention

        return lambda q, k, v: attention(q, k, v, causal=True)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, _BACKENDS[contender])):
            return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    return sdpa
