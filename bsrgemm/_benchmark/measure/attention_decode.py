"""Section of bench/run/attention.py: one token on a KV cache, all of it and a few of its blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from ..checks.attention import TOLERANCE, deviation, exact
from ..peers import attention as peers
from ..random_data import normal
from ..runner import Makers, mark, number
from ..table import Table
from ..timing import time_sustained
from .attention_cases import DECODE, DECODE_MOST, DECODE_SHARE, operands
from .attention_run import Bench, filled_cache, graphed

#: Query heads, KV heads, head dim, and keys of a block of sparse decode
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
#: Keys from which on sparse decode is measured too, on a GPU
_LONG = 131072


def chosen_blocks(heads: int, count: int, kept: int) -> np.ndarray[Any, Any]:
    """The blocks that each head reads, (1, heads, kept), sorted."""
    rng = np.random.default_rng(0)
    return np.stack([np.sort(rng.permutation(count)[:kept]) for _ in range(heads)])[None].astype(np.int32)


def decode_error(q: Any, k: Any, v: Any, blocks: Any, result: Any) -> float:
    """The error in the first and the last head."""
    got, (B, H, _, _), group = peers.as_array(result), q.shape, q.shape[1] // k.shape[1]
    off = []
    for b, h in ((0, 0), (B - 1, H - 1)):
        key = np.arange(k.shape[2])
        seen = np.ones(len(key), bool) if blocks is None else np.isin(key // BLOCK, blocks[0, h // group])
        want = exact(q[b, h], k[b, h // group], v[b, h // group], seen[None])
        off.append(deviation(got.reshape(q.shape)[b, h], want))
    return float(np.max(off))


def decode_peers(bench: Bench, q: Any, k: Any, v: Any) -> Makers:
    """The peers for one query: the query unchanged, and with the query heads of a group as queries of one head."""
    B, H, _, D = q.shape
    if not bench.on_gpu:
        return {"NumPy": lambda: peers.plain(q, k, v)}
    folded = q.reshape(B, k.shape[1], H // k.shape[1], D)
    return {
        "cuDNN": lambda: peers.graphed(peers.cudnn(q, k, v)),
        "cuDNN folded": lambda: peers.graphed(peers.cudnn(folded, k, v)),
        "flash": lambda: peers.graphed(peers.flash(q, k, v)),
    }


def section_decode(bench: Bench, table: Table) -> None:
    """One query token on a KV cache: replays of a CUDA graph, in one piece, in pages, and a few blocks alone."""
    problems = bench.some(DECODE, DECODE[:4])
    if not bench.on_gpu:
        problems = [(B, 512, page) for B in (1, 2) for page in (None, 64)]
    table.note("B, keys, page: 32 heads on 8 | us, L2 flushed / back to back | TB/s of K and V | peers")
    best: dict[tuple[int, int], float] = {}
    for B, S, page in problems:
        q = normal((B, HEADS, 1, HEAD_DIM), "float16", bench.xp)
        shape = (B, KV_HEADS, S, HEAD_DIM)
        _, k, v = operands(bench.xp, shape, shape, "float16")
        store = filled_cache(bench, k, v, page)
        us = decode_line(bench, table, (q, k, v), store, best)
        if us is not None and (S >= _LONG or not bench.on_gpu):
            sparse_line(bench, table, (q, k, v), store, us)


def _label(store: bg.KVCache, keys: int, batch: int, what: str = "") -> str:
    return f"{batch:3} {keys:7} {store.page or '-':>4} {what:7}"


def decode_line(
    bench: Bench, table: Table, qkv: tuple[Any, Any, Any], store: bg.KVCache, best: dict[tuple[int, int], float]
) -> float | None:
    """All keys: microseconds of ours, timed in turn with the peers, whose best time is stored in `best`."""
    q, k, v = qkv
    B, _, S, _ = k.shape
    label = _label(store, S, B)
    dense = partial(bg.attention_decode, q, store, out=bench.xp.empty_like(q))
    error = partial(decode_error, q, k, v, None)
    call = bench.attempt("bsrgemm", label, partial(graphed, bench, dense))
    if call is None or not bench.verified(table, label, call, error, TOLERANCE["float16"]):
        return None
    makers = decode_peers(bench, q, k, v) if store.page is None and bench.with_peers else {}
    times = bench.interleaved({"bsrgemm": call} | bench.prepared(makers, label, error, TOLERANCE["float16"]), label)
    seconds = times.pop("bsrgemm")
    warm = time_sustained(call, 0.02) * 1e6 if bench.on_gpu else None
    if times:
        best[B, S] = min(times.values()) * 1e6
    us, bound = seconds * 1e6, DECODE_MOST.get((B, S), best.get((B, S)))
    reached = None if bound is None or not bench.on_gpu else us <= bound
    rate = (k.nbytes + v.nbytes) / seconds / 1e12
    text = " ".join(f"{name} {number(times[name] * 1e6 if name in times else None, 7)}" for name in makers)
    limit = "" if reached is None else f" | bound {bound:.1f} {mark(reached)}"
    table.add(
        f"{label} | {us:8.1f} / {number(warm, 8)} | {rate:6.3f} | {text}{limit}",
        batch=B, keys=S, page=store.page, us=us, us_back_to_back=warm, tb_per_second=rate,
        peers={name: times[name] * 1e6 if name in times else None for name in makers}, bound=bound, reached=reached,
    )  # fmt: skip
    return us


def sparse_line(
    bench: Bench, table: Table, qkv: tuple[Any, Any, Any], store: bg.KVCache, all_us: float
) -> None:  # fmt: skip
    """A sixteenth of the blocks of 64 keys."""
    q, k, v = qkv
    B, H_kv, S, _ = k.shape
    count = S // BLOCK
    blocks = chosen_blocks(H_kv, count, max(1, round(count * DECODE_SHARE)))
    label, numbers = _label(store, S, B, "sparse"), bench.xp.asarray(blocks)
    sparse = partial(bg.attention_decode, q, store, blocks=numbers, block=BLOCK, out=bench.xp.empty_like(q))
    call = bench.attempt("bsrgemm", label, partial(graphed, bench, sparse))
    error = partial(decode_error, q, k, v, blocks)
    if call is None or not bench.verified(table, label, call, error, TOLERANCE["float16"]):
        return
    us = bench.seconds(call) * 1e6
    table.add(
        f"{label} | {us:8.1f} us for {blocks.shape[2]} of {count} blocks of {BLOCK} keys | "
        f"{all_us / us:.1f} x faster than all",
        batch=B, keys=S, page=store.page, blocks=blocks.shape[2], of_blocks=count, us=us, speed_up=all_us / us,
    )  # fmt: skip
