"""Pictures of the kernels for products with a sparse result, block structures and vectors, for draw_kernels.py."""

from __future__ import annotations

from collections.abc import Callable

from draw_shapes import Lanes, Picture


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
    starts = (7 if stage < 3 else 22.6 + 19 * (stage - 3) for stage in range(7))
    lanes.ring(range(1, 5), zip(starts, range(22, 155, 19), strict=True), 18.4)
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


def vector_steps() -> Picture:
    p = Picture(34.5, "vector_steps: inner products and updates of Krylov methods")
    p.text(1, 4.2, "A vector of n elements in chunks of kChunk; CTA c takes chunks c, c + CTAs, c + 2 CTAs...")
    kinds = ("load", "softmax", "sum")
    for k in range(7):
        name = f"chunk {k}" if k < 6 else "..."
        p.box(9 + 8 * k, 5.8, 8, 2.2, name, kinds[k % 3] if k < 6 else "plain", size=8, legend=False)
        if k < 6:
            p.text(13 + 8 * k, 9.1, f"CTA {k % 3}", at="center", size=8)
    p.text(1, 11.6, "A chunk has kUnroll pieces; a thread has kPack neighbors of each, one load of 16 bytes.")
    for j in range(4):
        for t in range(4):
            name = f"t {t}" if t < 3 else "..."
            p.box(9 + 15 * j + 3.5 * t, 13.2, 3.5, 2.2, name, "load" if t == 0 else "plain", size=8, legend=False)
        p.arrow((10.75 + 15 * j, 15.5), (10.75 + 15 * j, 17.3))
        p.box(9 + 15 * j, 17.4, 7, 2.2, f"sums[{j}]", "multiply", size=8, legend=False)
    p.text(1, 22, "Sums, in an order that depends on n alone:")
    steps = (
        ("the sums of\na thread", "multiply", 10),
        ("shuffles, a fixed\ntree in a warp", "sum", 13),
        ("kWarps sums\nof a CTA", "sum", 11),
        ("partial[CTA],\nthen a ticket", "store", 11),
        ("the last CTA adds\nall parts in order", "look", 14),
    )
    x = 1.0
    for i, (text, kind, wide) in enumerate(steps):
        box = p.box(x, 23.6, wide, 3.6, text, kind, size=8, legend=False)
        if i:
            p.arrow((x - 1.8, 25.4), box.left)
        x += wide + 1.9
    p.prose(
        29.6,
        "kInnerProduct reads u and v. kDirection reads a / b from device memory, then u and v, and writes u. kAdvance "
        "reads a / b, x, p, u and v, writes x and u, and sums |u[i]|^2; its last CTA writes three numbers.",
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


def sampled_tiles() -> Picture:
    p = Picture(43, "sampled_tiles: which blocks of a sampled product share a tile of 128 x 256")
    stored = ("x..x.x..x.x.", "..x.x...x..x", ".x....x..x..", "x..x..x.x..x")
    stored += ("..x..x.x....", ".x.x.x..x.x.", "x..xx...x.x.", ".x..x..x..x.")
    group, cell, high = (0, 3, 5, 6), 2.0, 1.8
    counts = [sum(stored[row][c] == "x" for row in group) for c in range(12)]
    taken = sorted(sorted(range(12), key=lambda c: (-counts[c], c))[:4])
    p.text(1, 4.2, "1  a window: bits of blocks", bold=True)
    p.text(1, 6.4, "64 rows by 512 columns; here 8 by 12, groups of 4 rows", size=8)
    for row, line in enumerate(stored):
        p.text(6.4, 8.7 + high * row, f"row {row}", at="right", size=8)
        for c, letter in enumerate(line):
            mine = "store" if c in taken else "multiply"
            kind = "absent" if letter == "." else mine if row in group else "plain"
            p.box(7 + cell * c, 7.8 + high * row, cell, high, kind=kind, legend=False)
    p.text(1, 24, "2  Columns: how many rows of the group have a column", bold=True)
    for c, count in enumerate(counts):
        kind = "store" if c in taken else "plain"
        p.box(7 + cell * c, 25.4, cell, 2.2, str(count), kind, size=8, legend=False)
    p.text(33, 26.5, "the kWide = 4 best: 14 of 16 blocks", size=8)
    p.text(41, 4.2, "3  write: a tile's record", bold=True)
    p.text(41, 6.4, "for blocks of 32 x 64: 4 rows by 4 columns", size=8)
    p.text(48.6, 9, "rows", at="right", size=8)
    p.text(48.6, 11.6, "columns", at="right", size=8)
    p.text(48.6, 14.2, "blocks", at="right", size=8)
    before = [sum(line.count("x") for line in stored[:row]) for row in range(len(stored))]
    for i, (row, c) in enumerate(zip(group, taken, strict=True)):
        p.box(49.4 + 4 * i, 7.9, 4, 2.2, str(row), "multiply", size=8, legend=False)
        p.box(49.4 + 4 * i, 10.5, 4, 2.2, str(c), "load", size=8, legend=False)
    for i, row in enumerate(group):
        for j, c in enumerate(taken):
            has = stored[row][c] == "x"
            number = str(before[row] + stored[row][:c].count("x")) if has else "-1"
            p.box(49.4 + 4 * j, 13.1 + 2.2 * i, 4, 2.2, number, "store" if has else "absent", size=8, legend=False)
    p.arrow((31.6, 15), (40.4, 15))
    p.text(66.4, 9, "of X", size=8)
    p.text(66.4, 11.6, "of Y", size=8)
    p.text(66.4, 14.2, "of out", size=8)
    p.text(1, 30.4, "The loop of a CTA; a warp has a group, and groups of a way have no row in common:")
    steps = (
        ("least: at first\na full tile", "look", 13),
        ("63 ways to put rows into groups;\ntiles of `least` blocks are taken", "sum", 25),
        ("smaller least: the best\nthat was found", "look", 18),
        ("least < kWide:\nthe rest", "store", 12),
    )
    x = 1.0
    for i, (text, kind, wide) in enumerate(steps):
        box = p.box(x, 32, wide, 3.6, text, kind, size=8, legend=False)
        if i:
            p.arrow((x - 1.5, 33.8), box.left)
        x += wide + 1.5
    p.prose(
        38,
        "The group of the picture has rows 0, 3, 5 and 6: all xors of 3 and 5. Where a row and a column of a tile have "
        "no block (-1), block_products_sm90 computes a part that is not stored.",
        size=8,
    )
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "spgemm_pattern": spgemm_pattern,
    "spgemm_simt": spgemm_simt,
    "block_products_sm90": block_products_sm90,
    "block_products_sm80": block_products_sm80,
    "segment": segment,
    "expand": expand,
    "vector_steps": vector_steps,
    "row_matching": row_matching,
    "sampled_tiles": sampled_tiles,
    "work_list": work_list,
}
