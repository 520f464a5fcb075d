"""Pictures of the kernels for attention and decode, for draw_kernels.py."""

from __future__ import annotations

from collections.abc import Callable

from draw_shapes import Box, Lanes, Picture


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


def attention_short_sm90() -> Picture:
    p = Picture(43, "attention_short_sm90: a CTA for each tile of a short sequence")
    p.prose(
        4, "A CTA over time: 128 queries in 2 row groups, 8 tiles of keys in 2 shares, 4 slots for keys and for values."
    )
    names = ["a lane of each warp: copies", "rows 0, share 0: products", "rows 0, share 0: threads"]
    names += ["rows 0, share 1: products", "rows 0, share 1: threads"]
    lanes = Lanes(p, 6, names, step=3.6, left=18)
    first = lanes.do(0, 0, 23, "Q, K0 to K3, V0 to V3", "load", size=8)
    for share in range(2):
        lane = 1 + 2 * share
        begin = lanes.do(lane, 24 + 3 * share, 29 + 3 * share, f"S{share}", "multiply", size=8)
        p.arrow(first.below(0.9), begin.above(0.2))
        lanes.do(lane + 1, 29 + 3 * share, 38 + 3 * share, f"exp {share}", "softmax", size=8)
        for i in range(1, 4):
            t, tile = 22 + 16 * i + 3 * share, 2 * i + share
            lanes.do(lane, t, t + 4, f"S{tile}", "multiply", size=8)
            lanes.do(lane, t + 4, t + 8, f"O{tile - 2}", "multiply", size=8)
            lanes.do(lane + 1, t + 4, t + 14, f"exp {tile}", "softmax", size=8)
            if i < 3 and share == 0:
                lanes.do(0, t + 2, t + 12, f"K{tile + 2}...", "load", size=8)
        lanes.do(lane, 86 + 3 * share, 90 + 3 * share, f"O{6 + share}", "multiply", size=8)
    lanes.do(4, 93.4, 96, "", "sum")
    lanes.do(2, 96, 100, "O", "store", size=8)
    p.prose(
        26.6,
        "S: scores, O: weighted values. Row group 1 does the same on the same keys. Nothing is claimed and nothing is "
        "looked up: once a thread has set the barriers up, the warps share the start of the first copies. A thread of "
        "each share copies into a slot one step after it was used. At the end the second share leaves its sums in the "
        "memory of the keys, and the first adds them, divides, and stores 16 bytes a thread.",
    )
    p.text(1, 35.4, "Shared memory", bold=True)
    x = 1.0
    for text, wide, kind in (("q: queries,\nthen the result", 15, "load"), ("k: slots", 14, "load"),
                             ("v: slots", 14, "load"), ("shares: sums, in the\nmemory of k and v", 18, "sum"),
                             ("barriers", 9, "plain")):  # fmt: skip
        p.box(x, 36.4, wide, 3.4, text, kind, size=8)
        x += wide
    p.legend(41.4)
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


def kv_append() -> Picture:
    p = Picture(36, "kv_append: new tokens to the ends of the sequences of a cache")
    p.text(
        1, 4.2, "A sequence has some CTAs (one for one token). Each asks the same questions and gets the same answers."
    )
    length = p.box(1, 6.4, 16, 4.4, "first = lengths[b]\nlast = first + takes[b]", "look", size=8)
    room = p.box(22, 6.4, 24, 4.4, "last within the capacity, and\nall pages of the table there?", "look", size=8)
    refused = p.box(52, 6.4, 21, 4.4, "no: refused[b] += takes[b]\nnothing is copied", "plain", size=8)
    p.arrow(length.right, room.left)
    p.arrow(room.right, refused.left)
    p.text(1, 14, "yes: a warp copies a row of keys and a row of values, 16 bytes a lane")
    rows = p.box(1, 16, 20, 4.6, "row (head h, token i)\nof k and v, any strides", "load", size=8)
    at = p.box(27, 16, 20, 4.6, "position first + i:\npage and place in it", "look", size=8)
    to = p.box(53, 16, 20, 4.6, "row of the cache\n(page, h, place)", "store", size=8)
    p.arrow(rows.right, at.left)
    p.arrow(at.right, to.left)
    done = p.box(1, 24, 20, 4.6, "CTA done:\narrived[b] += 1", "wait", size=8)
    last = p.box(27, 24, 20, 4.6, "the last of them:\nlengths[b] = last", "store", size=8)
    p.arrow(done.right, last.left)
    p.prose(
        31,
        "All CTAs of a sequence have read its length before the last one changes it. Host or graph: the same.",
        size=8,
    )
    p.legend(34)
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "attention_sm90": attention_sm90,
    "attention_short_sm90": attention_short_sm90,
    "attention_sm80": attention_sm80,
    "attention_simt": attention_simt,
    "attention_values": attention_values,
    "decode": decode,
    "kv_append": kv_append,
}
