"""Draws the pictures of docs/kernels: ``python docs/draw_kernels.py [--folder F] [--format png] [kernel...]``.

One vocabulary for all of them, in draw_shapes.py: boxes in a color for each kind of work, lanes with time running to
the right, arrows for barriers and data, grids of blocks. The kernels for the gradients of attention are in
draw_backward_kernels.py.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from draw_backward_kernels import PICTURES as BACKWARD_PICTURES  # noqa: E402
from draw_shapes import Box, Lanes, Picture  # noqa: E402

FOLDER = HERE / "pictures" / "kernels"


# ------------------------------------------------------------------------------------------------------- products
def gemm_sm90() -> Picture:
    p = Picture(60, "gemm_sm90: C = alpha A @ B + beta C on Hopper's tensor cores")
    p.prose(
        4,
        "Block rows of A that have many columns in common share a tile of C. Here: blocks of 64 rows, two to a group.",
    )
    rows = ["x.x..x.x..x.", ".y..y.y..y.y", "x.x..x..x.x.", ".y.y..y..y.y"]
    for i in range(4):
        p.text(1, 8.6 + 1.5 * i, f"row {i}")
    p.text(14, 6.4, "A", at="center")
    p.grid(5, 7.85, rows, 1.5, {"x": "multiply", "y": "sum"})
    p.arrow((23.6, 10.85), (29, 10.85))
    p.text(26.3, 9.6, "matched", at="center", size=8)
    for group, (columns, upper, lower, kind) in enumerate(
        [((0, 2, 5, 7, 8, 10), "xxxx.x", "xxx.xx", "multiply"), ((1, 3, 4, 6, 9, 11), "y.yyyy", "yy.yyy", "sum")]
    ):
        y = 7.4 + 6 * group
        for i, column in enumerate(columns):
            p.text(38.9 + 1.8 * i, y - 0.9, str(column), at="center", size=8)
        p.text(29.6, y + 0.8, f"tile 0: row {group}", size=8)
        p.text(29.6, y + 2.4, f"tile 1: row {group + 2}", size=8)
        p.grid(38, y, [upper, lower], 1.8, {"x": kind, "y": kind}, high=1.6)
        if group == 0:
            tops = [p.box(56, y + 1.6 * w, 18, 1.6, f"warpgroup {w}: 64 x 256 of C", "store", size=8) for w in range(2)]
            p.arrow((48.8, y + 0.8), tops[0].left)
            p.arrow((48.8, y + 2.4), tops[1].left)
        else:
            p.text(50.5, y + 1.6, "entries: the union of the columns,\nwith the block of each row tile or -1", size=8)

    p.prose(
        20.2, "One CTA over time, for the upper group (K = 64: an entry is one stage; a ring of 4 stages, 64 k each)."
    )
    names = ["feed_b (warp 8)", "feed_a (warp 9)", "warpgroup 0", "warpgroup 1", "copy engine"]
    lanes = Lanes(p, 21.6, names, step=3.8, gaps=[(2, 3), (4, 1.6)])
    a: dict[int, Box] = {}
    lanes.do(0, 0, 6, "claim", "look", size=8)
    b_times = (6, 17, 21.5, 26, 30.5, 37, 46, 55, 59.5, 64, 80)
    a_times = (9, 20, 24.5, 29, 33.5, 38, 46, 55, 59.5, 64, 80)
    for e, (b_start, a_start) in enumerate(zip(b_times, a_times, strict=True)):
        name = f"{e}" if e < 6 else f"{e - 6}'"
        lanes.do(0, b_start, b_start + 4.5, f"B{name}", "load")
        a[e] = lanes.do(1, a_start, a_start + 4.5, f"A{name}", "load")
    lanes.do(0, 10.5, 17, "claim", "look", size=8)
    for start, stop in ((35, 37), (41.5, 46), (50.5, 55), (68.5, 80)):
        lanes.do(0, start, stop, "", "wait")
        if start > 35:
            lanes.do(1, start + (1 if start < 45 else 0), stop, "", "wait")
    lanes.do(1, 0, 9, "wait", "wait")
    lanes.do(1, 13.5, 20, "list", "look", size=8)
    for w in range(2):
        lanes.do(2 + w, 0, 18, "wait", "wait")
        for i, e in enumerate((0, 1, 2, 4 if w else 3, 5)):
            lanes.do(2 + w, 18 + 9 * i, 27 + 9 * i, f"e{e}", "multiply")
        lanes.do(2 + w, 63, 70, "to\nC", "store", size=8)
        for i in range(3):
            lanes.do(2 + w, 70 + 9 * i, 79 + 9 * i, f"e{i}'", "multiply")
    spans = ((64, 72, "slabs\n0, 1"), (74, 82, "slab\n2"), (84, 92, "slab\n3"))
    slabs = [lanes.do(4, start, stop, text, "store", size=8) for start, stop, text in spans]
    high = lanes.tops[2] + 0.4
    p.arrow(a[0].below(0.5), (lanes.x(19), high))
    p.text(lanes.x(12.5), 30.8, "full[0]: A0, B0 are there", at="right", size=8)
    p.arrow((lanes.x(27), high), a[4].below(0.5), dashed=True)
    p.text(lanes.x(35), 30.8, "empty[0]: both warpgroups are through with e0", size=8)
    p.arrow((lanes.x(66.5), lanes.tops[3] + 3.4), slabs[0].above(0.3))
    p.prose(
        47.8,
        "e3: row tile 1 lacks the block, and warpgroup 1 sits the stage out; e4: warpgroup 0 does. Nothing is "
        "multiplied by zero. full: the bytes of A and of B have arrived. empty: all eight multiplying warps are "
        "through with the stage. claim: the next tile is taken with an atomic, a tile ahead. Half of C waits as "
        "16-bit words in registers, and leaves slab by slab (64 columns) while the next tile (') is multiplied. "
        "Row tiles of 16 and 32 rows: each of four warps feeds every fourth stage, and A goes from shared memory "
        "through registers.",
    )
    p.legend(58.2)
    return p


def gemm_sm80() -> Picture:
    p = Picture(45.5, "gemm_sm80: C = alpha A @ B + beta C by cp.async and mma.sync")
    p.prose(4, "A tile of 128 x 256, row tiles of 32 rows: warps w and w + 4, of one scheduler, own all of them.")
    colors = ["load", "softmax", "sum", "look"]
    for w in range(8):
        x, y = 12 + 11 * (w % 4), 6.5 + 4.8 * (w // 4)
        p.box(x, y, 11, 4.8, f"warp {w}\n64 x 64", colors[w % 4], legend=False)
    for s in range(4):
        p.text(11.2, 7.7 + 2.4 * s, f"row tile {s}", at="right")
    p.text(58, 9, "A warp skips a row tile that\nlacks the block: nothing\nis multiplied by zero.", size=8)
    p.text(58, 13.6, "B's fragments serve all\nrow tiles of the warp.", size=8)
    p.text(1, 18.4, "One CTA over time: a stage is 128 bytes of k; a ring of 3 stages, two of them under way.")
    lanes = Lanes(p, 20, ["warps 0 to 3", "warps 4 to 7", "ring, stage 0", "ring, stage 1", "ring, stage 2"], step=3.6)
    for i in range(4):
        t = 20 + 20 * i
        lanes.mark(t, 0, 4)
        lanes.do(0, t + 0.6, t + 7, f"copy {i + 2}", "load", size=8)
        lanes.do(0, t + 7, t + 18.4, f"multiply {i}", "multiply")
        lanes.do(1, t + 0.6, t + 12, f"multiply {i}", "multiply")
        lanes.do(1, t + 12, t + 18.4, f"copy {i + 2}", "load", size=8)
    for lane in range(2):
        lanes.do(lane, 0, 8, "indices", "look", size=8)
        lanes.do(lane, 8, 18.4, "copy 0, 1", "load")
    for stage in range(6):
        start = 8 if stage < 2 else 0.6 + 20 * (stage - 1)
        used = 20 + 20 * stage
        if start < 98:
            lanes.do(2 + stage % 3, start, min(used - 0.4, 98), f"arrives: {stage}", "wait", size=8)
        if used < 98:
            lanes.do(2 + stage % 3, used + 0.6, used + 18.4, f"read: {stage}", "plain", size=8)
    p.prose(
        39.6,
        "Dashed: copy_wait and __syncthreads, once a stage. Half of the warps copy before their products, half "
        "after them, so that each scheduler always has products. Indices come by cp.async too, kAhead entries "
        "ahead.",
    )
    p.legend(43.8)
    return p


def gemm_simt() -> Picture:
    p = Picture(29, "gemm_simt: any block, any element type, on the plain cores")
    p.text(16, 4.2, "a block of A (R x K)", at="center")
    p.grid(8, 5.6, ["........"] * 8, 2, {})
    for r in range(8):
        p.box(14, 5.6 + 2 * r, 2, 2, kind="load", legend=False)
    p.text(7.4, 13.6, "kRows\nrows", at="right", size=8)
    p.text(15, 23.4, "column k: every lane reads\nthe same value (broadcast)", at="center", size=8)
    p.text(52, 4.2, "row k of the block's panel of B", at="center")
    for n in range(4):
        p.box(30 + 11 * n, 5.6, 11, 2.4, "32 lanes", "load")
    p.text(52, 9.2, "lane l has columns l, l + 32, l + 64, l + 96: kCols of them", at="center", size=8)
    for n in range(4):
        p.box(30 + 11 * n, 11, 11, 10.6, "8 sums\na thread", "sum")
    p.arrow((24.6, 16.3), (29.4, 16.3))
    p.arrow((35.5, 8.2), (35.5, 10.8))
    p.prose(
        22.9,
        "kRows x kCols sums of a thread in registers: 12 loads for 32 products. In the end alpha times the sum plus "
        "beta times C, element by element.",
        x=30,
        size=8,
    )
    p.legend(27)
    return p


def spmv() -> Picture:
    p = Picture(30, "spmv: y = alpha A @ x + beta y, lanes share a block row")
    p.prose(4.2, "A block row of 3 x 3 blocks: 16 lanes, each with every 16th (block, column) pair and all rows of it.")
    for block in range(6):
        x = 8 + 10.8 * block
        p.text(x + 4.5, 6.6, f"block {block}", at="center", size=8)
        for c in range(3):
            pair = 3 * block + c
            second = pair >= 16
            p.box(x + 3 * c, 8, 3, 2.2, str(pair % 16), "softmax" if second else "load", legend=False)
            for r in range(1, 3):
                p.box(x + 3 * c, 8 + 2.2 * r, 3, 2.2, kind="softmax" if second else "load", legend=False)
    p.text(7.2, 9.1, "lane", at="right", size=8)
    p.box(8, 16.4, 63, 2.2, "x[col[p] * K + c]: one value for each pair, used for all rows", "plain")
    p.arrow((39.5, 14.7), (39.5, 16.3))
    for r in range(3):
        tree = p.box(
            8 + 21.6 * r, 20.2, 19.8, 3.2, f"row {r}: sum over 16 lanes,\none fixed tree of shuffles", "sum", size=8
        )
        p.arrow((tree.top[0], 18.7), tree.top)
        p.arrow(tree.bottom, (tree.bottom[0], 24.9))
    p.box(8, 25, 63, 2, "y: lane r writes row r", "store", legend=False)
    p.text(1, 28.6, "Blue: the first turn of the lanes; orange: the second.", size=8)
    return p


def spmv_small() -> Picture:
    p = Picture(63.5, "spmv_small: y = alpha A @ x + beta y, blocks of up to 16 x 16")
    p.prose(4.2, "A row of 27 blocks, 4 x 4 in float64: 16 lanes, two blocks side by side, 2 by 4 lanes to a block.")
    for block in range(2):
        x = 8 + 32.6 * block
        p.text(x + 15, 6.8, f"block {block}", at="center", size=8)
        for r, c in itertools.product(range(4), range(4)):
            lane = block * 8 + 4 * (r % 2) + c
            p.box(x + 7.5 * c, 8 + 2.2 * r, 7.5, 2.2, str(lane), "softmax" if r >= 2 else "load", legend=False)
    p.text(7.2, 9.1, "lane", at="right", size=8)
    p.box(8, 18.6, 62.6, 2.2, "x[col[p] * K + k]: 8 bytes for each lane, used for both its rows", "plain")
    p.arrow((39.3, 16.9), (39.3, 18.5))
    for r in range(4):
        tree = p.box(8 + 16.2 * r, 22.4, 14, 3.2, f"row {r}: blocks,\nthen columns", "sum", size=8)
        p.arrow((tree.top[0], 20.9), tree.top)
        p.arrow(tree.bottom, (tree.bottom[0], 26.9))
    p.box(8, 27, 62.6, 2, "y: one lane for each row writes", "store", legend=False)
    p.text(1, 30.2, "Blue: the first row of a lane; orange: its second. A lane reads 8 bytes of a row.", size=8)
    p.prose(33, "A row of 1000 blocks comes after all others, as four pieces for four warps of any CTAs.")
    for piece in range(4):
        stop = min(256 * piece + 256, 1000) - 1
        box = p.box(8 + 16.2 * piece, 34.6, 14, 3.4, f"a warp: blocks\n{256 * piece} to {stop}", "load", legend=False)
        p.arrow(box.bottom, (box.bottom[0], 39.5))
    p.box(8, 39.6, 62.6, 2, "partial: R sums of each piece", "sum", legend=False)
    p.text(
        1,
        43,
        "The warp that comes last adds the pieces, all its lanes together, in one fixed tree, and writes y.",
        size=8,
    )
    p.text(1, 46.2, "Short rows, and blocks of up to 100 bytes (kEager, kInChunks): the lanes of a row, row by row.")
    lanes = Lanes(p, 47.6, ["row 0", "row 1", "row 2", "row 3"], left=8, step=2.8)
    lanes.do(0, 0, 8, "bounds", "look", size=8)
    lanes.do(1, 8, 16, "bounds", "look", size=8)
    lanes.do(0, 16, 25, "columns", "look", size=8)
    for i in range(2):
        t = 26 + 37 * i
        lanes.mark(t - 0.5, 0, 3)
        lanes.do(i + 1, t, t + 9, "columns", "look", size=8)
        lanes.do(i + 2, t + 9, t + 17, "bounds", "look", size=8)
        lanes.do(i, t + 17, t + 28, "values, x", "load", size=8)
        lanes.do(i, t + 28, t + 36, "sums, y", "multiply", size=8)
    p.text(
        1,
        60.2,
        "Columns are asked for a row ahead of their values, the bounds of a row a row ahead of its columns.",
        size=8,
    )
    p.legend(62.2)
    return p


def spmm() -> Picture:
    p = Picture(27, "spmm: C = alpha A @ B + beta C, small blocks, few columns")
    p.prose(
        4.2, "A block row of 3 x 3 blocks in float64 by 16 columns: a warp, 4 groups of 8 lanes, 2 columns to a lane."
    )
    for group in range(4):
        y = 6.4 + 3.4 * group
        p.text(13, y + 1.1, f"blocks {group}, {group + 4}, ...", at="right", size=8)
        for lane in range(8):
            p.box(14 + 7 * lane, y, 7, 2.2, f"lane {8 * group + lane}", "load", legend=False, size=8)
    p.text(14, 20.2, "columns 0 and 1", size=8)
    p.text(70, 20.2, "columns 14 and 15", at="right", size=8)
    tree = p.box(14, 21.6, 56, 2, "sum over the groups: two steps of shuffles", "sum", legend=False)
    p.box(14, 24.4, 56, 2, "C: the groups share the rows", "store", legend=False)
    p.arrow(tree.bottom, (42, 24.3))
    return p


def spmm_staged() -> Picture:
    p = Picture(46, "spmm_staged: small blocks through shared memory, few columns")
    p.prose(
        4.2,
        "One warp over time, with two stages of its own (kStages). A block row of 27 blocks of 3 x 3 is one chunk. "
        "The warp has every so-many-th block row: here i, j, k, l.",
    )
    lanes = Lanes(p, 7.6, ["the warp", "stage 0", "stage 1"], left=11)
    lanes.do(0, 0, 4.5, "i", "load")
    lanes.do(0, 4.5, 9, "j", "load")
    lanes.do(0, 9, 19, "wait", "wait", size=8)
    for turn, row in enumerate("ijk"):
        t = 19 + 27 * turn
        lanes.do(0, t, t + 13, f"row {row}", "multiply", size=8)
        if turn < 2:
            lanes.do(0, t + 13, t + 17.5, "kl"[turn], "load")
        else:
            lanes.do(0, t + 13, t + 17.5, "...", "load")
        lanes.do(0, t + 17.5, t + 22, "sum", "sum", size=8)
        lanes.do(0, t + 22, t + 27, "C", "store", size=8)
        lanes.do(1 + turn % 2, t, t + 13, f"read: {row}", "plain", size=8)
    lanes.do(1, 2, 18.4, "arrives: i", "wait", size=8)
    lanes.do(2, 6.5, 45.4, "arrives: j", "wait", size=8)
    lanes.do(1, 34, 72.4, "arrives: k", "wait", size=8)
    lanes.do(2, 61, 100, "arrives: l", "wait", size=8)
    p.prose(
        19.4, "Blue letters: fetch asks for blocks and columns of that row by cp.async. Nobody waits for other warps."
    )
    p.text(1, 22.4, "A stage")
    p.box(11, 21.3, 5, 2.2, "skip", size=8)
    for block in range(4):
        p.box(16 + 9 * block, 21.3, 9, 2.2, f"A[p + {block}]" if block else "A[p]", "load", size=8)
    p.text(53.2, 22.4, "...", size=8)
    p.box(56, 21.3, 18, 2.2, "columns of the blocks", "look", size=8)
    p.text(11, 24.8, "from the last multiple of 16 bytes before block p on, 16 bytes to a lane", size=8)

    p.prose(27.6, "Products in float64 by 16 columns: 4 groups of 8 lanes, 2 columns of B and C to a lane.")
    for group in range(4):
        y = 29 + 2.6 * group
        p.text(13, y + 1.1, f"blocks {group}, {group + 4}, ...", at="right", size=8)
        for lane in range(8):
            p.box(14 + 7 * lane, y, 7, 2.2, f"lane {8 * group + lane}", "multiply", size=8)
    p.text(14, 40, "columns 0 and 1", size=8)
    p.text(42, 40, "then: sum over the groups by shuffles; they share the rows of C", at="center", size=8)
    p.text(70, 40, "14 and 15", at="right", size=8)
    p.prose(
        41.8, "A value of A is read by a group at once (a broadcast), 16 bytes of B serve three rows of sums.", size=8
    )
    p.legend(44.4)
    return p


def spmm_f64() -> Picture:
    p = Picture(48.6, "spmm_f64: float64 blocks on the tensor cores, few columns")
    p.prose(
        4.2,
        "Blocks of 6 x 6 by 16 columns, a warp to a block row. An instruction takes 8 rows and 4 of K, which runs on "
        "from block to block: three steps under way are two blocks.",
    )
    p.text(1, 15.8, "A, from\nmemory", size=8)
    for block in range(2):
        p.text(15.5 + 13.2 * block, 9, f"block {block}", at="center", size=8)
    kinds = ("load", "softmax", "sum")
    for r, k in itertools.product(range(8), range(12)):
        kind = kinds[k // 4] if r < 6 else "absent"
        p.box(8.9 + 2.2 * k, 10.2 + 1.6 * r, 2.2, 1.6, kind=kind, legend=False)
    p.line((22.1, 8.4), (22.1, 10.2))
    for step in range(3):
        p.text(13.3 + 8.8 * step, 24.2, f"step {step}", at="center", size=8)
    p.text(8.9, 26, "dotted: rows that the block has not", size=8)
    p.text(39, 9, "B, from memory: row 4 s + d of K, columns", size=8)
    for k in range(12):
        y = 10.2 + 1.07 * k
        for n in range(16):
            kind = "plain" if n % 2 else kinds[k // 4]
            p.box(39 + 2.15 * n, y, 2.15, 1.07, kind=kind, legend=False)
    for n in (0, 1, 2, 3):
        p.text(40.1 + 2.15 * n, 24.2, str(n), at="center", size=8)
    p.text(49, 24.2, "...", size=8)
    p.text(72.3, 24.2, "15", at="center", size=8)
    p.text(39, 26, "even columns: one instruction; odd ones: the other", size=8)

    p.text(1, 29, "In each step", bold=True)
    p.text(1, 30.4, "lane 4 a + d reads", size=8)
    column = p.box(1, 36.6, 16, 3.6, "the column of the block\nthat the step is in", "look", size=8, legend=False)
    a = p.box(22, 31.6, 16, 3.6, "A: row a, element d\nof the step", "load", size=8, legend=False)
    b = p.box(22, 36.6, 16, 3.6, "B: columns 2 a and\n2 a + 1 of row d", "load", size=8, legend=False)
    p.arrow(column.right, b.left)
    first = p.box(41.5, 31.6, 12.5, 3.6, "mma_f64:\ncolumns 2 a", "multiply", size=8, legend=False)
    second = p.box(41.5, 36.6, 12.5, 3.6, "mma_f64:\ncolumns 2 a + 1", "multiply", size=8, legend=False)
    for start in (a, b):
        p.arrow(start.right, first.left)
        p.arrow(start.right, second.left)
    sums = p.box(
        57,
        32.9,
        17.5,
        6,
        "sums: row a, columns\n4 d, 4 d + 1, 4 d + 2,\n4 d + 3: 32 bytes of C",
        "store",
        size=8,
        legend=False,
    )
    p.arrow(first.right, (sums.x, 34.4))
    p.arrow(second.right, (sums.x, 37.4))
    p.prose(
        44.8,
        "The instruction leaves a lane columns 2 d and 2 d + 1 of its eight: of the even ones 4 d and 4 d + 2, of the "
        "odd ones 4 d + 1 and 4 d + 3. They are neighbours in C, no sum crosses lanes.",
        size=8,
    )
    return p


def spgemm_pattern() -> Picture:
    p = Picture(54.5, "spgemm_pattern: which blocks meet in A @ B, for BSR matrices A and B")
    p.prose(
        4.2,
        "list_pairs: a warp has a block row. Here its blocks 4, 5 and 6 of A lie in block columns 0, 2 and 3, and meet "
        "the blocks of rows 0, 2 and 3 of B: seven pairs, 32 at a time, a lane each.",
    )
    kinds = {0: "look", 1: "softmax", 4: "sum", 6: "load"}
    met = ((4, 0, 1), (4, 1, 4), (5, 5, 0), (5, 6, 1), (5, 7, 4), (6, 8, 4), (6, 9, 6))
    for y, name in ((8.6, "block of A"), (10.8, "block of B"), (13, "its column")):
        p.text(11.4, y + 1.1, name, at="right", size=8)
    for k, pair in enumerate(met):
        for y, number in zip((8.6, 10.8, 13), pair, strict=True):
            p.box(12.4 + 4 * k, y, 4, 2.2, str(number), kinds[pair[2]], legend=False)
    p.text(44, 9.7, "4 is at column 0: row 0 of B has blocks 0 and 1", size=8)
    p.text(44, 11.9, "5 is at column 2: row 2 has 5, 6 and 7", size=8)
    p.text(44, 14.1, "6 is at column 3: row 3 has 8 and 9", size=8)

    p.text(1, 18.2, "1  count: a table in shared memory", bold=True)
    p.arrow((26.4, 15.4), (26.4, 19.9))
    slots = {0: (0, 1), 3: (1, 2), 4: (6, 1), 5: (4, 3)}
    p.text(11.4, 21.1, "keys", at="right", size=8)
    p.text(11.4, 23.3, "values", at="right", size=8)
    for slot in range(8):
        for y, part in ((20, 0), (22.2, 1)):
            text, kind = (str(slots[slot][part]), kinds[slots[slot][0]]) if slot in slots else ("", "absent")
            p.box(12.4 + 4 * slot, y, 4, 2.2, text, kind, legend=False)
    p.text(47, 21.1, "claim: the slot of a column, by a hash", size=8)
    p.text(47, 23.3, "how many pairs the column has", size=8)

    p.text(1, 27, "2  sort the columns, add up", bold=True)
    p.arrow((28.4, 24.6), (28.4, 28.7))
    p.text(11.4, 29.9, "column", at="right", size=8)
    p.text(11.4, 32.1, "start", at="right", size=8)
    for k, (column, start) in enumerate(((0, 0), (1, 1), (4, 3), (6, 6))):
        for y, number in ((28.8, column), (31, start)):
            p.box(20.4 + 4 * k, y, 4, 2.2, str(number), kinds[column], legend=False)
    p.text(47, 29.9, "of the blocks of the result", size=8)
    p.text(47, 32.1, "pairs before: now in the table, as next place", size=8)

    p.text(1, 35.8, "3  deal the pairs out", bold=True)
    p.arrow((26.4, 33.4), (26.4, 37.5))
    for y, name in ((37.6, "left"), (39.8, "right")):
        p.text(11.4, y + 1.1, name, at="right", size=8)
    for k, pair in enumerate(sorted(met, key=lambda pair: pair[2])):
        for y, number in zip((37.6, 39.8), pair[:2], strict=True):
            p.box(12.4 + 4 * k, y, 4, 2.2, str(number), kinds[pair[2]], legend=False)
    p.text(47, 38.7, "lanes with the same slot (match_any)", size=8)
    p.text(47, 40.9, "take places one after the other", size=8)

    p.text(1, 45, "The three kernels", bold=True)
    steps = (
        ("count_pairs:\npairs of each row", "look", 14.5),
        ("sum; the host\nwaits: pairs", "wait", 11.5),
        ("list_pairs:\nas above", "look", 11),
        ("sum; the host\nwaits: columns", "wait", 11.5),
        ("pack_columns: rows one\nafter the other", "store", 18.5),
    )
    x = 1.0
    for i, (text, kind, wide) in enumerate(steps):
        box = p.box(x, 46.4, wide, 3.6, text, kind, size=8, legend=False)
        if i:
            p.arrow((x - 1.5, 48.2), box.left)
        x += wide + 1.5
    p.prose(
        52.2,
        "The columns of a row wait after the pairs of the rows before, until it is known how many columns these have.",
        size=8,
    )
    return p


def spgemm_simt() -> Picture:
    p = Picture(22, "spgemm_simt: the blocks of A @ B for BSR matrices A and B")
    p.prose(
        4.2,
        "Which blocks meet was found before (spgemm_pattern.cu): pairs in order, grouped by the block of the result.",
    )
    p.text(12, 6.8, "ia", at="right")
    p.text(12, 9, "ib", at="right")
    ia, ib, parts = (0, 1, 3, 0, 2, 2, 4), (5, 0, 2, 6, 1, 3, 4), ("look",) * 3 + ("softmax",) * 2 + ("sum",) * 2
    for i, (a, b, kind) in enumerate(zip(ia, ib, parts, strict=True)):
        p.box(13 + 4 * i, 5.7, 4, 2.2, str(a), kind, legend=False)
        p.box(13 + 4 * i, 7.9, 4, 2.2, str(b), kind, legend=False)
    for s, (x, w) in enumerate(((13, 12), (25, 8), (33, 8))):
        p.text(x + w / 2, 11.4, f"segment {s}", at="center", size=8)
    p.text(44, 7.9, "starts = 0, 3, 5", size=8)
    p.text(1, 14.4, "Segment 0:")
    p.box(9, 15.6, 9, 5, "a[0] @ b[5]", "multiply")
    p.text(19.6, 18.1, "+", at="center")
    p.box(21, 15.6, 9, 5, "a[1] @ b[0]", "multiply")
    p.text(31.6, 18.1, "+", at="center")
    p.box(33, 15.6, 9, 5, "a[3] @ b[2]", "multiply")
    p.arrow((42.6, 18.1), (46.8, 18.1))
    p.grid(47.5, 15.6, ["oooo", "oooo", "oooo", "oooo"], 1.25, {"o": "store"})
    p.text(54, 18.1, "out[0]: kLanes threads, one\nelement each at a time, over\nall pairs and all j in order", size=8)
    return p


def block_products_sm90() -> Picture:
    p = Picture(45, "block_products_sm90: blocks of a product on Hopper's tensor cores")
    p.prose(
        4,
        "Two products give blocks. A tile is a block of BSR @ BSR, or neighbours in a block row of a sampled product.",
    )
    p.text(1, 8.4, "BSR @ BSR")
    for i, (a, b) in enumerate(((0, 5), (1, 0), (3, 2))):
        x = 13 + 16 * i
        p.box(x, 7, 5, 3, f"a[{a}]", "load")
        p.box(x + 6, 7, 5, 3, f"b[{b}]", "load")
        if i:
            p.text(x - 2.6, 8.5, "+", at="center")
    p.arrow((56.6, 8.5), (61, 8.5))
    p.box(61.6, 7, 10, 3, "128 x 128", "store")
    p.text(1, 14.4, "sampled")
    p.box(13, 13, 12, 3, "rows of X", "load")
    p.box(27, 13, 12, 3, "columns of Y", "load")
    p.box(39.6, 13, 12, 3, "others of Y", "load")
    p.arrow((52.4, 14.5), (61, 14.5))
    p.box(61.6, 13, 10, 3, "128 x 256", "store")

    p.prose(19.4, "One CTA over time, with tiles of 128 x 128: the two warpgroups take turns.")
    lanes = Lanes(
        p, 20.8, ["schedule (warp 9)", "feed (warp 8)", "warpgroup 0", "warpgroup 1"], step=3.8, gaps=[(2, 1.8)]
    )
    for start in (0, 8, 30, 56):
        lanes.do(0, start, start + 7, "claim", "look", size=8)
    loads = [lanes.do(1, 9 + 6 * i, 15 + 6 * i, f"{i % 4}{chr(39) * (i // 4)}", "load") for i in range(12)]
    lanes.do(2, 0, 16, "wait", "wait")
    lanes.do(2, 16, 40, "multiply 0 .. 3", "multiply")
    lanes.do(2, 40, 56, "out", "store")
    lanes.do(2, 56, 66, "wait", "wait")
    lanes.do(2, 66, 90, "multiply 0'' .. 3''", "multiply")
    lanes.do(2, 90, 100, "out", "store")
    lanes.do(3, 0, 41, "wait", "wait")
    turn = lanes.do(3, 41, 65, "multiply 0' .. 3'", "multiply")
    lanes.do(3, 65, 81, "out", "store")
    p.arrow(loads[0].below(0.5), (lanes.x(16.5), lanes.tops[2] + 0.4))
    p.arrow((lanes.x(40), lanes.tops[2] + 3.4), turn.above(0.02))
    p.prose(
        39.2,
        "A number is a stage: 64 of K. turn: a warpgroup may wait for stages only when the other one has met all those "
        "of the tile before. Tiles of 128 x 256 are shared by both, 64 rows each.",
    )
    p.legend(43.6)
    return p


def block_products_sm80() -> Picture:
    p = Picture(54, "block_products_sm80: blocks of a product by cp.async and mma.sync")
    p.prose(
        4, "BSR @ BSR: a CTA has a block of the result, or a piece of a large one, and walks over its pairs in order."
    )
    for i, (a, b) in enumerate(((0, 5), (1, 0), (3, 2))):
        x = 9 + 16 * i
        p.box(x, 6, 5, 3, f"a[{a}]", "load")
        p.box(x + 6, 6, 5, 3, f"b[{b}]", "load")
        if i:
            p.text(x - 2.6, 7.5, "+", at="center")
    p.arrow((53, 7.5), (61, 7.5))
    p.box(61.6, 6, 10, 3, "64 x 64", "store")
    p.prose(
        12,
        "Sampled: a CTA for each block of the pattern; every kParts-th of a block row has neighbours with it. Here: "
        "blocks of 32 x 32, seven in a block row, kParts = 4.",
    )
    p.arrow(p.box(1, 18, 11, 3, "rows of X", "load").right, (14.9, 19.5))
    for j in range(7):
        left = 15 + 8.2 * j
        if j in (0, 4):
            p.box(left, 14.9, 8.2, 2, f"CTA {j}", "look", legend=False)
        else:
            p.box(left, 14.9, 8.2, 2, f"CTA {j}", "wait", size=8, legend=False)
        p.box(left, 18, 8.2, 3, f"of Y: {(1, 2, 5, 6, 8, 11, 12)[j]}", "load", size=8)
    for first, count in ((0, 4), (4, 3)):
        left = 15 + 8.2 * first
        p.arrow((left + 4.1, 16.9), (left + 4.1, 17.9))
        box = p.box(left, 22.6, 8.2 * count, 2.4, f"32 x {32 * count} of the result", "store")
        p.arrow((box.top[0], 21.1), box.top)
    p.text(15, 26.4, "CTAs 1, 2, 3, 5 and 6 find that they do not come first, and return.", size=8)
    p.text(1, 29.4, "One CTA over time: a stage is 128 bytes of k; a ring of 4 stages, three of them under way.")
    lanes = Lanes(p, 31, ["all warps", *(f"ring, stage {i}" for i in range(4))], step=3.4)
    lanes.do(0, 0, 7, "pairs", "look", size=8)
    lanes.do(0, 7, 20, "copy 0, 1, 2", "load", size=8)
    for i in range(4):
        t = 22 + 19 * i
        lanes.mark(t, 0, 4)
        lanes.do(0, t + 0.6, t + 7, f"copy {i + 3}", "load", size=8)
        lanes.do(0, t + 7, t + 18.4, f"multiply {i}", "multiply", size=8)
    for stage in range(7):
        start = 7 if stage < 3 else 22.6 + 19 * (stage - 3)
        used = 22 + 19 * stage
        if start < 98:
            lanes.do(1 + stage % 4, start, min(used - 0.4, 98), f"arrives: {stage}", "wait", size=8)
        if used < 98:
            lanes.do(1 + stage % 4, used + 0.6, used + 18.4, f"read: {stage}", "plain", size=8)
    p.prose(
        49.2,
        "Dashed: copy_wait and __syncthreads, once a stage. Stages go on from one pair to the next without a break; "
        "the numbers of a pair are read while the one before is copied.",
    )
    p.legend(52.8)
    return p


def segment() -> Picture:
    p = Picture(31, "segment: reductions over segments of rows")
    p.prose(4.2, "Short segments: kLanes = 1. A thread has one column of one segment, and goes strictly left to right.")
    order = (4, 0, 2, 1, 3, 7, 5, 6)
    p.text(11.5, 7.1, "order[k]", at="right")
    kinds = ("look",) * 3 + ("softmax",) * 1 + ("sum",) * 4
    for i, (row, kind) in enumerate(zip(order, kinds, strict=True)):
        p.box(12.5 + 4 * i, 6, 4, 2.2, str(row), kind, legend=False)
    p.text(11.5, 10.5, "values[order[k], :]", at="right", size=8)
    for i, kind in enumerate(kinds):
        for column in range(4):
            p.box(12.5 + 4 * i + column, 9.4, 1, 2.2, kind=kind, legend=False)
    for x, w, s in ((12.5, 12, 0), (24.5, 4, 1), (28.5, 16, 2)):
        p.arrow((x + w / 2, 11.8), (x + w / 2, 13.6))
        for column in range(4):
            p.box(x + w / 2 - 2 + column, 13.8, 1, 2.2, kind="store", legend=False)
        p.text(x + w / 2, 17.2, f"out[{s}]", at="center", size=8)
    p.text(48, 7.1, "segments 0, 1 and 2 (starts = 0, 3, 4)", size=8)
    p.text(48, 10.5, "kColumns threads, one for each column", size=8)
    p.text(1, 20, "Long segments (32 rows or more on average): kLanes = 32. A warp has one column of one segment.")
    for lane in range(8):
        p.box(9 + 5.6 * lane, 21.8, 5.6, 2.2, f"lane {lane}" if lane < 7 else "...", "load", size=8, legend=False)
    p.text(56, 22.9, "lane l takes rows l, l + 32...", size=8)
    p.box(
        9,
        25.4,
        44.8,
        2.2,
        "shuffles, a fixed tree; the lower lane's value is the left one",
        "sum",
        size=8,
        legend=False,
    )
    for lane in range(8):
        p.arrow((11.8 + 5.6 * lane, 24.1), (11.8 + 5.6 * lane, 25.3))
    p.arrow((53.9, 26.5), (57.4, 26.5))
    p.box(57.5, 25.4, 6, 2.2, "out[s]", "store", size=8, legend=False)
    p.text(1, 29.4, "Operations: sum (of bool: or), maximum, minimum, and both without NaN (fmax, fmin).", size=8)
    return p


def expand() -> Picture:
    p = Picture(19.5, "expand: the row of every entry of a compressed index")
    indptr, cell = (0, 3, 3, 7, 12, 16), 3.4
    p.text(12, 5.3, "indptr", at="right")
    for i, start in enumerate(indptr):
        p.box(13 + cell * i, 4.2, cell, 2.2, str(start), "look", legend=False)
    p.text(12, 11.1, "entry e", at="right", size=8)
    p.text(12, 13.1, "out[e]", at="right")
    rows = [i for i in range(5) for _ in range(indptr[i + 1] - indptr[i])]
    for e, row in enumerate(rows):
        p.text(13 + cell * (e + 0.5), 11.1, str(e), at="center", size=8)
        p.box(13 + cell * e, 12, cell, 2.2, str(row), "load" if e < 8 else "softmax", legend=False)
    p.arrow((13 + cell * 0.5, 6.5), (13 + cell * 0.5, 10.2))
    p.text(13 + cell * 0.8, 8.2, "thread 0 searches e = 0: row 0", size=8)
    p.arrow((13 + cell * 8.5, 6.5), (13 + cell * 8.5, 10.2))
    p.text(13 + cell * 8.8, 8.2, "thread 1 searches e = 8: row 3", size=8)
    p.prose(
        16.4,
        "A thread searches indptr once (binary), then walks on for kEntries = 8 neighbors; an empty row (here row "
        "1) is stepped over. Blue: written by thread 0; orange: by thread 1.",
        size=8,
    )
    return p


def row_matching() -> Picture:
    p = Picture(33, "row_matching: which row tiles share a group")
    p.text(1, 4.2, "1  row_bits", bold=True)
    p.text(1, 6.6, "a row of bits for each\nrow tile: its block columns", size=8)
    rows = ["x.x..x.x", ".y.yy..y", "x.x..xx.", ".y.y.y.y"]
    for i in range(4):
        p.text(2, 10 + 1.8 * i, f"tile {i}", size=8)
    p.grid(6.5, 9.1, rows, 1.5, {"x": "multiply", "y": "sum"}, high=1.8)
    p.text(24, 4.2, "2  overlaps", bold=True)
    p.text(24, 6.6, "columns that two row tiles\nshare: popc of the ands", size=8)
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            count = "-" if i == j else str(sum(a != "." and b != "." for a, b in zip(one, other, strict=True)))
            best = (i, j) in ((0, 2), (2, 0), (1, 3), (3, 1))
            p.box(25 + 3 * j, 9.1 + 1.8 * i, 3, 1.8, count, "look" if best else "plain", size=8, legend=False)
    p.text(42, 4.2, "3  match_rows", bold=True)
    p.text(42, 6.6, "pairs that are each\nother's best; the rest again", size=8)
    first = p.box(43, 9.1, 12, 2.4, "row tiles 0, 2", "multiply", legend=False)
    second = p.box(43, 13.4, 12, 2.4, "row tiles 1, 3", "sum", legend=False)
    p.text(62, 4.2, "4  again", bold=True)
    p.text(62, 6.6, "with the pairs as\nnodes, bits or-ed", size=8)
    last = p.box(62, 11.2, 12, 2.6, "0, 2, 1, 3", "store", legend=False)
    p.arrow((18.8, 12.7), (24.4, 12.7))
    p.arrow((37.4, 12.7), (42.4, 12.7))
    p.arrow(first.right, (last.x, last.y + 0.8))
    p.arrow(second.right, (last.x, last.y + 1.8))
    p.prose(
        19,
        "A CTA of overlaps has a square of 64 x 64 nodes of a window of 512, in the upper half; 32 words of bits at "
        "a time in shared memory, 4 x 4 counts a thread. The other half is written by symmetry.",
    )
    p.text(1, 23.4, "A CTA of match_rows has one window, a thread for each node. A round:")
    steps = (
        "nodes without a partner\nlook for their best",
        "best of my best is me:\nwe are partners",
        "until none is left",
    )
    boxes = [p.box(2 + 24 * i, 25, 20, 3.6, text, kind, size=8, legend=False)
             for i, (text, kind) in enumerate(zip(steps, ("look", "softmax", "plain"), strict=True))]  # fmt: skip
    p.arrow(boxes[0].right, boxes[1].left)
    p.arrow(boxes[1].right, boxes[2].left)
    p.prose(
        30.6,
        "Ties are broken by a number made of i + j and i * j, the same seen from both sides: the order is the same "
        "in every run.",
        size=8,
    )
    return p


def work_list() -> Picture:
    p = Picture(44, "work_list: the entries of groups of row tiles, and the groups by length")
    p.prose(
        4.2,
        "Two row tiles a group. Tile 0 has blocks 0, 1, 2 in columns 2, 0, 2; tile 1 has 3, 4 in 3, 2; "
        "tile 2 has 5 in 1. "
        "Block 6 lies outside.",
    )
    keys = ((0, 0, 0, 1), (0, 2, 0, 0), (0, 2, 0, 2), (0, 2, 1, 4), (0, 3, 1, 3), (1, 1, 0, 5), (2, 4, 0, 6))
    kinds = ("look", "load", "sum", "sum", "softmax", "store", "absent")
    p.text(1, 9.4, "1  row_tile_keys, sorted: those of an entry are neighbors", bold=True)
    for row, name in enumerate(("group", "column", "row tile", "block")):
        p.text(12.4, 11.9 + 2.2 * row, name, at="right", size=8)
        for i, key in enumerate(keys):
            p.box(13.4 + 5 * i, 10.8 + 2.2 * row, 5, 2.2, str(key[row]), kinds[i], size=8, legend=False)
    p.text(50, 11.9, "high bits", size=8)
    p.text(50, 18.5, "low bits: the order of duplicates", size=8)
    p.text(1, 22, "2  count_entries, fill_entries", bold=True)
    p.text(12.4, 24.5, "begins", at="right", size=8)
    p.text(12.4, 26.7, "entry", at="right", size=8)
    for i, (begins, entry) in enumerate(zip((1, 1, 1, 0, 1, 1, 1), (0, 1, 2, 2, 3, 4, 5), strict=True)):
        p.box(13.4 + 5 * i, 23.4, 5, 2.2, str(begins), "plain", size=8, legend=False)
        p.box(13.4 + 5 * i, 25.6, 5, 2.2, str(entry), kinds[i], size=8, legend=False)
    p.text(50, 24.5, "another group or column, or a duplicate", size=8)
    p.text(50, 26.7, "sum of what begins, tile by tile", size=8)
    for name, y in (("column", 31.5), ("row tile 0", 33.7), ("row tile 1", 35.9)):
        p.text(12.4, y, name, at="right", size=8)
    entries = ((0, 1, -1), (2, 0, -1), (2, 2, 4), (3, -1, 3), (1, 5, -1), (4, 6, -1), (4, -1, -1))
    for i, (numbers, kind) in enumerate(zip(entries, (*kinds[:3], *kinds[4:], "absent"), strict=True)):
        for row, number in enumerate(numbers):
            p.box(13.4 + 5 * i, 30.4 + 2.2 * row, 5, 2.2, str(number), kind, size=8, legend=False)
    p.arrow((30.9, 28), (30.9, 30.2))
    p.text(50, 31.5, "bounds of the groups: 0, 4, 5", size=8)
    p.text(50, 34.8, "columns and blocks of the work list", size=8)
    p.prose(
        39.4,
        "3  length_keys, sorted, then list_items: {group, first entry, end, -1}, the longest group first; "
        "of equal ones the first.",
    )
    return p


# ------------------------------------------------------------------------------------------------------ attention
def attention_sm90() -> Picture:
    p = Picture(70.8, "attention_sm90: O = softmax(scale Q K^T) V on Hopper's tensor cores")
    p.prose(
        4, "One CTA over time: a tile of 128 queries with 4 tiles of keys (entries 0 to 3; the diagonal cuts entry 0)."
    )
    names = ["schedule (warp 9)", "shade (warps 10, 11)", "feed (warp 8)", "group 0: products", "group 0: threads"]
    names += ["group 1: products", "group 1: threads"]
    lanes = Lanes(p, 6, names, step=3.8, left=16, gaps=[(1, 1.6), (2, 1.6), (3, 2.4), (5, 1)])
    for start, stop, text in (
        (0, 5, "tile"),
        (10, 17, "claim"),
        (17, 23, "tile'"),
        (70, 77, "claim"),
        (77, 83, "tile''"),
    ):
        lanes.do(0, start, stop, text, "look", size=8)
    lanes.do(0, 5, 10, "Q", "load", size=8)
    lanes.do(0, 23, 28, "Q'", "load", size=8)
    lanes.do(0, 28, 70, "until the next tile is wanted again", "wait", size=8)
    lanes.do(0, 83, 100, "until 0 is done", "wait", size=8)
    words = lanes.do(1, 10, 22, "words of 0", "look", size=8)
    lanes.do(1, 22, 68, "sleeps: entries 1 to 3 are seen whole", "wait", size=8)
    lanes.do(1, 68, 80, "words of 0'", "look", size=8)
    copies: dict[str, Box] = {}
    copied = ("K0", "K1", "V0", "K2", "V1", "K3", "V2", "K0'", "V3", "K1'", "V0'")
    for name, start in zip(copied, (5, 9, 13, 27, 31, 50, 54, 66, 70, 82, 86), strict=True):
        copies[name] = lanes.do(2, start, start + 4, name, "load", size=8)
    for start, stop in ((17, 27), (35, 50), (58, 66), (74, 82)):
        lanes.do(2, start, stop, "", "wait")
    products: dict[tuple[int, str], Box] = {}
    soft: dict[tuple[int, int], Box] = {}
    for g in range(2):
        lane = 3 + 2 * g
        products[g, "S0"] = lanes.do(lane, 13 + 4 * g, 17 + 4 * g, "S0", "multiply", size=8)
        soft[g, 0] = lanes.do(lane + 1, 22 + 2 * g, 28 + 3 * g, "exp 0", "softmax", size=8)
        for i, pair in enumerate((("S1", "O0"), ("S2", "O1"), ("S3", "O2"), ("S0'", "O3"))):
            t = 28 + 16 * i + 8 * g
            for j, name in enumerate(pair):
                products[g, name] = lanes.do(lane, t + 4 * j, t + 4 * j + 4, name, "multiply", size=8)
            what = f"exp {i + 1}" if i < 3 else "exp 0'"
            soft[g, i + 1] = lanes.do(lane + 1, t + 4, t + 13, what, "softmax", size=8)
    lanes.do(3, 90, 94, "S1'", "multiply", size=8)
    lanes.do(4, 90, 100, "O out", "store", size=8)
    lanes.do(5, 96, 100, "S1'", "multiply", size=8)
    p.arrow(copies["K0"].below(0.9), products[0, "S0"].above(0.3))
    p.text(lanes.x(8.6), 22.4, "k_full", at="right", size=8)
    p.arrow((lanes.x(24.5), lanes.tops[4] + 0.4), copies["K2"].below(0.2), dashed=True)
    p.text(lanes.x(28.5), 22.4, "k_empty", size=8)
    p.arrow((lanes.x(21.5), words.bottom[1]), soft[0, 0].above(0.1))
    p.text(lanes.x(23), 16.1, "shade_full", size=8)
    p.arrow(copies["K0"].above(0.6), (lanes.x(8), lanes.tops[0] + 3.4), dashed=True)
    p.text(lanes.x(9.4), 10.7, "wanted", size=8)
    p.prose(
        41.2,
        "S1 and O0 are issued together: while the weighted values of entry 0 are added to the sums, the threads "
        "take the exponentials of entry 1, and the other warpgroup's products fill the tensor cores meanwhile. At a "
        "tile's end the first scores of the next tile (') take the place of the next entry, and the result goes out "
        "while its second scores are multiplied. Dashed: k_empty (the stage may be filled again), wanted (feed asks "
        "for the next tile, kEarly entries before the end of this one, here at once).",
    )
    p.text(1, 52.6, "Shared memory", bold=True)
    x = 1.0
    for text, wide, kind in (("q: 2 tiles of queries,\nthen results", 17, "load"), ("k: 2 or 4 stages", 14, "load"),
                             ("v: 2 or 4 stages", 14, "load"), ("seen: words\nof masks", 10, "look"),
                             ("kept: sums\nof fp8", 9, "sum"), ("tiles,\nbarriers", 9, "plain")):  # fmt: skip
        p.box(x, 53.8, wide, 3.4, text, kind, size=8)
        x += wide
    p.text(1, 59.4, "Lazy maximum", bold=True)
    p.prose(
        61.2,
        "Entry 0 is weighted with its own maximum, later ones with the maximum so far. If the sum of the new "
        "weights is above kMostSum, the warp computes its scores again from the keys that it has not let go, raises "
        "the maximum and fades its sums.",
        size=8,
    )
    p.box(
        1, 65, 73, 2, "weigh -> too_low? -> repeat_scores, raise, weigh again (rare) -> release keys", "repair", size=8
    )
    p.legend(69)
    return p


def attention_sm80() -> Picture:
    p = Picture(42, "attention_sm80: the same by cp.async and mma.sync")
    p.prose(4, "A CTA has one tile of 128 queries. Tiles of keys and of values take turns in a ring; all threads copy.")
    names = ["a warp: copies", "a warp: works", "another warp", "ring, stage 0", "ring, stage 1", "ring, stage 2"]
    lanes = Lanes(p, 6, names, step=3.4)
    lanes.do(0, 0, 14, "Q, K0, V0", "load")
    turns = ("K0", "V0", "K1", "V1", "K2")
    ahead = ("K1", "V1", "K2", "V2", "K3")
    for i, turn in enumerate(turns):
        t = 16 + 17 * i
        lanes.mark(t, 0, 5)
        stop = min(t + 16.4, 99.6)
        lanes.do(0, t + 0.6, t + 6, ahead[i], "load")
        if turn[0] == "K":
            lanes.do(1, t + 6, stop - 5, "Q " + turn, "multiply", size=8)
            lanes.do(1, stop - 5, stop, "max", "softmax", size=8)
        else:
            lanes.do(1, t + 6, stop, "exp / " + turn, "multiply", size=8)
        if turn[1] == "1":
            lanes.do(2, t + 6, stop, "sees none", "absent", size=8)
        elif turn[0] == "K":
            lanes.do(2, t + 6, stop - 5, "Q " + turn, "multiply", size=8)
            lanes.do(2, stop - 5, stop, "max", "softmax", size=8)
        else:
            lanes.do(2, t + 6, stop, "exp / " + turn, "multiply", size=8)
        slot = 3 + i % 3
        lanes.do(slot, t + 0.6, stop, "read: " + turn, "plain", size=8)
        if i > 1:
            lanes.do(slot, t - 34 + 0.6, t - 0.4, "arrives: " + turn, "wait", size=8)
    for slot, turn in enumerate(("K0", "V0")):
        lanes.do(3 + slot, 4, 15.6 + 17 * slot, turn, "wait", size=8)
    p.prose(
        28.4, "Dashed: copy_wait and __syncthreads, once a turn; the stage of the turn before is then free for a copy."
    )
    p.text(1, 31, "Within a turn of values:", bold=True)
    p.box(1, 34.8, 14, 2.2, "exp, keys 0 to 15", "softmax", size=8)
    for i in range(4):
        p.box(15 + 14.7 * i, 32.6, 14.7, 2.2, f"products, keys {16 * i} to {16 * i + 15}", "multiply", size=8)
        if i < 3:
            p.box(15 + 14.7 * i, 34.8, 14.7, 2.2, f"exp, keys {16 * i + 16} to {16 * i + 31}", "softmax", size=8)
    p.legend(39.6)
    return p


def attention_simt() -> Picture:
    p = Picture(30, "attention_simt: any head size, dtype and strides, a warp for each query")
    p.text(
        1, 4.2, "A CTA of 8 warps walks over tiles of 128 queries; warp w has queries w, w + 8, w + 16... of the tile."
    )
    x, word = 13.0, "1110110000011111"
    p.text(12, 7.5, "keys that it sees", at="right", size=8)
    for i, bit in enumerate(word):
        p.box(x + 3.4 * i, 6.4, 3.4, 2.2, bit, "look" if bit == "1" else "absent", legend=False)
    p.text(68.2, 7.5, "...", size=8)
    p.text(12, 9.8, "(a word: 32 keys)", at="right", size=8)
    p.arrow((x + 3.4 * 1.5, 8.7), (x + 3.4 * 1.5, 11.5))
    p.text(x + 3.4 * 2, 10.1, "the next set bit: key j. A key that is not seen is not read.", size=8)
    boxes = [
        p.box(
            3, 11.7, 17, 4.4, "dot = q . k[j]\nlane l: columns l, l + 32...\nthen a sum over lanes", "multiply", size=8
        ),
        p.box(
            25,
            11.7,
            21,
            4.4,
            "score, running maximum,\nfade = exp2(top - max),\nweight = exp2(score - max)",
            "softmax",
            size=8,
        ),
        p.box(51, 11.7, 21, 4.4, "sums = sums * fade\n+ weight * v[j]\nlane l: columns l, l + 32...", "sum", size=8),
    ]
    p.arrow(boxes[0].right, boxes[1].left)
    p.arrow(boxes[1].right, boxes[2].left)
    p.line(boxes[2].bottom, (boxes[2].bottom[0], 18))
    p.line((boxes[2].bottom[0], 18), (boxes[0].bottom[0], 18))
    p.arrow((boxes[0].bottom[0], 18), boxes[0].bottom)
    p.text(36, 19.2, "next key", at="center", size=8)
    result = "out = sums / total, lse = ln 2 (top + log2 total); 0 and -inf if no key was seen"
    last = p.box(25, 21.6, 47, 2.4, result, "store", size=8)
    p.arrow((68, 16.2), (68, last.y))
    about = (
        "The function is attend_row of common/attention.cuh; the other two call it for queries that are to be done "
        "again."
    )
    p.prose(26, about, size=8)
    p.legend(28.4)
    return p


def attention_values() -> Picture:
    p = Picture(33, "attention_values: values of fp8 with their keys side by side")
    p.text(1, 4.2, "V as it lies: (keys, columns)")
    p.box(4, 6, 14, 9, "128 keys\nx 64 columns", "load")
    p.text(11.6, 16.2, "16 bytes a thread, along the columns", at="center", size=8)
    p.text(33, 4.2, "shared memory", at="center")
    p.box(26, 6, 14, 9, "tile\n128 x 65 bytes", "plain")
    p.text(33, 16.2, "a column more: no bank twice", at="center", size=8)
    p.text(58, 4.2, "as attention_sm90 wants it: (columns, keys)", at="center")
    p.box(49, 6.5, 18, 8, "64 columns\nx 128 keys", "store")
    p.text(58, 16.2, "16 bytes a thread, along the keys", at="center", size=8)
    p.arrow((18.4, 10.5), (25.6, 10.5))
    p.arrow((40.4, 10.5), (48.6, 10.5))
    p.text(21.5, 9.4, "read", at="center", size=8)
    p.text(44.5, 9.4, "sync", at="center", size=8)
    p.text(1, 21, "The order of each 16 keys (place 4 t + i has key 2 t + i, and 2 t + i + 6 for i = 2, 3):")
    p.text(10, 23.7, "place", at="right", size=8)
    p.text(10, 25.9, "key", at="right", size=8)
    kinds = ("look", "softmax", "sum", "load")
    for place in range(16):
        t, i = divmod(place, 4)
        p.text(13 + 3.6 * place, 23.7, str(place), at="center", size=8)
        p.box(11.2 + 3.6 * place, 24.8, 3.6, 2.2, str(2 * t + i + (6 if i > 1 else 0)), kinds[t], legend=False)
    p.prose(
        28.8,
        "A thread of a wgmma that has the scores of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 has four weights side by "
        "side: it packs them into one word, and no byte has to change threads.",
        size=8,
    )
    return p


def decode() -> Picture:
    p = Picture(50.5, "decode: a few queries at the end of a long cache")
    p.prose(
        4,
        "The keys of a KV head of a sequence are cut into pieces, a CTA each; tiles of 16 keys go to its warps in "
        "turn.",
    )
    kinds = ("look", "softmax", "sum", "load")
    for piece in range(3):
        x = 2 + 24 * piece
        p.text(x + 11.2, 6.4, f"piece {piece} = a CTA", at="center", size=8)
        for tile in range(8):
            p.box(x + 2.8 * tile, 7.6, 2.8, 2.2, f"w{tile % 4}", kinds[tile % 4], size=8, legend=False)
    p.prose(
        12.8, "One warp over time: a ring of its own (3 stages), no barrier with the others. c: copy, 3 steps ahead."
    )
    lanes = Lanes(p, 14.4, ["warp w", "its ring, stage 0", "its ring, stage 1", "its ring, stage 2"])
    lanes.do(0, 0, 12, "copy 0 to 2", "load", size=8)
    for i in range(4):
        t = 12 + 22 * i
        lanes.do(0, t, t + 6, "Q K", "multiply", size=8)
        lanes.do(0, t + 6, t + 8.4, "c", "load", size=8)
        lanes.do(0, t + 8.4, t + 13.6, "soft", "softmax", size=8)
        lanes.do(0, t + 13.6, t + 18.6, "w V", "multiply", size=8)
        lanes.do(0, t + 18.6, t + 21, "c", "load", size=8)
        lanes.do(1 + i % 3, t, t + 18.6, f"read: {i}", "plain", size=8)
        if i < 3:
            lanes.do(1 + i, t + 19.6, min(t + 65, 100), f"arrives: {i + 3}", "wait", size=8)
    for i in (1, 2):
        lanes.do(1 + i, 6, 11 + 22 * i, f"arrives: {i}", "wait", size=8)
    p.text(1, 29.4, "In the end, first within a CTA, then between CTAs, always in order: the same bits every time.")
    ends = [
        p.box(2, 31.2 + 2.4 * w, 17, 2.2, f"warp {w}: sums, max, total", kinds[w], size=8, legend=False)
        for w in range(4)
    ]
    cta = p.box(25, 33.4, 17, 4.8, "piece: sums scaled to\nthe common maximum", "sum", size=8)
    for end in ends:
        p.arrow(end.right, (cta.x, cta.y + cta.h * (0.2 + 0.2 * ends.index(end))))
    memory = p.box(47, 31.2, 25, 3, "partial sums in memory;\narrived += 1", "store", size=8)
    joining = "the CTA that comes last reads all\npieces, scales and adds them,\nand writes out and lse"
    last = p.box(47, 37, 25, 4.4, joining, "store", size=8)
    p.arrow(cta.right, memory.left)
    p.arrow(memory.bottom, last.top)
    p.text(25, 40, "one piece: written at once", size=8)
    p.prose(
        43.8,
        "Rows of a CTA: the query heads that share the KV head, times their queries, 16 or 32 to a tile. With "
        "pages, a tile's row comes from the table of pages; with blocks, a step's tile comes from the list of "
        "blocks.",
        size=8,
    )
    p.legend(48.4)
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "gemm_sm90": gemm_sm90,
    "gemm_sm80": gemm_sm80,
    "gemm_simt": gemm_simt,
    "spmv": spmv,
    "spmv_small": spmv_small,
    "spmm": spmm,
    "spmm_staged": spmm_staged,
    "spmm_f64": spmm_f64,
    "spgemm_pattern": spgemm_pattern,
    "spgemm_simt": spgemm_simt,
    "block_products_sm90": block_products_sm90,
    "block_products_sm80": block_products_sm80,
    "segment": segment,
    "expand": expand,
    "row_matching": row_matching,
    "work_list": work_list,
    "attention_sm90": attention_sm90,
    "attention_sm80": attention_sm80,
    "attention_simt": attention_simt,
    "attention_values": attention_values,
    **BACKWARD_PICTURES,
    "decode": decode,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", help="all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.kernels or PICTURES:
        PICTURES[name]().save(options.folder / f"{name}.{options.format}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
