"""Pictures of the kernels for products with a dense operand, for draw_kernels.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from draw_shapes import Box, Lanes, Picture


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


def gemm_turned_sm90() -> Picture:
    p = Picture(41.6, "gemm_turned_sm90: C = alpha A @ B for blocks of 48, 80, 96 or 160 rows")
    p.prose(
        4,
        "wgmma multiplies 64 rows by any 8 n columns. With the block on the left, 96 rows would take the place of 128. "
        "Here the block is on the right: the product is computed as its transpose.",
    )
    p.text(11, 9.4, "B: 96 rows, 64 columns", at="center", size=8)
    left = p.box(3, 10.4, 16, 9.6, "left operand,\nread across:\n64 x 16 of it", "load")
    p.text(23, 15.2, "x", at="center", bold=True)
    p.text(34, 9.4, "block of A: 96 x 96", at="center", size=8)
    p.box(27, 10.4, 14, 14, "right operand,\nread across:\n16 x 96 of it", "softmax", legend=False)
    p.text(45, 15.2, "=", at="center", bold=True)
    p.text(58, 9.4, "C: 96 rows, 64 columns", at="center", size=8)
    sums = p.box(49, 10.4, 18, 14, "64 x 96 sums of a warpgroup,\nturned by stmatrix", "store", size=8)
    p.text(left.x, 26.6, "A tile of C: one or two row tiles by 256 to 512 columns, which two warpgroups divide.")
    for w in range(2):
        for slab in range(2):
            x = 8 + 26 * w + 13 * slab
            p.box(x, 28.4, 13, 4.2, f"warpgroup {w}\nslab {slab}", ("multiply", "sum")[w], size=8, legend=False)
    p.text(7.2, 30.5, "96 rows", at="right", size=8)
    p.text(sums.x + 12, 30.5, "256 columns", size=8)
    p.prose(
        35,
        "A stage has 16 to 64 columns of the block, and as many rows of B in copies of 16. A row tile that lacks the "
        "block of an entry is left out by both warpgroups: nothing is multiplied by zero.",
    )
    p.legend(39.8)
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
    for lane, late in enumerate((0, 5)):
        lanes.do(lane, 0, 8, "indices", "look", size=8)
        lanes.do(lane, 8, 18, "copy 0, 1", "load")
        for i in range(4):
            t = 20 + late + 20 * i
            lanes.do(lane, t, t + 11.5, f"multiply {i}", "multiply")
            if t < 80:
                lanes.do(lane, t + 11.5, t + 18, f"copy {i + 2}", "load", size=8)
    starts = (8 if stage < 2 else 31.5 + 20 * (stage - 2) for stage in range(5))
    lanes.ring(range(2, 5), zip(starts, range(20, 120, 20), strict=True), 16.5)
    p.prose(
        39.6,
        "A warp multiplies as soon as its stage is there (`full`), and copies into a stage that all warps have "
        "multiplied (`empty`); it waits for no other warp besides. Indices come by cp.async too, kAhead entries "
        "ahead.",
    )
    p.legend(43.8)
    return p


def gemm_few() -> Picture:
    p = Picture(75.8, "gemm_few: A times up to 8 columns of 16-bit floats")
    p.prose(
        4.2,
        "A CTA of four or eight warps has 16 rows of a block row. Here: four warps and 9 blocks of 64 columns, which "
        "are 18 chunks of 32. At each turn a warp takes 2 chunks side by side (kTogether); its next turn is 8 chunks "
        "on.",
    )
    kinds = ("load", "softmax", "sum", "look")
    for block in range(9):
        p.text(11.3 + 6.6 * block, 8.6, f"block {block}", at="center", size=8)
        for half in range(2):
            chunk = 2 * block + half
            p.box(8 + 6.6 * block + 3.3 * half, 9.8, 3.3, 3.2, str(chunk), kinds[block % 4], size=8, legend=False)
        p.text(11.3 + 6.6 * block, 14.2, f"warp {block % 4}", at="center", size=8)
    p.text(7.2, 11.4, "16 rows", at="right", size=8)
    for turn, x in enumerate((21.2, 47.6, 64.1)):
        p.text(x, 16, f"turn {turn}", at="center", size=8)

    p.text(1, 19.2, "A chunk in the registers of its warp", bold=True)
    p.text(17, 21.4, "A: 16 rows, 32 columns", at="center", size=8)
    for r, quarter in itertools.product(range(8), range(4)):
        kind = kinds[quarter]
        p.box(8 + 4.6 * quarter, 22.6 + 1.5 * r, 4.6, 1.5, str(4 * r + quarter), kind, size=8, legend=False)
    p.text(7.2, 23.4, "lane", at="right", size=8)
    p.text(17.2, 36.2, "lane l: 8 columns from 8 (l % 4) on,\nof rows l / 4 and l / 4 + 8", at="center", size=8)
    p.text(44, 21.4, "B: 32 rows, up to 8 columns", at="center", size=8)
    for quarter, n in itertools.product(range(4), range(8)):
        p.box(33 + 2.8 * n, 22.6 + 3 * quarter, 2.8, 3, str(4 * n + quarter), kinds[quarter], size=8, legend=False)
    p.text(44.2, 36.2, "lane l: 8 rows from 8 (l % 4) on,\nof column l / 4", at="center", size=8)
    first = p.box(59, 23.2, 15, 4, "mma.sync: the first\n4 of each lane's 8", "multiply", size=8)
    second = p.box(59, 29.8, 15, 4, "mma.sync: the other\n4 of each lane's 8", "multiply", size=8)
    p.arrow((55.6, 26.8), first.left)
    p.arrow((55.6, 30.4), second.left)
    p.prose(
        39.6,
        "A product may take the columns of A, and the rows of B, in any order, if both have the same one: what a lane "
        "has of a row of A, or of a column of B, lies side by side, 16 bytes. Loads of A, and those of an aligned "
        "column-major B, need nothing else. Any other B passes through shared memory:",
        size=8,
    )
    read = p.box(3, 45.4, 18, 4, "lane k reads row k of B,\n16, 8, 4 or 2 bytes a load", "load", size=8)
    panel = p.box(27, 45.4, 19, 4, "panel of the warp: rows in\nthe order of place_of_row", "plain", size=8)
    turned = p.box(52, 45.4, 22, 4, "ldmatrix.trans: lane l has\n8 rows of column l / 4, as above", "plain", size=8)
    p.arrow(read.right, panel.left)
    p.arrow(panel.right, turned.left)

    p.text(1, 52.6, "Warp 0 over time with its three turns, two sets of registers, and the sums", bold=True)
    lanes = Lanes(p, 53.8, ["warp 0", "even", "odd", "warps 1 to 3"], left=11, step=3.4)
    lanes.do(0, 0, 13, "bounds, A 0", "load", size=8)
    lanes.do(0, 13, 20, "wait", "wait", size=8)
    lanes.do(0, 20, 26, "B 0", "load", size=8)
    for turn in range(2):
        t = 26 + 24 * turn
        lanes.do(0, t, t + 11, f"A {turn + 1}, B {turn + 1}", "load", size=8)
        lanes.do(0, t + 11, t + 17, "", "wait")
        lanes.do(0, t + 17, t + 24, "mma 0" if turn == 0 else "mma 1", "multiply", size=8)
    lanes.do(0, 74, 81, "mma 2", "multiply", size=8)
    lanes.do(1, 3, 42.6, "arrives: 0", "wait", size=8)
    lanes.do(1, 43, 50, "0", "plain", size=8)
    lanes.do(1, 52, 73.6, "arrives: 2", "wait", size=8)
    lanes.do(1, 74, 81, "2", "plain", size=8)
    lanes.do(2, 28, 66.6, "arrives: 1", "wait", size=8)
    lanes.do(2, 67, 74, "1", "plain", size=8)
    lanes.do(3, 0, 81, "the same, with other chunks", "plain", size=8)
    for i, start in enumerate((82, 88.5)):
        lanes.mark(start - 0.5, 0, 3)
        lanes.do(0, start, start + 5.5, "add", "sum", size=8)
        if i == 0:
            lanes.do(3, start, start + 5.5, "add", "sum", size=8)
    lanes.do(0, 94.5, 100, "C", "store", size=8)
    p.prose(
        68.6,
        "wait: for the kernels in front, in a launch that may overlap with them; bounds, A 0 and columns are asked for "
        "before, B after. The columns of the blocks are asked for a turn ahead of B. Dashed: the sums of warps 2 and 3 "
        "pass to warps 0 and 1 through shared memory, then those of warp 1 to warp 0.",
        size=8,
    )
    p.legend(74.6)
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
    p.prose(33, "A row of 2000 blocks comes after all others, as four pieces for four warps of any CTAs.")
    for piece in range(4):
        stop = min(512 * piece + 512, 2000) - 1
        box = p.box(8 + 16.2 * piece, 34.6, 14, 3.4, f"a warp: blocks\n{512 * piece} to {stop}", "load", legend=False)
        p.arrow(box.bottom, (box.bottom[0], 39.5))
    p.box(8, 39.6, 62.6, 2, "partial: R sums of each piece", "sum", legend=False)
    p.text(
        1,
        43,
        "The warp that comes last adds the pieces, all its lanes together, in one fixed tree, and writes y.",
        size=8,
    )
    p.text(1, 46.2, "Short rows, small blocks, A.T @ x (kEager): the lanes of a row, row by row.")
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


def columns_tf32() -> Picture:
    p = Picture(22, "columns_tf32: a column-major copy of B for tf32 and float32")
    p.text(1, 4.2, "B as it lies: (K, N), any strides")
    p.box(4, 6, 14, 9, "64 rows\nx 64 columns", "load")
    p.text(11.6, 16.2, "4 bytes a thread, along the columns", at="center", size=8)
    p.text(33, 4.2, "shared memory", at="center")
    p.box(26, 6, 14, 9, "tile\n64 x 65 words", "plain")
    p.text(33, 16.2, "a column more: no bank twice", at="center", size=8)
    p.text(58, 4.2, "as gemm_sm90 wants it: (N, K)", at="center")
    p.box(49, 6, 18, 9, "64 columns x 64\nrows, rounded; the\nrest behind it", "store")
    p.text(58, 16.2, "4 bytes a thread, along K", at="center", size=8)
    p.arrow((18.4, 10.5), (25.6, 10.5))
    p.arrow((40.4, 10.5), (48.6, 10.5))
    p.text(21.5, 9.4, "read", at="center", size=8)
    p.text(44.5, 9.4, "sync", at="center", size=8)
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "gemm_sm90": gemm_sm90,
    "columns_tf32": columns_tf32,
    "gemm_turned_sm90": gemm_turned_sm90,
    "gemm_sm80": gemm_sm80,
    "gemm_few": gemm_few,
    "gemm_simt": gemm_simt,
    "spmv": spmv,
    "spmv_small": spmv_small,
    "spmm": spmm,
    "spmm_staged": spmm_staged,
    "spmm_f64": spmm_f64,
}
