"""The pictures of the kernels for the gradients of attention; draw_kernels.py draws them with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draw_shapes import Box, Lanes, Picture


def attention_backward_sm90() -> Picture:
    p = Picture(97.2, "attention_backward_sm90: dQ, dK and dV in one pass on Hopper's tensor cores")
    p.prose(
        4,
        "One CTA over time, heads of 128: 128 keys, whose K and V stay in shared memory, and tiles of 64 queries that "
        "pass by (turns 0, 1, 2...; a mask cuts turn 0). Each of two warpgroups has 64 of the keys.",
    )
    names = ["feed (warp 0)", "shade (warp 3)", "group 0: products", "group 0: threads"]
    names += ["group 1: products", "group 1: threads", "add (warps 1, 2)"]
    lanes = Lanes(p, 8, names, step=3.8, left=16, gaps=[(1, 0.6), (2, 2.4), (4, 2), (6, 2.4)])
    lanes.do(0, 0, 6.5, "claim", "look", size=8)
    copies: dict[str, Box] = {}
    copied = (("K", 6.5, 9), ("Q0", 9, 13), ("V", 13, 15.5), ("dO0", 15.5, 20.5), ("Q1", 20.5, 24.5))
    copied += (("dO1", 24.5, 29.5), ("Q2", 51, 55), ("dO2", 55, 60), ("Q3", 78, 82), ("dO3", 82, 87))
    for name, start, stop in copied:
        copies[name] = lanes.do(0, start, stop, name, "load", size=8)
    for start, stop in ((29.5, 51), (60, 78)):
        lanes.do(0, start, stop, "both slots full", "wait", size=8)
    words = lanes.do(1, 13.8, 24.3, "words of 0", "look", size=8)
    lanes.do(1, 24.3, 51, "turns 1 to 3 are whole", "wait", size=8)
    done: dict[tuple[int, str], Box] = {}
    for group in range(2):
        lane = 2 + 2 * group
        for turn in range(3):
            t = 15 + 27 * turn + 4 * group
            for i, what in enumerate(("S", "dP")):
                done[group, f"{what}{turn}"] = lanes.do(
                    lane, t + 4 * i, t + 4 * i + 4, f"{what}{turn}", "multiply", size=8
                )
            done[group, f"exp{turn}"] = lanes.do(lane + 1, t + 4, t + 10.5, f"exp {turn}", "softmax", size=8)
            done[group, f"ds{turn}"] = lanes.do(lane + 1, t + 10.5, t + 15, f"ds{turn}", "sum", size=8)
            for i, what in enumerate(("dV", "dQ", "dK")):
                start, stop = t + 15 + 4 * i, min(t + 19 + 4 * i, 100)
                if stop - start >= 3.5:
                    done[group, f"{what}{turn}"] = lanes.do(lane, start, stop, f"{what}{turn}", "multiply", size=8)
            if turn < 2:
                done[group, f"out{turn}"] = lanes.do(lane + 1, t + 23, t + 28, f"dQ{turn}", "store", size=8)
    lanes.do(6, 15, 43, "until it is its turn", "wait", size=8)
    adds = [lanes.do(6, 43 + 27 * turn, 56 + 27 * turn, f"add dQ{turn}", "sum", size=8) for turn in range(2)]
    lanes.do(6, 56, 70, "", "wait")
    p.arrow(copies["Q0"].below(0.5), done[0, "S0"].above(0.1))
    p.text(lanes.x(11), 17.7, "q_full", at="right", size=8)
    p.arrow(words.below(0.92), done[0, "exp0"].above(0.7))
    p.text(lanes.x(24.5), 17.7, "shade_full", size=8)
    p.arrow(done[1, "dP1"].above(0.6), copies["Q2"].below(0.35), dashed=True)
    p.text(lanes.x(53.6), 17.7, "q_empty: dK0 is done in both warpgroups", size=8)
    p.arrow(done[1, "ds0"].above(0.9), done[0, "dQ0"].below(0.3))
    p.text(lanes.x(38), 27.3, "ds_full", size=8)
    p.arrow(done[1, "out0"].below(0.5), adds[0].above(0.2))
    p.text(lanes.x(48), 37.5, "dq_full", size=8)
    p.prose(
        44.8,
        "S = K Q^T and dP = V dO^T: 64 keys of a warpgroup by 64 queries. exp: the weights, computed beside dP. "
        "ds = weight (dP - delta) goes to shared memory, where both warpgroups read all of it: dQ = ds^T K is 64 "
        "queries by half of the columns. dV += weights dO and dK += ds Q take their left operand from registers. dK is "
        "still multiplied when the next scores are issued.",
    )
    p.text(1, 53, "Sums of dQ in one order", bold=True)
    p.prose(
        55.1,
        "Tiles of keys (rows) are claimed from the last to the first, and dQ of a tile of queries (columns) is added "
        "up in that order: a cell has its rank, here of a causal band.",
        size=8,
    )
    for column in range(8):
        p.text(22 + 6 * column, 60.2, f"dQ of {column}", at="center", size=8)
    for row, keys in enumerate((3, 2, 1, 0)):
        p.text(17.6, 62.3 + 2.2 * row, f"keys {keys}: claimed as {row}", at="right", size=8)
        for column in range(8):
            sees = column >= 2 * keys
            rank = column // 2 - keys
            kind = ("look" if rank == 0 else "sum") if sees else "absent"
            p.box(19 + 6 * column, 61.2 + 2.2 * row, 6, 2.2, str(rank) if sees else "", kind, size=8, legend=False)
    p.prose(
        71.6,
        "add waits until the counter of the tile (turns) is its rank, and raises it when the copy engine has added; "
        "rank 0 stores. In any order nobody waits. Yellow: cut by the diagonal, looked up by shade.",
        size=8,
    )
    p.text(1, 76.2, "Shapes of a tile, and which warpgroup has which keys", bold=True)
    shapes = (
        (2, 1, "heads of up to 128:\n64 queries, 128 keys;\na half of dQ is half\nof the columns"),
        (2, 2, "heads of up to 64:\n128 queries, 128 keys;\na half of dQ is 64\nof the queries"),
        (1, 1, "masks of 64 keys:\n64 queries, 64 keys;\nboth halves by one;\nanother CTA beside it"),
    )
    for i, (wide, high, text) in enumerate(shapes):
        x = 1 + 25 * i
        for group in range(wide):
            p.box(x + 3.4 * group, 78, 3.4, 3.4 * high, str(group), "multiply", size=8)
        p.text(x + 3.4 * wide + 1, 81.4, text, size=8)
    p.text(1, 88, "Shared memory (heads of 128: 192 KB and 6 KB; masks of 64 keys: 104 KB and 5 KB)", bold=True)
    x = 1.0
    for text, wide, kind in (("k, v: 128 keys", 14, "load"), ("q, dout:\n2 slots *", 12, "load"),
                             ("ds: 2 slots *;\nthen dK, dV", 13, "sum"), ("dq: two\nhalves *", 9, "sum"),
                             ("lse, delta:\n2 slots *", 11, "load"), ("seen", 5, "look"),
                             ("turns,\nbarriers", 9, "plain")):  # fmt: skip
        p.box(x, 89.4, wide, 3.4, text, kind, size=8)
        x += wide
    p.text(1, 94, "* masks of 64 keys: one slot of dout, ds and delta, and room for one half of dq.", size=8)
    p.legend(96)
    return p


def attention_backward_keys_sm90() -> Picture:
    p = Picture(58, "attention_backward_keys_sm90: dK and dV of heads of 129 to 256 columns")
    p.prose(
        4,
        "One CTA over time: 64 keys, whose K and V stay in shared memory, and tiles of 64 queries that pass by (turns "
        "0, 1, 2...; all of them whole). One warpgroup has dV in its registers, the other one dK.",
    )
    names = ["feed (warp 0)", "values: products", "values: threads", "keys: products", "keys: threads"]
    lanes = Lanes(p, 8, names, step=3.8, left=16, gaps=[(1, 2.4), (3, 2.4)])
    lanes.do(0, 0, 6.5, "claim", "look", size=8)
    copies: dict[str, Box] = {}
    copied = (("K", 6.5, 9), ("Q0", 9, 13), ("V", 13, 15.5), ("dO0", 15.5, 20.5), ("Q1", 20.5, 24.5))
    copied += (("dO1", 24.5, 29.5), ("Q2", 47, 51), ("dO2", 51, 56), ("Q3", 72, 76), ("dO3", 76, 81))
    for name, start, stop in copied:
        copies[name] = lanes.do(0, start, stop, name, "load", size=8)
    lanes.do(0, 29.5, 47, "both slots full", "wait", size=8)
    lanes.do(0, 56, 72, "both slots full", "wait", size=8)
    done: dict[str, Box] = {}
    for turn in range(3):
        t = 14 + 25 * turn
        for lane, start, stop, name, kind in (
            (1, 0, 6, "S", "multiply"), (2, 6, 12.5, "exp", "softmax"), (1, 13, 21, "dV", "multiply"),
            (3, 6.5, 12.5, "dP", "multiply"), (4, 14, 19.5, "ds", "sum"), (3, 20, 28, "dK", "multiply"),
        ):  # fmt: skip
            if t + stop <= 100:
                done[f"{name}{turn}"] = lanes.do(lane, t + start, t + stop, f"{name}{turn}", kind, size=8)
    p.arrow(copies["Q0"].below(0.6), done["S0"].above(0.1))
    p.text(lanes.x(10.5), 13.7, "q_full", at="right", size=8)
    p.arrow(done["exp0"].below(0.9), done["ds0"].above(0.1))
    p.text(lanes.x(25), 23.7, "weights_full", at="right", size=8)
    p.prose(
        35,
        "S = K Q^T and dP = V dO^T: 64 keys by 64 queries, a sum over all columns. A thread of the keys has dP where "
        "the same thread of the values has S: the weights pass from one to the other in float32. dV += weights dO and "
        "dK += ds Q take their left operand from registers, and run on beside the next S and dP.",
    )
    p.text(1, 44.2, "Shared memory (256 columns: 208 KB and 4 KB)", bold=True)
    x = 1.0
    for text, wide, kind in (("k, v: 64\nkeys", 11, "load"), ("q:\n2 slots", 9, "load"), ("dout:\n2 slots", 9, "load"),
                             ("weights; then\ndK and dV", 15, "sum"), ("lse, delta,\nseen", 12, "load"),
                             ("turns,\nbarriers", 11, "plain")):  # fmt: skip
        p.box(x, 45.6, wide, 3.4, text, kind, size=8)
        x += wide
    p.legend(54)
    return p


def attention_backward_queries_sm90() -> Picture:
    p = Picture(54, "attention_backward_queries_sm90: dQ of heads of 129 to 256 columns")
    p.prose(
        4,
        "One CTA over time: 128 queries, whose Q and dO stay in shared memory, and tiles of 64 keys with their V that "
        "pass by. Each of two warpgroups has 64 of the queries, and needs nothing of the other.",
    )
    names = ["feed (warp 0)", "group 0: products", "group 0: threads", "group 1: products", "group 1: threads"]
    lanes = Lanes(p, 8, names, step=3.8, left=16, gaps=[(1, 2.4), (3, 1)])
    copies: dict[str, Box] = {}
    copied = (("Q", 0, 5), ("K0", 5, 8.5), ("dO", 8.5, 13.5), ("V0", 13.5, 17), ("K1", 17, 20.5), ("V1", 32, 35.5))
    for name, start, stop in (*copied, ("K2", 45, 48.5), ("V2", 60, 63.5), ("K3", 73, 76.5), ("V3", 88, 91.5)):
        copies[name] = lanes.do(0, start, stop, name, "load", size=8)
    done: dict[str, Box] = {}
    for group in range(2):
        for turn in range(3):
            t = 9.5 + 28 * turn + 5 * group
            for lane, start, stop, name, kind in (
                (1, 0, 5.5, "S", "multiply"), (1, 8, 13.5, "dP", "multiply"), (2, 5.5, 13.5, "exp", "softmax"),
                (2, 13.5, 18.5, "ds", "sum"), (1, 18.5, 26.5, "dQ", "multiply"),
            ):  # fmt: skip
                if t + stop <= 100:
                    box = lanes.do(lane + 2 * group, t + start, t + stop, f"{name}{turn}", kind, size=8)
                    done[f"{group}{name}{turn}"] = box
    p.arrow(copies["K0"].below(0.6), done["0S0"].above(0.2))
    p.text(lanes.x(7.5), 13.7, "k_full", at="right", size=8)
    p.arrow(done["0dP0"].above(0.9), copies["V1"].below(0.2), dashed=True)
    p.text(lanes.x(31.5), 13.7, "v_empty", size=8)
    p.prose(
        34.4,
        "S = Q K^T and dP = dO V^T: 64 queries by 64 keys. The weights are computed beside dP; ds stays in registers "
        "and is the left operand of dQ += ds K, which runs on beside the next S. The sums of dQ are made by one CTA, "
        "from the first keys to the last: they repeat bit by bit.",
    )
    p.text(1, 42.4, "Shared memory (256 columns: 224 KB and 1 KB)", bold=True)
    x = 1.0
    for text, wide, kind in (("q: 128 queries;\nthen dQ", 18, "load"), ("dout: 128 queries", 17, "load"),
                             ("k: 2 slots", 13, "load"), ("v: 1 slot", 10, "load"),
                             ("barriers", 10, "plain")):  # fmt: skip
        p.box(x, 43.8, wide, 3.4, text, kind, size=8)
        x += wide
    p.legend(51.4)
    return p


def attention_backward_begin() -> Picture:
    p = Picture(34, "attention_backward_begin: two statistics of each query")
    p.text(
        1, 4.2, "A CTA of 256 threads has a piece of 64 queries of a head: 16 lanes to a query, 16 queries at a time."
    )
    left = p.box(2, 6.4, 17, 5.2, "dO and O of a query\nlane l: columns\n8 l to 8 l + 7", "load", size=8)
    dot = p.box(
        25, 6.4, 20, 5.2, "dO . O: products of a\nlane, then a sum over\n16 lanes by shuffles", "multiply", size=8
    )
    delta = p.box(
        51, 6.4, 22, 5.2, "deltas: dO . O - dlse;\nthe given delta takes\nthe place of dO . O", "store", size=8
    )
    p.arrow(left.right, dot.left)
    p.arrow(dot.right, delta.left)
    lse = p.box(2, 13.4, 17, 3.4, "lse of a query", "load", size=8)
    logarithm = p.box(51, 13.4, 22, 3.4, "logarithms: lse log2(e),\ninf if it sees nothing", "store", size=8)
    p.arrow(lse.right, logarithm.left)
    zeros = "counter of additions to the piece = 0; in any order its sums = 0 (float32, 64 x 128 or 64 x 64)"
    p.box(2, 18.6, 71, 2.2, zeros, "sum", size=8)
    p.text(1, 23.2, "Where the statistics of a piece lie (place_of): the 16 of a thread as four chunks of 16 bytes.")
    kinds = ("look", "softmax", "sum", "load")
    p.text(10, 25.9, "query", at="right", size=8)
    order = [(c, chunk, t) for c in range(4) for chunk in range(4) for t in range(4)]
    shown = [query(c, chunk, t) for c, chunk, t in order if c in (0, 2) and chunk < 2]
    for i, number in enumerate(shown):
        p.box(11.2 + 3.4 * i + 2 * (i // 8), 24.8, 3.4, 2.2, str(number), kinds[number % 8 // 2], size=8, legend=False)
    p.text(24.8, 28.2, "thread with c = 0, first 32 bytes", at="center", size=8)
    p.text(54, 28.2, "thread with c = 2, first 32 bytes: turned", at="center", size=8)
    p.legend(31.6)
    return p


def query(c: int, chunk: int, t: int) -> int:
    """The query of a piece whose statistic is number `t` of a chunk of the threads with remainder `c` of 4."""
    number = (chunk ^ (c // 2)) * 4 + t
    return number // 2 * 8 + 2 * c + number % 2


def attention_backward_end() -> Picture:
    p = Picture(27, "attention_backward_end: dQ in the dtype of q, from its sums")
    p.text(1, 4.2, "A CTA of 256 threads has one piece of 64 queries.")
    boxes = [
        p.box(1, 6.4, 19, 6, "sums of the piece, float32,\nas the threads of a\nwarpgroup held them", "load", size=8),
        p.box(
            27, 6.4, 20, 6, "times the scale, rounded\nto 16 bits; shared memory,\nrow by row (kPitch)", "sum", size=8
        ),
        p.box(54, 6.4, 19, 6, "dQ: 16 bytes a thread,\nelement by element\nif not aligned", "store", size=8),
    ]
    p.arrow(boxes[0].right, boxes[1].left)
    p.arrow(boxes[1].right, boxes[2].left)
    p.text(23.5, 8.2, "read", at="center", size=8)
    p.text(50.5, 8.2, "sync", at="center", size=8)
    bad = p.box(27, 15.4, 20, 4, "bad[row]: an element\nis not finite", "look", size=8)
    again = p.box(54, 15.4, 19, 4, "write_query: a warp\nwrites the row again", "repair", size=8)
    p.arrow(boxes[1].bottom, bad.top)
    p.arrow(bad.right, again.left)
    p.arrow(again.top, boxes[2].bottom)
    p.prose(
        22,
        "0 x Inf is NaN: a key that a query does not see has spoiled its sums if it is not finite. Only what the query "
        "sees is read again.",
        size=8,
    )
    p.legend(25)
    return p


def turn_order() -> Picture:
    p = Picture(59.2, "turn_order: in which order tiles of queries pass by each tile of keys")
    p.prose(
        4,
        "Three CTAs of attention_backward_sm90 have three tiles of keys of a pattern with 8 tiles of queries. Keys 2 "
        "are claimed first. In turn 3, tile 3 of the queries passes by. dQ of a tile of queries is added to in the "
        "order of the claims: a turn ends when the addition before it to the same tile of queries has ended.",
    )
    seen = ((0, 1, 2, 3, 4), (3, 4, 5, 6, 7), (0, 3, 5, 6, 7))
    for top, title, in_turn in ((11.2, "In the order of the queries", False), (24.8, "In turn", True)):
        p.text(1, top, title, bold=True)
        lanes = Lanes(p, top + 1.4, [f"keys {2 - i}" for i in range(3)], step=3.4, left=9)
        for lane, turns in enumerate(_turns(seen, (0, 6, 13), in_turn)):
            for tile, begin, done, end in turns:
                lanes.do(lane, begin * 2.3, done * 2.3, f"turn {tile}", "multiply", size=8)
                if end > done:
                    text = "wait" if end - done > 2 else ""
                    lanes.do(lane, done * 2.3, end * 2.3, text, "wait", size=8)
    p.prose(
        38.6,
        "The kernel computes these times, in quarters of a turn (kTurn = 4, kAddition = 4), and so finds the order. A "
        "CTA has a pattern, and walks over its tiles of keys in the order of the claims:",
    )
    entries = p.box(1, 43.4, 15, 5.2, "columns: the tiles\nof queries of a\ntile of keys", "load", size=8)
    keys = p.box(20, 43.4, 15.5, 5.2, "keys: time (21 bits)\nand place (11 bits)\nof each entry", "look", size=8)
    ordered = p.box(39.5, 43.4, 14, 5.2, "sort_keys:\n256 threads, in\nshared memory", "look", size=8)
    written = p.box(
        57.5, 43.4, 16, 5.2, "write_turns: a warp,\n32 entries at a time;\nto_columns, to_parts", "store", size=8
    )
    ends = p.box(20, 51.4, 33.5, 2.4, "ends: when the last addition to a tile of queries ends", "sum", size=8)
    starts = p.box(57.5, 51.4, 16, 2.4, "starts of the CTAs", "sum", size=8)
    for before, after in ((entries, keys), (keys, ordered), (ordered, written)):
        p.arrow(before.right, after.left)
    p.arrow((keys.bottom[0], ends.y), keys.bottom)
    p.arrow(written.below(0.2), (ends.x + ends.w, ends.y + 0.4))
    p.arrow(written.below(0.6), starts.above(0.6))
    p.arrow(starts.above(0.8), written.below(0.8))
    p.legend(57.2)
    return p


def _turns(
    seen: Sequence[Sequence[int]], starts: Sequence[int], in_turn: bool
) -> list[list[tuple[int, float, float, float]]]:
    """For each tile of keys its tiles of queries: when a turn begins, when it is computed, and when it ends."""
    ends = dict.fromkeys(range(8), 0)
    found: list[list[tuple[int, float, float, float]]] = []
    for tiles, start in zip(seen, starts, strict=True):
        now = start + 2
        found.append([])
        for tile in sorted(tiles, key=lambda tile: (ends[tile] if in_turn else 0, tile)):
            end = max(now + 4, ends[tile])
            found[-1].append((tile, now, now + 4, end))
            ends[tile], now = end + 4, end
    return found


def attention_backward_sm80() -> Picture:
    p = Picture(57.7, "attention_backward_sm80: dQ in one launch, dK and dV in another")
    p.prose(4, "A CTA has a tile of rows, a warp 16 of them; tiles of the others pass by. Both roles do the same:")
    for i, (title, rows, columns, results) in enumerate(
        (
            ("dQ: rows are queries", "Q (left), dO (right):\n16 queries to a warp", "K, V: 64 or\n32 keys", "dQ"),
            (
                "dK and dV: rows are keys",
                "K (left), V (right):\n16 keys to a warp",
                "Q, dO: 64 or\n32 queries",
                "dK, dV",
            ),
        )
    ):
        x = 1 + 37.5 * i
        p.text(x, 6.8, title, bold=True)
        own = p.box(x, 8.2, 17, 3.6, rows, "load", size=8)
        passing = p.box(x + 20, 8.2, 15, 3.6, columns, "load", size=8)
        sums = p.box(x, 14.6, 17, 2.4, f"sums of {results}: registers", "sum", size=8)
        p.arrow(own.bottom, sums.top)
        p.arrow(passing.below(0.2), (sums.x + sums.w, sums.y + 0.6))
        p.text(x + 23.6, 15.8, "one turn after another", size=8)
    p.text(1, 20, "One CTA of the second launch over time: two stages, one turn ahead.")
    lanes = Lanes(p, 21.6, ["all warps", "stage 0", "stage 1"], step=3.6)
    lanes.do(0, 0, 15.6, "K, V, copy 0", "load", size=8)
    for i in range(2):
        t = 16 + 42 * i
        lanes.mark(t, 0, 2)
        for start, stop, text, kind in (
            (0.6, 7.6, f"copy {i + 1}", "load"),
            (7.6, 11.6, f"S{i}", "multiply"),
            (11.6, 17.6, "exp", "softmax"),
            (17.6, 24, "dV +=", "multiply"),
            (24, 29, f"dP{i}", "multiply"),
            (29, 33, "ds", "sum"),
            (33, 41.4, "dK +=", "multiply"),
        ):
            lanes.do(0, t + start, t + stop, text, kind, size=8)
        lanes.do(1 + i, t + 0.6, t + 41.4, f"read: turn {i}", "plain", size=8)
    lanes.do(1, 6, 15.6, "arrives", "wait", size=8)
    lanes.do(2, 16.6, 57.6, "arrives: turn 1", "wait", size=8)
    lanes.do(1, 58.6, 99.6, "arrives: turn 2", "wait", size=8)
    p.prose(
        34.6,
        "Dashed: copy_wait and __syncthreads, once a turn. S and dP are rows by columns, in the registers in which a "
        "warp multiplies them next: because rows are keys here and queries in the first launch, neither passes through "
        "shared memory. The first launch has no dV, and needs S, dP and ds as well: seven products in all instead "
        "of five.",
    )
    p.text(1, 41.6, "Launches", bold=True)
    for i, (title, launches) in enumerate(
        (
            ("up to 128 columns", ("attention_delta", "dQ", "dK and dV")),
            ("up to 256 columns", ("attention_delta", "dQ", "dK", "dV")),
        )
    ):
        x, y = 16.0, 43 + 3.6 * i
        p.text(1, y + 1.2, title, size=8)
        before: Box | None = None
        for name in launches:
            box = p.box(x, y, 12, 2.4, name, "look" if "_" in name else "store", size=8, legend=False)
            if before:
                p.arrow(before.right, box.left)
            before, x = box, x + 14.5
    p.prose(
        50.8,
        "A key that several query heads read has the tiles of all of them, one head after the other. Each sum is made "
        "by one warp in one order.",
        size=8,
    )
    p.legend(55.8)
    return p


def attention_backward_fused() -> Picture:
    p = Picture(41, "attention_backward_fused: dQ, dK and dV in one pass by the matrix products of a warp")
    p.prose(4, "A CTA of 8 warps has 128 keys, whose K and V stay in shared memory; tiles of 64 queries pass by.")
    for i, (title, part, kind) in enumerate(
        (
            ("S and dP", "32 queries x 32 keys\nof each warp", "multiply"),
            ("weights and ds", "16 bits,\nin shared memory", "softmax"),
            ("dV and dK", "32 keys x 64 columns\nof each warp, registers", "sum"),
            ("dQ", "32 queries x 32 columns,\nadded in global memory", "store"),
        )
    ):
        x = 1 + 18.6 * i
        p.text(x, 6.8, title, bold=True)
        box = p.box(x, 8.2, 16.4, 3.6, part, kind, size=8)
        if i:
            p.arrow((x - 2.2, box.left[1]), box.left)
    p.text(1, 15.6, "One CTA over time: two stages, one turn ahead.")
    lanes = Lanes(p, 17.2, ["all warps", "stage 0", "stage 1"], step=3.6)
    lanes.do(0, 0, 15.6, "K, V, copy 0", "load", size=8)
    for i in range(2):
        t = 16 + 42 * i
        lanes.mark(t, 0, 2)
        for start, stop, text, kind in (
            (0.6, 7.6, f"copy {i + 1}", "load"),
            (7.6, 11.4, f"S{i}", "multiply"),
            (11.4, 15.8, "exp", "softmax"),
            (15.8, 20.2, f"dP{i}", "multiply"),
            (20.2, 23.8, "ds", "sum"),
            (24.6, 32, "dV, dK", "multiply"),
            (32, 36.8, f"dQ{i}", "multiply"),
            (36.8, 41.4, "add", "store"),
        ):
            lanes.do(0, t + start, t + stop, text, kind, size=8)
        lanes.mark(t + 24.2, 0, 0)
        lanes.do(1 + i, t + 0.6, t + 41.4, f"read: turn {i}", "plain", size=8)
    lanes.do(1, 6, 15.6, "arrives", "wait", size=8)
    lanes.do(2, 16.6, 57.6, "arrives: turn 1", "wait", size=8)
    lanes.do(1, 58.6, 99.6, "arrives: turn 2", "wait", size=8)
    p.prose(
        30.6,
        "Dashed: __syncthreads, twice a turn. The first waits for the copies too; after the second, all warps read the "
        "weights and ds of all. dQ is added to sums in float32 in the order in which CTAs come, which changes from "
        "call to call; attention_backward_end rounds it.",
    )
    p.legend(38)
    return p


def attention_backward_simt() -> Picture:
    p = Picture(32, "attention_backward_simt: any head size, dtype and strides, a warp for each row")
    p.text(
        1, 4.2, "Two launches. A CTA of 8 warps walks over tiles of 64; warp w has rows w, w + 8, w + 16... of a tile."
    )
    for i, (title, other, first, second, last) in enumerate(
        (
            (
                "write_query: dQ of query i",
                "key j",
                "sums += ds k[j]",
                "lane l: columns l, l + 32...",
                "dQ = scale * sums",
            ),
            (
                "write_key: dK, dV of key j",
                "query i",
                "dk += ds q[i]",
                "dv += weight dO[i]",
                "dK = scale * dk, dV = dv",
            ),
        )
    ):
        x = 1 + 37.5 * i
        p.text(x, 7, title, bold=True)
        seen = p.box(x, 8.4, 35, 2.2, f"the next set bit of the mask: {other}", "look", size=8)
        dots = p.box(x, 12.4, 16, 4.4, "q . k, dO . v\nlanes share columns;\nsums over the warp", "multiply", size=8)
        weight = p.box(
            x + 19, 12.4, 16, 4.4, "weight = exp2(s - lse)\nds = weight\n(dO . v - delta)", "softmax", size=8
        )
        sums = p.box(x + 19, 18.6, 16, 3.2, f"{first}\n{second}", "sum", size=8)
        result = p.box(x, 24, 35, 2.2, last, "store", size=8)
        p.arrow((dots.top[0], seen.bottom[1]), dots.top)
        p.arrow(dots.right, weight.left)
        p.arrow(weight.bottom, sums.top)
        p.arrow(sums.bottom, (sums.bottom[0], result.y))
        p.line((sums.x, sums.left[1]), (x + 17.5, sums.left[1]))
        p.line((x + 17.5, sums.left[1]), (x + 17.5, 11.5), dashed=True)
        p.arrow((x + 17.5, 11.5), (x + 17.5, seen.bottom[1]))
    p.text(
        1, 28, "What is not seen is not read. The tensor-core kernels call both for rows that are not finite.", size=8
    )
    p.legend(30.4)
    return p


def attention_delta() -> Picture:
    p = Picture(24, "attention_delta: two numbers of each query, for the gradients")
    p.text(1, 4.2, "A group of 8 lanes has a query; a CTA of 256 threads has 32 of them at a time.")
    read = p.box(1, 6.4, 18, 6, "dO and O of a query\nlane l: columns\nl, l + 8, l + 16...", "load", size=8)
    dot = p.box(26, 6.4, 20, 6, "dO . O: products of a\nlane, then a sum over\n8 lanes by shuffles", "multiply", size=8)
    statistic = "Statistic of the query:\n\nlse log2(e), or inf\nif it sees nothing;\n\ndO . O - dlse"
    to = p.box(53, 6.4, 20, 10.6, statistic, "store", size=8)
    lse = p.box(1, 14, 18, 3, "lse, dlse", "load", size=8)
    p.arrow(read.right, dot.left)
    p.arrow(dot.right, (to.x, dot.right[1]))
    p.arrow(lse.right, (to.x, lse.right[1]))
    p.text(1, 19.4, "A delta that the caller gives takes the place of dO . O; O is not read then.", size=8)
    p.legend(22)
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "attention_backward_sm90": attention_backward_sm90,
    "attention_backward_keys_sm90": attention_backward_keys_sm90,
    "attention_backward_queries_sm90": attention_backward_queries_sm90,
    "attention_backward_begin": attention_backward_begin,
    "attention_backward_end": attention_backward_end,
    "turn_order": turn_order,
    "attention_backward_sm80": attention_backward_sm80,
    "attention_backward_fused": attention_backward_fused,
    "attention_backward_simt": attention_backward_simt,
    "attention_delta": attention_delta,
}
