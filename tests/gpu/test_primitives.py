"""Hopper's primitives, each alone in a probe kernel, against what the CPU says it does.

The probes (probes/*.cu) include src/cuda/ptx and core/tensor_map.h: what is tested here is what the
kernels use. Layouts of tiles, fragments and accumulators are written down here a second time, in
torch. All values are small integers, so that equal means equal.

Longer than others: the models of swizzle, fragments and maps are read by every test.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from build_probes import LIBRARY

INVALID_VALUE = 1  # cudaErrorInvalidValue
CACHE_HINTS = (0x1000000000000000, 0x12F0000000000000, 0x14F0000000000000)
ROW = 128  # bytes of a row of a swizzled page
COLUMNS = 64  # 16-bit elements of such a row

Probe = Callable[..., int]


@pytest.fixture(scope="module")
def probes() -> ctypes.CDLL:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the primitives are those of compute capability 9.0")
    if not LIBRARY.exists():
        pytest.skip(f"no {LIBRARY.name}: tests/gpu/build_probes.py makes it")
    return ctypes.CDLL(str(LIBRARY))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def integers(*shape: int, most: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape).to(dtype)


def swizzled(rows: torch.Tensor) -> torch.Tensor:
    """A page [rows, 64] of 16-bit elements as it lies in shared memory: pieces of 16 bytes move."""
    pieces = rows.reshape(-1, 8, 8)
    row, piece = torch.meshgrid(torch.arange(len(pieces)), torch.arange(8), indexing="ij")
    moved = torch.empty_like(pieces)
    moved[row, piece ^ (row % 8)] = pieces
    return moved.reshape(rows.shape)


def tile(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [rows, columns] as pages of 64 columns, the last filled up with zeros."""
    filled = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % COLUMNS))
    return torch.stack([swizzled(page) for page in filled.split(COLUMNS, dim=1)])


def test_phases_of_an_mbarrier(probes: ctypes.CDLL) -> None:
    data = torch.arange(100, 116, dtype=torch.int32, device="cuda")
    seen = torch.full((24,), -1, dtype=torch.int32, device="cuda")
    assert probes.probe_phases(pointer(data), pointer(seen)) == 0
    assert seen[:8].tolist() == [1, 0, 0, 1, 0, 0, 0, 1]
    assert torch.equal(seen[8:], data)


@pytest.mark.parametrize("rounds", [1, 3, 4, 200])
def test_a_ring_of_mbarriers_comes_round(rounds: int, seed: int, probes: ctypes.CDLL) -> None:
    data = torch.randint(1 << 30, (rounds, 32), dtype=torch.int32, device="cuda")
    out = torch.full_like(data, -1)
    assert probes.probe_ring(pointer(data), pointer(out), rounds) == 0
    assert torch.equal(out, data)


def test_warpgroups_take_turns_by_named_barriers(probes: ctypes.CDLL) -> None:
    rounds = 100
    log = torch.full((3 * rounds,), -1, dtype=torch.int32, device="cuda")
    assert probes.probe_turns(pointer(log), rounds) == 0
    assert log.tolist() == [0, 1, 2] * rounds


def test_registers_go_from_one_warpgroup_to_two(seed: int, probes: ctypes.CDLL) -> None:
    data = integers(200, 256).cuda()
    out = torch.full_like(data, torch.nan)
    elected = torch.full((4, 32), -1, dtype=torch.int32, device="cuda")
    assert probes.probe_registers(pointer(data), pointer(out), pointer(elected)) == 0
    assert torch.equal(out.flip(0), data + data.roll(-77, 0))
    assert elected.sum(1).tolist() == [1, 1, 1, 1]


def load_box(
    probe: Probe,
    tensor: torch.Tensor,
    shape: Sequence[int],
    at: Sequence[int],
    hint: int = CACHE_HINTS[0],
) -> tuple[int, torch.Tensor]:
    """The CUDA error, and the bytes of a box and 1024 more; like `tensor`, outermost first."""
    return load_strided(probe, tensor.data_ptr(), tensor.shape, tensor.stride(), shape, at, hint)


