"""The CUDA kernels of causal_conv1d, run on the host, beside the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import host_program
import pytest
import torch
from host_causal_conv1d import CHOSEN, HostLibrary

from flashvar.backends.cuda import causal_conv1d as cuda
from flashvar.backends.reference import causal_conv1d as reference
from flashvar.backends.reference.causal_conv1d import formula
from flashvar.ops.causal_conv1d.problem import Convolution, Gradients

pytestmark = host_program.needs_compiler
NAN, INF = torch.nan, torch.inf
# Zero lengths, lengths below the width, one that goes over several tiles of threads.
ENDS = (0, 0, 1, 3, 3, 40, 41, 300, 303, 303)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


# Where shared memory allows it, the backward of aligned tokens loads further ahead. Nothing else
# differs.
NEAR, FAR = "80, 166912", "90, 232448"
EACH_TARGET = pytest.mark.parametrize("library", [NEAR, FAR], indirect=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    return HostLibrary(tmp_path_factory.mktemp("causal_conv1d"), (NEAR, FAR))


@pytest.fixture
def library(request: pytest.FixtureRequest, compiled: HostLibrary) -> HostLibrary:
    compiled.choose(getattr(request, "param", NEAR))
    return compiled


@pytest.fixture(autouse=True)
def _on_the_host(library: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    library.install(monkeypatch)


def laid_out(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x in memory with its channels or its tokens beside each other, aligned or not."""
    if kind == "channels":
        return x.contiguous()
    if kind == "tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "padded tokens":  # rows begin at multiples of 16 bytes
        padded = torch.full((*x.shape[::2], -(-x.shape[1] // 8) * 8), NAN, dtype=x.dtype)
        return padded[..., : x.shape[1]].copy_(x.transpose(1, 2)).transpose(1, 2)
    if kind == "sliced":  # of channels of a wider projection, not aligned
        return torch.cat((x[..., :1], x, x[..., :2]), 2)[..., 1:-2]
    return torch.stack((x, x), 3)[..., 0]  # neither


KINDS = ("channels", "tokens", "padded tokens", "sliced", "neither")
OF_TARGETS = [(NEAR, kind) for kind in KINDS] + [(FAR, "tokens"), (FAR, "padded tokens")]
ALIGNED = [(NEAR, "channels"), (NEAR, "tokens"), (FAR, "tokens")]
ALIGNED_OR_NOT = [*ALIGNED, (NEAR, "sliced")]


def made(
    dim: int, seqlen: int, width: int, columns: int, dtype: torch.dtype, kind: str = "channels",
    ends: tuple[int, ...] = (), batch: int = 2, mixed: bool = False,
) -> tuple[Convolution, torch.Tensor]:  # fmt: skip
    """A call with everything, and its residual; `mixed`: parameters of other dtypes."""
    others = [torch.float32, torch.float16, torch.bfloat16] if mixed else [dtype] * 3
    if ends:
        batch, seqlen = 1, ends[-1]
    x, residual = torch.randn(2, batch, seqlen, dim).to(dtype)
    sequences = len(ends) - 1 if ends else batch
    conv = Convolution(
        laid_out(x, kind),
        torch.randn(dim, width).to(others[0]),
        torch.randn(dim).to(others[1]),
        torch.randn(sequences, dim, columns).to(others[2]) if columns else None,
        torch.tensor(ends, dtype=torch.int32) if ends else None,
        True,
    )
    return conv, laid_out(residual.to(others[0]), kind)


def forward(
    conv: Convolution, residual: torch.Tensor | None, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty_like(conv.x).fill_(NAN)
    like = conv.x if conv.state is None else conv.state
    final = like.new_full((conv.sequences, conv.x.shape[2], columns), NAN)
    cuda.prepare_forward(CHOSEN, conv, residual, y, final)(conv, residual, y, final)
    return y, final


def backward(conv: Convolution, grad_y: torch.Tensor, grad_final: torch.Tensor | None) -> Gradients:
    found = Gradients(
        *(
            None if one is None else torch.empty_like(one).fill_(NAN)
            for one in (conv.x, conv.weight, conv.bias, conv.state)
        )  # type: ignore[arg-type]
    )
    given: Any = conv, grad_y, grad_final, found
    cuda.prepare_backward(CHOSEN, *given)(*given)
    return found


def assert_alike(found: Any, wanted: Any, sums: int = 1) -> None:
    """Half a step of the dtype, of results that are sums of so many."""
    for one, other in zip(found, wanted, strict=True):
        if one is None:
            continue
        eps = torch.finfo(one.dtype).eps
        tolerance = 2 * eps + 1e-5
        torch.testing.assert_close(
            one.double(), other.double(), rtol=tolerance, atol=tolerance * sums**0.5, equal_nan=True
        )


def check(conv: Convolution, residual: torch.Tensor | None, columns: int) -> None:
    """Both directions, beside the reference in float64."""
    wide = Convolution(*(x.double() if torch.is_tensor(x) else x for x in conv))
    if conv.cu_seqlens is not None:
        wide = wide._replace(cu_seqlens=conv.cu_seqlens)
    found = forward(conv, residual, columns)
    wanted = formula.forward(wide, None if residual is None else residual.double(), columns)
    assert_alike(found, wanted)
    grad_y = laid_out(torch.randn(conv.x.shape).to(conv.x.dtype), "channels")
    if conv.x.stride(1) == 1:
        grad_y = laid_out(grad_y, "tokens")
    grad_final = torch.randn(found[1].shape).to(found[1].dtype) if columns else None
    of_wide = formula.backward(
        wide, grad_y.double(), None if grad_final is None else grad_final.double()
    )
    assert_alike(backward(conv, grad_y, grad_final), of_wide, conv.x.shape[0] * conv.x.shape[1])


@DTYPES
@pytest.mark.parametrize("ends", [(), ENDS], ids=["batch", "packed"])
@pytest.mark.parametrize(("library", "kind"), OF_TARGETS, indirect=["library"])
def test_values(kind: str, ends: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*made(24, 41, 4, 3, dtype, kind, ends), 3)


@pytest.mark.parametrize(("library", "kind"), ALIGNED_OR_NOT, indirect=["library"])
@pytest.mark.parametrize("columns", [0, 1, 4, 9])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_widths_and_states(width: int, columns: int, kind: str) -> None:
    """Some packed, some with parameters of other dtypes."""
    columns = max(columns, width - 1) if columns else 0
    ends = ENDS if width == 3 else ()
    check(*made(16, 33, width, columns, torch.float32, kind, ends, mixed=columns == 4), columns)


@pytest.mark.parametrize(("library", "kind"), ALIGNED, indirect=["library"])
@pytest.mark.parametrize(
    ("dim", "seqlen", "batch"),
    [(1, 1, 1), (1, 700, 2), (300, 2, 3), (8, 1, 600), (7, 3, 5), (264, 5, 1), (8, 600, 2)],
    ids=str,
)
def test_sizes(dim: int, seqlen: int, batch: int, kind: str) -> None:
    check(*made(dim, seqlen, 4, 4, torch.float32, kind, batch=batch), 4)


@EACH_TARGET
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("ends", [(), ENDS], ids=["batch", "packed"])
@pytest.mark.parametrize(
    ("dim", "seqlen", "batch"), [(9, 41, 3), (70, 1, 2), (13, 1030, 2), (66, 255, 1)], ids=str
)
def test_rows_that_begin_within_a_chunk(
    dim: int, seqlen: int, batch: int, ends: tuple[int, ...], columns: int, library: HostLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of every channel and batch entry elsewhere; with few blocks, which go on to more channels."""
    library.install(monkeypatch, blocks=1, multiprocessors=1)
    for dtype in (torch.bfloat16, torch.float32):
        check(*made(dim, seqlen, 4, columns, dtype, "tokens", ends, batch), columns)


# The last rows begin at element 0, 1, 4, 5 or 6 of a chunk of 8, which is 16 bytes of bf16.
LAST_ROWS = pytest.mark.parametrize(
    ("dim", "seqlen"),
    [(5, 41), (9, 41), (9, 249), (5, 250), (9, 253), (9, 255), (5, 257), (9, 506), (9, 1021)],
)


@pytest.fixture
def few_tiles(library: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> HostLibrary:
    """Blocks of few tiles, so that the only elements of some are those before their first row."""
    library.install(monkeypatch, blocks=10**6)
    return library


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@LAST_ROWS
def test_the_forward_reads_nothing_beyond_the_last_row(
    dim: int, seqlen: int, dtype: torch.dtype, few_tiles: HostLibrary
) -> None:
    """The program would end."""
    conv, residual = made(dim, seqlen, 4, 0, dtype, "tokens")
    for x in (conv.x, residual):
        few_tiles.end_tensors_at(x)
        found = forward(conv, residual, 0)
    few_tiles.end_tensors_at(None)
    assert found[0].isfinite().all()


@EACH_TARGET
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@LAST_ROWS
def test_the_backward_reads_nothing_beyond_the_last_row(
    dim: int, seqlen: int, dtype: torch.dtype, few_tiles: HostLibrary
) -> None:
    """The program would end."""
    conv, _ = made(dim, seqlen, 4, 0, dtype, "tokens")
    grad_y = laid_out(torch.randn(conv.x.shape).to(dtype), "tokens")
    for x in (conv.x, grad_y):
        few_tiles.end_tensors_at(x)
        grads = backward(conv, grad_y, None)
    few_tiles.end_tensors_at(None)
    assert grads.x.isfinite().all()


@EACH_TARGET
def test_no_row_sees_the_next_ones_nan() -> None:
    conv, _ = made(24, 41, 4, 3, torch.bfloat16, "tokens")
    conv.x[0, :, ::2] = NAN
    conv.x[1, :, 1::2] = NAN
    grad_y, grad_final = torch.ones_like(conv.x), torch.ones(2, 24, 3).bfloat16()
    y, final = forward(conv, None, 3)
    grad_x = backward(conv, grad_y, grad_final).x
    for one in (y, grad_x, final.transpose(1, 2)):
        assert one[0, :, 1::2].isfinite().all()
        assert one[1, :, ::2].isfinite().all()


@EACH_TARGET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("ends", [(), (0, 256, 700, 1024, 1030, 2401)], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", ["tokens", "padded tokens"])
def test_blocks_of_many_tiles(
    kind: str, ends: tuple[int, ...], columns: int, dtype: torch.dtype, library: HostLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    library.install(monkeypatch, blocks=1)
    check(*made(9, 2600, 4, columns, dtype, kind, ends), columns)


@pytest.mark.parametrize(("library", "kind"), ALIGNED, indirect=["library"])
def test_nothing_but_x_and_weights(kind: str) -> None:
    conv, _ = made(16, 30, 4, 0, torch.float32, kind)
    conv = conv._replace(bias=None, silu=False)
    check(conv, None, 0)
    wide = conv._replace(cu_seqlens=torch.tensor([0, 7, 30]), x=conv.x[:1])
    check(wide, None, 2)


@pytest.mark.parametrize(("library", "kind"), ALIGNED_OR_NOT, indirect=["library"])
def test_no_sequence_sees_anothers_nan(kind: str) -> None:
    """Nor infinite weights where no token follows."""
    ends = (0, 5, 20, 21, 60)
    conv, residual = made(8, 0, 4, 3, torch.float32, kind, ends)
    assert conv.state is not None
    assert conv.cu_seqlens is not None
    conv.x[:, 5:20] = NAN
    conv.state[2] = INF
    found = forward(conv, residual, 3)
    wanted = formula.forward(conv, residual, 3)
    assert_alike(found, wanted)
    assert found[0][:, :5].isfinite().all()
    grad_y = torch.randn(conv.x.shape)
    grads = backward(conv, grad_y, None)
    assert_alike(grads[:1], formula.backward(conv, grad_y, None)[:1])
    plain, _ = made(8, 0, 4, 3, torch.float32, kind, ends)
    plain.weight[:, :3] = INF
    plain = plain._replace(silu=False)
    for one, other in zip(
        backward(plain, grad_y, None)[::3], formula.backward(plain, grad_y, None)[::3], strict=True
    ):
        assert torch.equal(one.isfinite(), other.isfinite())
    assert backward(plain, grad_y, None).x[:, [4, 19, 20, 59]].isfinite().all()


@pytest.mark.parametrize(("library", "kind"), ALIGNED, indirect=["library"])
@pytest.mark.parametrize(
    "ends", [(-7, 10**9, 5, 2**40), (3, 2, 1, 0), (9, 9, 9, 9), (0, 0, 0, 12)], ids=str
)
def test_wrong_ends_read_nothing_beyond(ends: tuple[int, ...], kind: str) -> None:
    """Tensors are in the middle of others, whose NaN would be seen."""
    conv, _ = made(8, 30, 4, 3, torch.float32, kind, batch=3)
    conv.x[::2] = NAN
    x, state = conv.x[1:2], torch.randn(3, 8, 3)
    wrong = conv._replace(x=x, state=state, cu_seqlens=torch.tensor(ends))
    y, final = forward(wrong, None, 3)
    grads = backward(wrong, torch.ones_like(x), torch.ones_like(final))
    for one in (y, final, *grads):
        assert one.isfinite().all()


@pytest.mark.parametrize(("library", "kind"), ALIGNED, indirect=["library"])
def test_the_same_bits_again(kind: str) -> None:
    conv, _ = made(16, 500, 4, 3, torch.float32, kind)
    grad_y = torch.randn(conv.x.shape)
    first, second = backward(conv, grad_y, None), backward(conv, grad_y, None)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@EACH_TARGET
@pytest.mark.parametrize("seqlen", [200, 2600])
@pytest.mark.parametrize("ends", [(), (0, 100, 101, 200)], ids=["batch", "packed"])
def test_the_same_bits_on_every_device(
    ends: tuple[int, ...], seqlen: int, library: HostLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, _ = made(90, seqlen, 4, 3, torch.bfloat16, "padded tokens", ends)
    grad_y = laid_out(torch.randn(conv.x.shape).bfloat16(), "tokens")
    found = []
    for multiprocessors in (1, 100):
        library.install(monkeypatch, blocks=1, multiprocessors=multiprocessors)
        found.append(backward(conv, grad_y, None))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@EACH_TARGET
@pytest.mark.parametrize(
    ("kind", "batch", "seqlen", "dim", "of_forward", "of_backward"),
    [
        ("channels", 1, 32768, 512, 256, 250 + 80),  # 64 and 66 rows a thread
        ("channels", 1, 2048, 512, 64, 30 + 80),  # 16 and 36 rows, the fewest
        ("tokens", 32, 2048, 512, 512, 256 + 10),  # one wave, and as many blocks as are wanted
        ("tokens", 1, 2**20, 64, 528, 256 + 10),  # 63 tiles a block; two channels of 64 tiles
        ("tokens", 1, 65536, 64, 256, 256 + 10),  # 8 tiles a block
        ("tokens", 1, 2304, 8, 2, 2 + 1),  # of 9 tiles, 5 and 4
        ("tokens", 1, 2048, 8, 1, 1),  # of 8 tiles
        ("tokens", 1, 8, 0, 0, 0),
        ("tokens", 0, 8, 8, 0, 1),  # sums of no parts are written
    ],
)  # fmt: skip
def test_numbers_of_blocks(
    kind: str, batch: int, seqlen: int, dim: int, of_forward: int, of_backward: int,
    library: HostLibrary, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the limits of src/cuda, on 132 multiprocessors that run four blocks each in the forward,
    and two in the backward, where blocks that add up partial sums come after.
    """
    library.install(monkeypatch, few_tiles=8, multiprocessors=132)
    shape = (batch, seqlen, dim) if kind == "channels" else (batch, dim, seqlen)
    x = torch.empty(shape, dtype=torch.bfloat16)
    x = x if kind == "channels" else x.transpose(1, 2)
    conv = Convolution(x, x.new_empty(dim, 4), None, None, None, True)
    final, grads = x.new_empty(batch, dim, 0), Gradients(x, conv.weight, None, None)
    given: Any = conv, x, None, grads
    run_forward = cuda.prepare_forward(CHOSEN, conv, None, x, final)
    run_backward = cuda.prepare_backward(CHOSEN, *given)
    assert library.count_blocks(lambda: run_forward(conv, None, x, final)) == of_forward
    assert library.count_blocks(lambda: run_backward(*given)) == of_backward


_BLOCKS_OF_TOKENS = """
#include <cstdio>
#include "device.h"
#include "causal_conv1d/tiles.h"
int main() {
  const int64_t sizes[][3] = {
      {1, 8192, 8192}, {4, 8192, 8192}, {1, 65536, 4096}, {1, 16640, 4096},
      {3, 8192, 8192}, {1, 8192, 2056}, {2, 100, 64},     {0, 100, 64}};
  for (auto [batch, seqlen, dim] : sizes) {
    flashvar::causal_conv1d::Problem problem{};
    problem.batch = batch, problem.seqlen = seqlen, problem.dim = dim;
    auto tiles = flashvar::causal_conv1d::TokenTiles::make(problem, 8);
    tiles.divide_tokens(256, 64);
    auto const ranges = tiles.ranges();
    bool const whole = tiles.is_whole();
    tiles.divide_channels_among(264);
    if (tiles.ranges() != ranges || tiles.is_whole() != whole) return 1;
    std::printf("%dx%d ", int(tiles.blocks), int(tiles.tiles));
  }
  for (int dim : {5120, 6144, 7168, 8192, 1 << 20}) {
    flashvar::causal_conv1d::Problem problem{};
    problem.batch = 1, problem.seqlen = 8192, problem.dim = dim;
    auto tiles = flashvar::causal_conv1d::TokenTiles::make(problem, 8);
    tiles.divide_tokens_among(528, 64);
    std::printf("%dx%d ", int(tiles.blocks), int(tiles.tiles));
  }
}
"""


@pytest.fixture(scope="module")
def blocks_of_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    return host_program.run(_BLOCKS_OF_TOKENS, tmp_path_factory.mktemp("blocks"))


def test_blocks_of_tokens_end_together(blocks_of_tokens: tuple[int, str]) -> None:
    """On 132 multiprocessors, with two blocks each in the backward and four in the forward."""
    code, printed = blocks_of_tokens
    # 65 and 96 tiles are halved: a block has 64.
    backward = ["256x32", "256x64", "256x64", "256x33", "256x48", "257x32", "4x2", "0x1"]
    # Halves take three instead of two waves, if these were less than three quarters full.
    forward = ["1280x16", "1536x16", "896x32", "1024x32", "131072x32"]
    assert (code, printed.split()) == (0, backward + forward)


@DTYPES
@pytest.mark.parametrize("ends", [(), ENDS], ids=["batch", "packed"])
@pytest.mark.parametrize("copied", [0, 2**40], ids=["copied", "as it is"])
@pytest.mark.parametrize("order", ["tokens", "odd", "neither", "expanded"])
def test_a_gradient_in_another_order(
    order: str, copied: int, ends: tuple[int, ...], dtype: torch.dtype, library: HostLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As models make it that transpose or split y. Several tiles of a copy, some partly filled."""
    library.install(monkeypatch, copied=copied)
    conv, _ = made(68, 70, 4, 3, dtype, ends=ends)
    wide = Convolution(*(x.double() if torch.is_tensor(x) else x for x in conv))
    wide = wide._replace(cu_seqlens=conv.cu_seqlens)
    ordered = {
        "tokens": partial(laid_out, kind="tokens"),
        # Rows of 71 tokens.
        "odd": lambda grad: torch.nn.functional.pad(grad.mT, (0, 1))[..., :-1].mT,
        "neither": partial(laid_out, kind="neither"),
        "expanded": lambda grad: grad[..., :1].expand_as(grad),
    }
    grad_y = ordered[order](torch.randn(conv.x.shape).to(dtype))
    grad_final = torch.randn(conv.sequences, 68, 3).to(dtype)
    wanted = formula.backward(wide, grad_y.double(), grad_final.double())
    make, sizes = cuda.maker, list[int]()
    monkeypatch.setattr(cuda, "maker", lambda like: sizes.append(like.numel()) or make(like))
    found = backward(conv, grad_y, grad_final)
    assert_alike(found, wanted, conv.x.shape[0] * conv.x.shape[1])
    assert (sizes[0] >= grad_y.numel() * grad_y.element_size()) == (copied == 0)


@pytest.mark.parametrize("positions", [False, True], ids=["", "circular"])
@pytest.mark.parametrize("slots", [False, True], ids=["in order", "pool"])
@pytest.mark.parametrize(
    ("seqlen", "columns", "width"), [(1, 3, 4), (1, 4, 4), (6, 3, 3), (2, 9, 2), (12, 9, 4)]
)
def test_update(seqlen: int, columns: int, width: int, slots: bool, positions: bool) -> None:
    conv, residual = made(70, seqlen, width, columns, torch.bfloat16, batch=6, mixed=True)
    states = torch.randn(9, 70, columns) if slots else conv.state
    assert states is not None
    indices = torch.tensor([8, -1, 0, 3, 10**12, 2]) if slots else None
    turns = torch.tensor([0, 5, 2**31 - 1, 3, 7, -4], dtype=torch.int32) if positions else None
    pools = states.clone(), states.clone()
    results = [torch.empty_like(conv.x).fill_(7) for _ in pools]
    for module, pool, y in zip((cuda, reference), pools, results, strict=True):
        given: Any = conv._replace(state=pool), residual, indices, turns, y
        module.prepare_update(CHOSEN, *given)(*given)
    assert_alike(results[:1], results[1:])
    assert torch.equal(*pools)
    if slots:
        assert (results[0][1] == 0).all()
        assert results[0][4].isnan().all()


def test_the_binary_explains_a_call() -> None:
    said = {}
    for kind in KINDS:
        conv, residual = made(24, 40, 4, 0, torch.bfloat16, kind)
        y = torch.empty_like(conv.x)
        said[kind] = cuda.explain_forward(CHOSEN, conv, residual, y, y.new_empty(2, 24, 0))
    assert said["channels"] == "simt: along channels, 8 bytes at a time"
    assert said["tokens"] == said["padded tokens"] == "simt: along tokens, 16 bytes at a time"
    assert said["sliced"] == (
        "simt: along channels, element by element, for the address of x does not allow 8 bytes"
    )
    assert "the order of dimensions of x" in said["neither"]
    conv, _ = made(24, 41, 4, 0, torch.bfloat16, "tokens")
    y, final = torch.empty_like(conv.x), conv.x.new_empty(2, 24, 0)
    assert cuda.explain_forward(CHOSEN, conv, None, y, final) == said["tokens"]
    beside = conv._replace(x=conv.x[:, 1:])
    assert cuda.explain_forward(CHOSEN, beside, None, y[:, :-1], final) == (
        "simt: along tokens, element by element, for rows of x begin elsewhere within 16 bytes "
        "than those of y"
    )
