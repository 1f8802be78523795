"""The drawings of the kernels' pages, by the names that `<!-- drawing: NAME -->` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from svg import Drawing

# A step on a time line: from, to, what, tone.
Step = tuple[float, float, str, str]
_LANES: Final = 42  # where time lines begin, below their names


def _lanes(drawing: Drawing, lanes: dict[str, list[Step]], lane: float, scale: float) -> None:
    """Time lines beside each other, each `lane` wide, time going down."""
    for column, (name, steps) in enumerate(lanes.items()):
        x = 4 + lane * column
        for number, line in enumerate(name.split("\n")):
            drawing.words(x + lane / 2 - 2, 16 + 15 * number, line, "middle")
        for begin, end, says, tone in steps:
            drawing.box(x, _LANES + begin * scale, lane - 4, (end - begin) * scale - 3, says, tone)


def tile_iterator() -> Drawing:
    """Which tiles of the scores a block of queries computes."""
    drawing = Drawing(
        446, "Blocks of queries go through the blocks of keys from the diagonal to the first key"
    )
    drawing.words(260, 16, "keys, in blocks", "middle")
    drawing.words(4, 130, "queries,")
    drawing.words(4, 146, "in blocks")
    for i in range(5):
        for j in range(8):
            x, y = 72 + 48 * j, 26 + 46 * i
            last = j - 3  # the diagonal tile of row i is column i + 3
            tone = "product" if last < i else "softmax" if last == i else "quiet"
            says = "mask" if last == i else ""
            drawing.box(x, y, 45, 43, says, tone)
    drawing.arrow((72 + 48 * 6 + 20, 26 + 46 * 3 + 34), (84, 26 + 46 * 3 + 34))
    drawing.words(72, 276, "teal: every query sees every key · mask: some do")
    drawing.words(72, 292, "gray: never touched")
    drawing.words(4, 326, "One block of the grid has one row of tiles, and follows the arrow.")
    drawing.words(4, 342, "These stay in registers from the first tile to the last:")
    for column, says in enumerate(("O  not yet divided", "m  row maximum", "l  row sum")):
        drawing.box((4, 160, 310)[column], 354, (150, 144, 146)[column], 34, says, "state")
    drawing.words(4, 414, "At the end O / l and m + log l are written, once.")
    return drawing


def mma_sync() -> Drawing:
    """One step of the mma.sync forward."""
    drawing = Drawing(
        462, "K and V have one buffer each; each arrives while the other is computed with"
    )
    lanes: dict[str, list[Step]] = {
        "copies\n(cp.async)": [
            (0, 2.6, "V(n)", "copy"),
            (2.8, 7.8, "K(n − 1)", "copy"),
            (8.0, 10.6, "V(n − 1)", "copy"),
            (10.8, 14, "K(n − 2)", "copy"),
        ],
        "every warp": [
            (0, 2.6, "S = Q Kᵀ", "product"),
            (2.8, 5.2, "softmax", "softmax"),
            (5.2, 7.8, "O += P V", "product"),
            (8.0, 10.6, "S = Q Kᵀ", "product"),
            (10.8, 13.1, "softmax", "softmax"),
            (13.1, 14, "O…", "product"),
        ],
    }
    _lanes(drawing, lanes, 122, 29)
    for when, says in ((2.7, "V(n) is there"), (7.9, "K(n − 1) is there")):
        y = _LANES + when * 29 - 1
        drawing.line((4, y), (258, y))
        drawing.words(264, y + 4, f"barrier: {says}")
        drawing.words(264, y + 20, "and the other buffer is free")
    return drawing


def rows_of_warps() -> Drawing:
    """Who owns what within a block of the mma.sync family."""
    drawing = Drawing(252, "A warp owns rows of the scores and all columns of them")
    for warp in range(4):
        y = 26 + 42 * warp
        drawing.box(4, y, 66, 38, f"warp {warp}", "quiet")
        drawing.box(76, y, 190, 38, "S rows  →  P rows", "softmax")
        drawing.box(340, y, 116, 38, "O rows", "state")
        drawing.arrow((268, y + 19), (338, y + 19))
    drawing.words(303, 16, "× V", "middle")
    drawing.words(171, 16, "block of keys", "middle")
    drawing.words(398, 16, "head dim", "middle")
    drawing.words(4, 216, "The accumulators of S have the layout that the next mma wants")
    drawing.words(4, 232, "of its operand: P never leaves registers, and no warp waits for")
    drawing.words(4, 248, "another's maximum.")
    return drawing


def wgmma() -> Drawing:
    """The time line of the wgmma forward."""
    drawing = Drawing(
        538, "Two consumers take turns at the tensor cores; copies run ahead in a ring"
    )
    lanes: dict[str, list[Step]] = {
        "producer\n(warp, TMA)": [
            (0, 1.9, "K(n)", "copy"),
            (2, 3.9, "K(n−1)", "copy"),
            (4, 5.9, "V(n)", "copy"),
            (6, 7.9, "K(n−2)", "copy"),
            (8, 9.9, "V(n−1)", "copy"),
            (11.2, 13, "K(n−3)", "copy"),
            (13.1, 15, "V(n−2)", "copy"),
        ],
        "consumer 0\n(64 rows)": [
            (2, 3.4, "waits", "quiet"),
            (3.4, 6.6, "softmax(n)", "softmax"),
            (6.6, 8, "waits", "quiet"),
            (8, 11.2, "softmax(n−1)", "softmax"),
            (13, 14.4, "waits", "quiet"),
        ],
        "consumer 1\n(64 rows)": [
            (3.4, 4.8, "waits", "quiet"),
            (4.8, 8, "softmax(n)", "softmax"),
            (9.8, 11.2, "waits", "quiet"),
            (11.2, 14.4, "softmax(n−1)", "softmax"),
        ],
        "tensor\ncores": [
            (2, 3.4, "0: S(n)", "product"),
            (3.4, 4.8, "1: S(n)", "product"),
            (6.6, 8, "0: S(n−1)", "product"),
            (8, 9.8, "0: O += P V", "product"),
            (9.8, 11.2, "1: S(n−1)", "product"),
            (11.2, 13, "1: O += P V", "product"),
            (13, 14.4, "0: S(n−2)", "product"),
        ],
    }
    _lanes(drawing, lanes, 98, 33)
    for when, *says in ((6.6, "0 starts", "both", "products"), (9.8, "then it", "is 1's", "turn")):
        y = _LANES + float(when) * 33 - 1
        drawing.line((298, y), (456, y))
        for number, line in enumerate(says):
            drawing.words(399, y + 16 + 15 * number, str(line))
    return drawing


def ring() -> Drawing:
    """The barriers of a ring of buffers."""
    drawing = Drawing(296, "Buffers of K go round between producer and consumers")
    drawing.box(120, 4, 200, 50, "producer\none lane starts TMA", "copy")
    drawing.box(30, 106, 150, 46, "K buffer 0", "state")
    drawing.box(260, 106, 150, 46, "K buffer 1", "state")
    drawing.box(120, 206, 200, 50, "consumers\nwgmma reads it", "product")
    drawing.arrow((190, 56), (116, 104))
    drawing.arrow((250, 56), (324, 104))
    drawing.arrow((116, 154), (190, 204))
    drawing.arrow((324, 154), (250, 204))
    drawing.words(220, 86, "bytes", "middle")
    drawing.words(136, 190, "full[0]", "end")
    drawing.words(304, 190, "full[1]")
    drawing.arrow((322, 231), (444, 231), (444, 29), (322, 29), dashed=True)
    drawing.words(4, 286, "dashed: empty[stage], every warp that read it has arrived")
    return drawing


def backward() -> Drawing:
    """What a block of keys does in the backward of both CUDA families."""
    drawing = Drawing(
        384, "A block of keys goes through the queries; dK and dV stay, dQ is added up"
    )
    drawing.box(4, 4, 206, 40, "K, V of the block", "copy")
    drawing.box(236, 4, 220, 40, "Q, dO, LSE, delta of step m", "copy")
    drawing.box(4, 92, 206, 40, "Sᵀ = K Qᵀ", "product")
    drawing.box(236, 92, 220, 40, "dPᵀ = V dOᵀ", "product")
    drawing.box(4, 172, 206, 40, "Pᵀ = exp(Sᵀ − LSE)", "softmax")
    drawing.box(236, 172, 220, 40, "dSᵀ = Pᵀ ∘ (dPᵀ − delta)", "softmax")
    drawing.box(4, 264, 136, 40, "dV += Pᵀ dO", "state")
    drawing.box(162, 264, 136, 40, "dK += dSᵀ Q", "state")
    drawing.box(320, 264, 136, 40, "dQ(m) = dS K", "product")
    drawing.arrow((72, 46), (72, 90))
    drawing.arrow((150, 46), (290, 90))
    drawing.arrow((296, 46), (156, 90))
    drawing.arrow((386, 46), (386, 90))
    drawing.arrow((107, 134), (107, 170))
    drawing.arrow((346, 134), (346, 170))
    drawing.arrow((212, 192), (234, 192))
    drawing.arrow((72, 214), (72, 262))
    drawing.arrow((300, 214), (240, 262))
    drawing.arrow((388, 214), (388, 262))
    drawing.words(151, 322, "both in registers, to the end", "middle")
    drawing.words(456, 322, "added in the workspace", "end")
    drawing.words(4, 358, "m = first to last block of queries that sees the keys,")
    drawing.words(4, 374, "of every query head that shares them")
    return drawing


def wgmma_backward() -> Drawing:
    """One step of a consumer of the wgmma backward."""
    drawing = Drawing(450, "A consumer's products wait for nothing from dQ to the next S")
    lanes: dict[str, list[Step]] = {
        "its products": [
            (0, 2, "dP(m)", "product"),
            (3.6, 5.4, "dQ(m−1)", "product"),
            (5.4, 7.2, "dV(m)", "product"),
            (7.2, 9, "dK(m)", "product"),
            (9, 11, "S(m+1)", "product"),
            (11, 13, "dP(m+1)", "product"),
        ],
        "its warps": [
            (0, 2, "P(m)", "softmax"),
            (2, 3.6, "dS(m)", "softmax"),
            (3.6, 5.4, "waits", "quiet"),
            (5.4, 9, "adds dQ(m−1)\nin memory", "copy"),
            (11, 13, "P(m+1)", "softmax"),
        ],
        "the other's products": [
            (0, 1.6, "dV, dK", "product"),
            (1.6, 3.6, "S", "product"),
            (3.6, 5.6, "dP", "product"),
            (9.2, 13, "dQ, dV, dK", "product"),
        ],
    }
    _lanes(drawing, lanes, 151, 31)
    return drawing


def triton_keys() -> Drawing:
    """How the Triton forward divides the keys of a block of queries."""
    drawing = Drawing(162, "First the keys that all rows see, then those that need a mask")
    drawing.words(4, 16, "keys")
    x = 4
    for width, says, tone, begins in (
        (74, "not seen", "quiet", ""),
        (84, "window's\nedge", "softmax", "start"),
        (148, "seen by every row", "product", "unmasked"),
        (74, "diagonal", "softmax", "masked"),
        (76, "not seen", "quiet", "stop"),
    ):
        drawing.words(x, 16, begins, "middle")
        drawing.box(x, 26, width - 4, 40, says, tone)
        x += width
    drawing.arrow((164, 84), (306, 84))
    drawing.words(236, 102, "loop 1: no mask, no comparison", "middle")
    drawing.arrow((80, 126), (158, 126))
    drawing.line((160, 126), (308, 126))
    drawing.arrow((310, 126), (380, 126))
    drawing.words(230, 146, "loop 2: the rest in one loop that jumps over the gap", "middle")
    return drawing


def triton_backward() -> Drawing:
    """The two kernels of the Triton backward."""
    drawing = Drawing(236, "One kernel owns rows of the scores, the other columns")
    kernels = ((44, "first kernel: dQ, delta", True), (256, "second: dK, dV", False))
    for left, title, own_row in kernels:
        drawing.words(left + 99, 16, title, "middle")
        for i in range(4):
            for j in range(5):
                mine = i == 1 if own_row else j == 3
                tone = "product" if mine else "quiet"
                drawing.box(left + 40 * j, 26 + 44 * i, 37, 41, "", tone)
        if own_row:
            drawing.arrow((left + 6, 26 + 44 + 20), (left + 194, 26 + 44 + 20))
        else:
            drawing.arrow((left + 40 * 3 + 18, 34), (left + 40 * 3 + 18, 194))
    drawing.words(4, 94, "rows")
    drawing.words(143, 222, "writes its own rows of dQ", "middle")
    drawing.words(355, 222, "writes its own keys' dK, dV", "middle")
    return drawing


def delta_chunks() -> Drawing:
    """Which kernels of the gated delta rule go through chunks all at once, and which in order."""
    drawing = Drawing(
        352, "Chunks are prepared all at once; only a state passes from one to the next"
    )
    rows = (
        ("chunk", "all at once", "T D, P", "product"),
        ("chain", "in order", "S, U, out", "state"),
        ("reverse", "in reverse", "dS, dU, dV", "state"),
        ("squares", "all at once", "dP, dA, dβ", "product"),
        ("rows", "all at once", "dQ, dK, dG", "product"),
    )
    for row, (kernel, how, says, tone) in enumerate(rows):
        y = 26 + 58 * row
        drawing.words(4, y + 16, kernel)
        drawing.words(4, y + 33, how)
        for chunk in range(4):
            x = 96 + 93 * chunk
            drawing.box(x, y, 76, 40, says, tone)
            if tone == "state" and chunk < 3:
                ends = [(x + 77, y + 20), (x + 92, y + 20)]
                drawing.arrow(*(ends if kernel == "chain" else reversed(ends)))
    for chunk in range(4):
        drawing.words(134 + 93 * chunk, 16, f"64 tokens ({chunk})", "middle")
    drawing.line((4, 133), (456, 133))
    drawing.words(4, 328, "A forward is what is above the line;")
    drawing.words(4, 344, "a backward is all five, without out.")
    return drawing


DRAWINGS: Final[dict[str, Callable[[], Drawing]]] = {
    "tile iterator": tile_iterator,
    "mma.sync": mma_sync,
    "rows of warps": rows_of_warps,
    "wgmma": wgmma,
    "ring": ring,
    "backward": backward,
    "wgmma backward": wgmma_backward,
    "triton keys": triton_keys,
    "triton backward": triton_backward,
    "delta chunks": delta_chunks,
}