def load_strided(
    probe: Probe,
    address: int,
    sizes: Sequence[int],
    steps: Sequence[int],
    shape: Sequence[int],
    at: Sequence[int],
    hint: int = CACHE_HINTS[0],
) -> tuple[int, torch.Tensor]:
    """The same of what no tensor can be: strides are in elements."""
    rank = len(sizes)
    size = 2 * torch.Size(shape).numel() + 1024
    out = torch.zeros(size, dtype=torch.uint8, device="cuda")
    dims = (ctypes.c_uint64 * rank)(*reversed(sizes))
    strides = (ctypes.c_uint64 * 4)(*(2 * stride for stride in reversed(steps[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(shape))
    start = (ctypes.c_int32 * rank)(*reversed(at))
    hinted = ctypes.c_uint64(hint)
    at_address = ctypes.c_void_p(address)
    error = probe(rank, at_address, dims, strides, box, start, hinted, pointer(out))
    return error, out.cpu()


def box_of(tensor: torch.Tensor, shape: Sequence[int], at: Sequence[int]) -> torch.Tensor:
    """The box [rows, 64], with zeros where it is outside of the tensor."""
    found = torch.zeros(tuple(shape), dtype=tensor.dtype)
    inside = [
        [i for i in range(count) if 0 <= first + i < size]
        for size, count, first in zip(tensor.shape, shape, at, strict=True)
    ]
    if all(inside):
        source = [torch.tensor(one) + first for one, first in zip(inside, at, strict=True)]
        found[torch.meshgrid(*map(torch.tensor, inside), indexing="ij")] = tensor[
            torch.meshgrid(*source, indexing="ij")
        ]
    return found.reshape(-1, shape[-1])


# name: (tensor, box, where the box begins), outermost dimension first
BOXES = {
    "rows": ((1, 1, 300, 128), (1, 1, 64, 64), (0, 0, 100, 64)),
    "past-the-end": ((1, 1, 300, 128), (1, 1, 176, 64), (0, 0, 200, 64)),
    "before-the-start": ((1, 1, 300, 128), (1, 1, 64, 64), (0, 0, -5, 0)),
    "nothing-inside": ((1, 1, 300, 128), (1, 1, 64, 64), (0, 0, 300, 0)),
    "a-head": ((1, 4, 90, 64), (1, 1, 80, 64), (0, 3, 0, 0)),
    "two-heads-at-once": ((1, 4, 90, 64), (1, 2, 32, 64), (0, 3, 64, 0)),
    "4d": ((2, 5, 130, 128), (1, 1, 128, 64), (1, 4, 0, 64)),
    "4d-past-the-end": ((2, 5, 130, 128), (1, 1, 128, 64), (1, 4, 128, 64)),
    "4d-columns-beyond": ((2, 3, 70, 72), (1, 1, 64, 64), (1, 2, 10, 64)),
    "4d-few-columns": ((2, 3, 70, 8), (1, 1, 64, 64), (0, 1, 60, 0)),
    "5d": ((2, 3, 70, 4, 64), (1, 1, 16, 4, 64), (1, 2, 3, 0, 0)),
    "5d-grouped-heads-past-the-end": ((2, 3, 70, 3, 128), (1, 1, 40, 3, 64), (1, 1, 64, 0, 64)),
}


@pytest.mark.parametrize(("shape", "box", "at"), BOXES.values(), ids=BOXES)
def test_tma_loads_a_box(
    shape: tuple[int, ...],
    box: tuple[int, ...],
    at: tuple[int, ...],
    seed: int,
    probes: ctypes.CDLL,
) -> None:
    tensor = integers(*shape, most=200, dtype=torch.bfloat16)
    expected = swizzled(box_of(tensor, box, at))
    for hint in CACHE_HINTS:
        error, found = load_box(probes.probe_tma, tensor.cuda(), box, at, hint)
        assert error == 0
        assert torch.equal(found[:-1024].view(torch.bfloat16), expected.flatten())
        assert (found[-1024:] == 0xFF).all()


def test_tma_goes_by_strides(seed: int, probes: ctypes.CDLL) -> None:
    """Heads between the rows, a batch that is expanded, rows that are longer than their content."""
    storage = integers(200, 6, 136, most=200, dtype=torch.bfloat16)
    tensor = storage[None, :, :, :128].expand(3, -1, -1, -1).transpose(1, 2)
    box, at = (1, 1, 96, 64), (2, 4, 150, 64)
    on_device = storage.cuda()[None, :, :, :128].expand(3, -1, -1, -1).transpose(1, 2)
    error, found = load_box(probes.probe_tma, on_device, box, at)
    assert error == 0
    expected = swizzled(box_of(tensor, box, at))
    assert torch.equal(found[:-1024].view(torch.bfloat16), expected.flatten())


# name: (where a sequence starts, its rows, the first row of the box). A box must have a row and a
# column: for others TMA asks for the map's address, which need not be memory.
VARLEN = {
    "all": (0, 200, 0),
    "the-end-of-all": (0, 200, 150),
    "in-the-middle": (37, 90, 0),
    "its-end": (37, 90, 64),
    "one-row": (199, 1, 0),
    "the-first-row": (0, 1, 0),
}


@pytest.mark.parametrize(("first", "count", "row"), VARLEN.values(), ids=VARLEN)
@pytest.mark.parametrize("heads_between", [False, True])
def test_a_varlen_map_ends_where_a_sequence_ends(
    heads_between: bool, first: int, count: int, row: int, seed: int, probes: ctypes.CDLL
) -> None:
    """TensorMapMaker's map, whose address is before the tensor; NaN is all around."""
    batches, rows, heads, box_rows = 2, 200, 3, 64
    values = integers(batches, rows, heads, 128, most=200, dtype=torch.bfloat16)
    batch, head, column = 1, 2, 64
    expected = torch.zeros(box_rows, COLUMNS, dtype=torch.bfloat16)
    seen = values[batch, first + row : min(first + count, first + row + box_rows), head, column:]
    expected[: len(seen)] = seen
    outside = torch.ones(rows, dtype=torch.bool)
    outside[first : first + count] = False
    values[:, outside] = torch.nan
    on_device = values.cuda()
    if not heads_between:
        on_device = on_device.transpose(1, 2).contiguous().transpose(1, 2)
    by_batch, by_row, by_head, _ = on_device.stride()
    error, found = load_strided(
        probes.probe_tma,
        on_device.data_ptr() - 2 * rows * by_row,
        (batches, rows + 1, heads, rows, 128),
        (by_batch, by_row, by_head, by_row, 1),
        (1, 1, 1, box_rows, COLUMNS),
        (batch, first + count, head, rows - count + row, column),
    )
    assert error == 0
    assert torch.equal(found[:-1024].view(torch.bfloat16), swizzled(expected).flatten())
    assert (found[-1024:] == 0xFF).all()


# name: (elements before the base, elements of a row, box)
REFUSED = {
    "base-not-on-16-bytes": (4, 128, (64, 64)),
    "stride-not-of-16-bytes": (0, 132, (64, 64)),
    "257-rows": (0, 128, (257, 64)),
    "a-row-beyond-the-swizzle": (0, 128, (64, 128)),
}


@pytest.mark.parametrize(("before", "row", "box"), REFUSED.values(), ids=REFUSED)
def test_the_driver_refuses_a_map(
    before: int, row: int, box: tuple[int, int], probes: ctypes.CDLL
) -> None:
    storage = torch.zeros(before + 300 * row, dtype=torch.bfloat16, device="cuda")
    tensor = storage[before:].view(1, 1, 300, row)[..., :128]
    assert load_box(probes.probe_tma, tensor, (1, 1, *box), (0, 0, 0, 0))[0] == INVALID_VALUE


def fragments(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [64, k] as operands in registers: [k / 16][128 threads][4 pairs]."""
    thread = torch.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    pairs = [
        matrix.reshape(64, -1, 16)[row + down][torch.arange(128), :, :][
            torch.arange(128)[:, None], :, (column + right)[:, None] + torch.arange(2)
        ]
        for right, down in itertools.product((0, 8), (0, 8))
    ]
    return torch.stack(pairs, dim=1).permute(3, 0, 1, 2).contiguous()  # [k / 16, 128, 4, 2]


def accumulated(found: torch.Tensor, n: int) -> torch.Tensor:
    """Accumulators [128 threads][n / 2] as a matrix [64, n]."""
    thread = torch.arange(128)[:, None]
    index = torch.arange(n // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + index // 2 % 2 * 8
    column = index // 4 * 8 + thread % 4 * 2 + index % 2
    matrix = torch.full((64, n), torch.nan)
    matrix[row, column.expand(128, -1)] = found.reshape(128, n // 2)
    return matrix


WIDTHS = {
    torch.bfloat16: (32, 64, 80, 96, 112, 128, 160, 176, 192, 256),
    torch.float16: (64, 128),
}
PRODUCTS = [
    pytest.param(dtype, n, id=f"{str(dtype)[6:]}-{n}") for dtype in WIDTHS for n in WIDTHS[dtype]
]


@pytest.mark.parametrize("k", [16, 64, 176])
@pytest.mark.parametrize("from_registers", [False, True], ids=["a-in-smem", "a-in-registers"])
@pytest.mark.parametrize("transposed", [False, True], ids=["b-k-major", "b-mn-major"])
@pytest.mark.parametrize(("dtype", "n"), PRODUCTS)
def test_wgmma(
    dtype: torch.dtype,
    n: int,
    transposed: bool,
    from_registers: bool,
    k: int,
    seed: int,
    probes: ctypes.CDLL,
) -> None:
    a, b = integers(64, k, dtype=dtype), integers(k, n, dtype=dtype)
    tile_a = (fragments(a) if from_registers else tile(a)).cuda()
    pages = tile(b if transposed else b.T)
    tile_b = pages.cuda()
    out = torch.full((128 * n // 2,), torch.nan, device="cuda")
    error = probes.probe_wgmma(
        int(dtype == torch.bfloat16),
        n,
        int(transposed),
        int(from_registers),
        k,
        pointer(tile_a),
        pointer(tile_b),
        pages.numel() * 2,
        pages[0].numel() * 2,
        pointer(out),
    )
    assert error == 0
    assert torch.equal(accumulated(out.cpu(), n), a.float() @ b.float())


@pytest.mark.parametrize("piece", [4, 128, 8192])
def test_bulk_copies_there_and_back(piece: int, seed: int, probes: ctypes.CDLL) -> None:
    blocks, count = 300, 8192
    data = integers(blocks, count)
    expected = data * torch.arange(1, blocks + 1, dtype=torch.float32)[:, None]
    on_device, found = data.cuda(), torch.full((blocks, count), torch.nan, device="cuda")
    assert probes.probe_scale(pointer(on_device), pointer(found), blocks, count, piece) == 0
    assert torch.equal(found.cpu(), expected)
