"""The drawings of the kernels' pages, by the names that `<!-- drawing: NAME -->` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from svg import Drawing

# A step on a time line: from, to, what, tone.
Step = tuple[float, float, str, str]


def _lanes(drawing: Drawing, lanes: dict[str, list[Step]], scale: float, top: float = 30) -> None:
    """Time lines below each other, time going right."""
    for row, (name, steps) in enumerate(lanes.items()):
        y = top + 52 * row
        for number, line in enumerate(name.split("\n")):
            drawing.words(8, y + 18 + 15 * number, line)
        for begin, end, says, tone in steps:
            drawing.box(150 + begin * scale, y, (end - begin) * scale - 3, 40, says, tone)


def tile_iterator() -> Drawing:
    """Which tiles of the scores a block of queries computes."""
    drawing = Drawing(
        760,
        300,
        "Blocks of queries go through the blocks of keys from the diagonal to the first key",
    )
    drawing.words(270, 18, "keys, in blocks", "middle")
    drawing.words(16, 150, "queries,")
    drawing.words(16, 166, "in blocks")
    for i in range(5):
        for j in range(8):
            x, y = 92 + 46 * j, 30 + 46 * i
            last = j - 3  # the diagonal tile of row i is column i + 3
            tone = "product" if last < i else "softmax" if last == i else "quiet"
            says = "mask" if last == i else ""
            drawing.box(x, y, 43, 43, says, tone)
    drawing.arrow((92 + 46 * 6 + 20, 30 + 46 * 3 + 34), (104, 30 + 46 * 3 + 34))
    drawing.words(495, 48, "one block of the grid has one row")
    drawing.words(495, 64, "of tiles, and iterates this way")
    drawing.line((490, 60), (470, 60), (466, 190), (440, 190))
    drawing.box(495, 88, 250, 34, "O  [rows, head dim], not yet divided", "state")
    drawing.box(495, 128, 250, 34, "m  maximum of each row so far", "state")
    drawing.box(495, 168, 250, 34, "l  sum of each row so far", "state")
    drawing.words(495, 222, "stay in registers from the first tile")
    drawing.words(495, 238, "to the last; then O / l and m + log l")
    drawing.words(495, 254, "are written, once")
    drawing.words(92, 284, "teal: every query sees every key · mask: some do · gray: never touched")
    return drawing


def mma_sync() -> Drawing:
    """One step of the mma.sync forward."""
    drawing = Drawing(
        900, 210, "K and V have one buffer each; each arrives while the other is computed with"
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
    _lanes(drawing, lanes, 52)
    for when, says in ((2.7, "V(n) is there"), (7.9, "K(n − 1) is there")):
        x = 150 + when * 52 - 1
        drawing.line((x, 20), (x, 134))
        drawing.words(x, 150, "barrier:", "middle")
        drawing.words(x, 166, says, "middle")
        drawing.words(x, 182, "and the other buffer is free", "middle")
    return drawing


def rows_of_warps() -> Drawing:
    """Who owns what within a block of the mma.sync family."""
    drawing = Drawing(800, 220, "A warp owns rows of the scores and all columns of them")
    for warp in range(4):
        y = 30 + 42 * warp
        drawing.box(90, y, 70, 38, f"warp {warp}", "quiet")
        drawing.box(168, y, 190, 38, "S rows  →  P rows", "softmax")
        drawing.box(470, y, 120, 38, "O rows", "state")
        drawing.arrow((360, y + 19), (468, y + 19))
    drawing.words(414, 22, "× V", "middle")
    drawing.words(262, 22, "block of keys", "middle")
    drawing.words(530, 22, "head dim", "middle")
    drawing.words(602, 60, "The accumulators of S have")
    drawing.words(602, 76, "the layout that the next")
    drawing.words(602, 92, "mma wants of its operand:")
    drawing.words(602, 108, "P never leaves registers,")
    drawing.words(602, 124, "and no warp waits for")
    drawing.words(602, 140, "another's maximum.")
    return drawing


def wgmma() -> Drawing:
    """The time line of the wgmma forward."""
    drawing = Drawing(
        960, 275, "Two consumers take turns at the tensor cores; copies run ahead in a ring"
    )
    lanes: dict[str, list[Step]] = {
        "producer\n(one warp, TMA)": [
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
        "tensor cores": [
            (2, 3.4, "0: S(n)", "product"),
            (3.4, 4.8, "1: S(n)", "product"),
            (6.6, 8, "0: S(n−1)", "product"),
            (8, 9.8, "0: O += P V", "product"),
            (9.8, 11.2, "1: S(n−1)", "product"),
            (11.2, 13, "1: O += P V", "product"),
            (13, 14.4, "0: S(n−2)", "product"),
        ],
    }
    _lanes(drawing, lanes, 53)
    for when, says in ((6.6, "0 starts both products,"), (9.8, "then it is 1's turn")):
        x = 150 + when * 53 - 1
        drawing.line((x, 178), (x, 240))
        drawing.words(x, 258, says, "middle")
    return drawing


def ring() -> Drawing:
    """The barriers of a ring of buffers."""
    drawing = Drawing(760, 200, "Buffers of K go round between producer and consumers")
    drawing.box(20, 70, 150, 60, "producer\none lane starts TMA", "copy")
    drawing.box(320, 30, 120, 50, "K buffer 0", "state")
    drawing.box(320, 120, 120, 50, "K buffer 1", "state")
    drawing.box(590, 70, 150, 60, "consumers\nwgmma reads it", "product")
    drawing.arrow((170, 88), (318, 55))
    drawing.arrow((170, 112), (318, 145))
    drawing.arrow((442, 55), (588, 88))
    drawing.arrow((442, 145), (588, 112))
    drawing.words(244, 50, "bytes", "middle")
    drawing.words(515, 48, "full[0]", "middle")
    drawing.words(515, 166, "full[1]", "middle")
    drawing.arrow((664, 132), (664, 190), (96, 190), (96, 132), dashed=True)
    drawing.words(380, 184, "empty[stage]: every warp that read it has arrived", "middle")
    return drawing


def backward() -> Drawing:
    """What a block of keys does in the backward of both CUDA families."""
    drawing = Drawing(
        900, 330, "A block of keys goes through the queries; dK and dV stay, dQ is added up"
    )
    drawing.box(16, 60, 120, 44, "K, V of the block", "copy")
    drawing.box(16, 170, 120, 60, "Q, dO, LSE,\ndelta of step m", "copy")
    drawing.box(210, 40, 150, 44, "Sᵀ = K Qᵀ", "product")
    drawing.box(210, 200, 150, 44, "dPᵀ = V dOᵀ", "product")
    drawing.box(420, 40, 170, 44, "Pᵀ = exp(Sᵀ − LSE)", "softmax")
    drawing.box(420, 200, 170, 44, "dSᵀ = Pᵀ ∘ (dPᵀ − delta)", "softmax")
    drawing.box(680, 40, 200, 44, "dV += Pᵀ dO", "state")
    drawing.box(680, 150, 200, 44, "dK += dSᵀ Q", "state")
    drawing.box(680, 250, 200, 44, "dQ(m) = dS K", "product")
    drawing.arrow((138, 76), (208, 62))
    drawing.arrow((138, 186), (208, 76))
    drawing.arrow((138, 92), (208, 210))
    drawing.arrow((138, 212), (208, 222))
    drawing.arrow((362, 62), (418, 62))
    drawing.arrow((362, 222), (418, 222))
    drawing.arrow((505, 86), (505, 198))
    drawing.arrow((592, 62), (678, 62))
    drawing.arrow((592, 214), (678, 176))
    drawing.arrow((592, 230), (678, 268))
    drawing.words(780, 104, "registers, to the end", "middle")
    drawing.words(780, 212, "registers, to the end", "middle")
    drawing.words(780, 314, "added to sums in the workspace", "middle")
    drawing.words(16, 300, "m = first to last block of queries that sees the keys,")
    drawing.words(16, 316, "of every query head that shares them")
    return drawing


def wgmma_backward() -> Drawing:
    """One step of a consumer of the wgmma backward."""
    drawing = Drawing(930, 200, "A consumer's products wait for nothing from dQ to the next S")
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
            (5.4, 9, "adds dQ(m−1) in memory", "copy"),
            (11, 13, "P(m+1)", "softmax"),
        ],
        "the other's products": [
            (0, 1.6, "dV, dK", "product"),
            (1.6, 3.6, "S", "product"),
            (3.6, 5.6, "dP", "product"),
            (9.2, 13, "dQ, dV, dK", "product"),
        ],
    }
    _lanes(drawing, lanes, 58)
    return drawing


def triton_keys() -> Drawing:
    """How the Triton forward divides the keys of a block of queries."""
    drawing = Drawing(860, 190, "First the keys that all rows see, then those that need a mask")
    drawing.words(8, 66, "keys")
    x = 60
    for width, says, tone in (
        (120, "not seen", "quiet"),
        (130, "window's edge", "softmax"),
        (290, "seen by every row", "product"),
        (110, "diagonal", "softmax"),
        (110, "not seen", "quiet"),
    ):
        drawing.box(x, 42, width - 4, 40, says, tone)
        x += width
    drawing.arrow((314, 104), (596, 104))
    drawing.words(455, 122, "loop 1: no mask, no comparison", "middle")
    drawing.arrow((184, 142), (306, 142))
    drawing.arrow((602, 142), (706, 142))
    drawing.line((308, 142), (598, 142))
    drawing.words(455, 162, "loop 2: the rest in one loop that jumps over the gap", "middle")
    for place, says in ((180, "start"), (310, "unmasked"), (600, "masked"), (710, "stop")):
        drawing.words(place, 32, says, "middle")
    return drawing


def triton_backward() -> Drawing:
    """The two kernels of the Triton backward."""
    drawing = Drawing(760, 250, "One kernel owns rows of the scores, the other columns")
    kernels = ((60, "first kernel: dQ, delta", True), (430, "second: dK, dV", False))
    for left, title, own_row in kernels:
        drawing.words(left + 120, 22, title, "middle")
        for i in range(4):
            for j in range(5):
                mine = i == 1 if own_row else j == 3
                tone = "product" if mine else "quiet"
                drawing.box(left + 48 * j, 34 + 44 * i, 45, 41, "", tone)
        if own_row:
            drawing.arrow((left + 8, 34 + 44 + 20), (left + 232, 34 + 44 + 20))
        else:
            drawing.arrow((left + 48 * 3 + 22, 42), (left + 48 * 3 + 22, 202))
    drawing.words(16, 104, "rows")
    drawing.words(180, 232, "writes its own rows of dQ", "middle")
    drawing.words(550, 232, "writes its own keys' dK, dV", "middle")
    return drawing


def delta_chunks() -> Drawing:
    """Which kernels of the gated delta rule go through chunks all at once, and which in order."""
    drawing = Drawing(
        860, 352, "Chunks are prepared all at once; only a state passes from one to the next"
    )
    rows = (
        ("chunk", "all at once", "T D, P", "product"),
        ("chain", "in order", "S, U, out", "state"),
        ("reverse", "in order, back", "dS, dU, dV", "state"),
        ("squares", "all at once", "dP, dA, dβ", "product"),
        ("rows", "all at once", "dQ, dK, dG", "product"),
    )
    for row, (kernel, how, says, tone) in enumerate(rows):
        y = 34 + 58 * row
        drawing.words(8, y + 16, kernel)
        drawing.words(8, y + 33, how)
        for chunk in range(5):
            drawing.box(130 + 146 * chunk, y, 112, 40, says, tone)
            if tone == "state" and chunk < 4:
                ends = [(130 + 146 * chunk + 114, y + 20), (130 + 146 * (chunk + 1) - 2, y + 20)]
                drawing.arrow(*(ends if kernel == "chain" else reversed(ends)))
    for chunk in range(5):
        drawing.words(186 + 146 * chunk, 22, f"64 tokens ({chunk})", "middle")
    drawing.line((8, 141), (850, 141))
    drawing.words(
        130, 342, "a forward is what is above the line; a backward is all five, without out"
    )
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
