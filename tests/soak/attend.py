"""Cases of masks, attention and decode."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import bsrgemm as bg
from bsrgemm import BlockMask
from bsrgemm.dtypes import FLOAT8, accumulator_dtype

from ..strategies import widened
from .case import Case, kind
from .references import Exact, bounds, exact, fp8_bounds, seen_keys
from .samples import at_times_overlapping, here

F32 = np.dtype(np.float32)
LENGTHS = (1, 3, 16, 17, 31, 64, 65, 100, 128, 130, 200)


def length(case: Case) -> int:
    return case.number_from(200, 512) if case.chance(0.03) else int(case.pick(LENGTHS))


def normal(case: Case, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return case.rng.standard_normal(shape, np.float32).astype(dtype)


# ---------------------------------------------------------------------------------------------- masks
def mask(case: Case, S_q: int, S_k: int, block: Any) -> tuple[BlockMask, np.ndarray[Any, Any]]:
    """A mask of one pattern, and what it allows, from the definition."""
    align = case.pick(("bottom-right", "top-left"))
    where: dict[str, Any] = {"block": block, "device": case.place.backend.name}
    place = np.arange(S_q)[:, None] + (S_k - S_q if align == "bottom-right" else 0)
    key, count = np.arange(S_k)[None], case.number_from(0, 20)
    name = case.pick(("full", "causal", "window", "sinks", "prefix", "global", "dilated", "random", "dense", "blocks"))
    if name == "full":
        return BlockMask.full(S_q, S_k, **where), np.ones((S_q, S_k), bool)
    if name == "causal":
        return BlockMask.causal(S_q, S_k, align=align, **where), key <= place
    if name == "window":
        left, right = case.number_from(-1, 40), case.number_from(-1, 10)
        options = {"window": (left, right), "align": align}
        return BlockMask.window(S_q, S_k, left=left, right=right, align=align, **where), seen_keys(S_q, S_k, options)
    if name == "sinks":
        return BlockMask.sinks(S_q, S_k, count=count, **where), np.broadcast_to(key < count, (S_q, S_k))
    if name == "prefix":
        return BlockMask.prefix(S_q, S_k, length=count, align=align, **where), (key <= place) | (key < count)
    if name == "global":
        chosen = np.unique(case.rng.integers(0, S_k, 3))
        found = BlockMask.global_tokens(S_q, S_k, tokens=chosen, align=align, **where)
        return found, np.isin(key, chosen) | np.isin(place, chosen)
    if name == "dilated":
        step = case.number_from(1, 5)
        found = BlockMask.dilated(S_q, S_k, count=count + 1, dilation=step, align=align, **where)
        behind = place - key
        return found, (behind >= 0) & (behind % step == 0) & (behind // step <= count)
    if name == "random":
        per_row = case.number_from(1, -(-S_k // (block if isinstance(block, int) else block[1])))
        found = BlockMask.random(S_q, S_k, per_row=per_row, seed=case.number_from(0, 99), **where)
        return found, case.host(found.to_dense())
    if name == "dense":
        allowed = case.rng.random((S_q, S_k)) < 0.3
        return BlockMask.from_dense(here(case, allowed), block=block), allowed
    return _block_mask(case, S_q, S_k, block)


def _block_mask(case: Case, S_q: int, S_k: int, block: Any) -> tuple[BlockMask, np.ndarray[Any, Any]]:
    bq, bk = (block, block) if isinstance(block, int) else block
    stored = case.rng.random((-(-S_q // bq), -(-S_k // bk))) < 0.5
    indptr = np.append(0, np.cumsum(stored.sum(axis=1)))
    arrays = (here(case, indptr), here(case, np.nonzero(stored)[1]))
    found = BlockMask.from_block_indices(*arrays, shape=(S_q, S_k), block=block)
    return found, np.repeat(np.repeat(stored, bq, 0), bk, 1)[:S_q, :S_k]


def combined(case: Case, S_q: int, S_k: int, block: Any) -> tuple[BlockMask, np.ndarray[Any, Any]]:
    """Up to three masks joined by ``&``, ``|`` and ``~``."""
    found, allowed = mask(case, S_q, S_k, block)
    for _ in range(case.number_from(0, 2)):
        other, also = mask(case, S_q, S_k, block)
        step = case.pick("&|~")
        if step == "~":
            other, also = ~other, ~also
        found, allowed = (found | other, allowed | also) if step == "|" else (found & other, allowed & also)
    return found, np.asarray(allowed)


@kind("mask.combine", 8)
def combine(case: Case) -> None:
    S_q, S_k, block = length(case), length(case), case.pick(case.pool.mask_blocks)
    if case.chance(0.2):
        S_q, S_k = block * case.number_from(1, 3), block * case.number_from(1, 3)
    elif case.chance(0.3):
        block = (block, case.pick(case.pool.mask_blocks))
    found, allowed = combined(case, S_q, S_k, block)
    case.same("to_dense", found.to_dense(), allowed)
    case.true("allowed", found.allowed == allowed.sum())
    case.same("density", found.density, allowed.mean(), 1e-12)
    again = BlockMask.from_dense(here(case, allowed), block=block)
    case.true("equal", found == again and hash(found) == hash(again))
    flipped = allowed.copy()
    flipped[0, 0] ^= True
    case.true("not equal", found != BlockMask.from_dense(here(case, flipped), block=block))
    bq, bk = found.block
    if S_q % bq == 0 and S_k % bk == 0:
        case.same("to_bsr", found.to_bsr().toarray(), allowed)
        case.same("from_bsr", BlockMask.from_bsr(found.to_bsr()).to_dense(), allowed)
    other, also = combined(case, S_q, S_k, block)
    axis = case.pick(("heads", "batch"))
    both = BlockMask.stack([found, other], axis=axis)
    want = np.stack([allowed, also])
    case.same("stack", both.to_dense(), want[None] if axis == "heads" else want[:, None])
    first_q, first_k = (case.number_from(0, -(-n // b)) * b for n, b in zip((S_q, S_k), found.block, strict=True))
    corner = both[first_q:, :first_k]
    case.same("slice", corner.to_dense(), case.host(both.to_dense())[..., first_q:, :first_k])
    case.true("empty", corner.is_empty == (not case.host(corner.to_dense()).any()))
    case.same("get", case.host(found.get().to_device(case.place.backend.name).to_dense()), allowed)
    case.true("size", found.nbytes > 0 and found.device is not None and "BlockMask" in repr(found))
    if len(case.host(found.kinds)):
        case.true("elements", found.elements(int(case.host(found.kinds)[0])).shape == found.block)


@kind("mask.documents", 2)
def documents(case: Case) -> None:
    cuts = np.append(0, np.cumsum(case.rng.integers(0, 50, case.number_from(1, 5))))
    if not cuts[-1]:
        return
    found = BlockMask.documents(cuts, block=case.pick(case.pool.mask_blocks), device=case.place.backend.name)
    number = np.searchsorted(cuts, np.arange(cuts[-1]), side="right")
    case.same("documents", found.to_dense(), number[:, None] == number)


# ------------------------------------------------------------------------------------------ attention
def near(case: Case, what: str, got: Any, want: Exact, off: tuple[Any, Any]) -> None:
    """Compare a result and its logarithms, both in "bhsd"; the rounding of the result's own dtype is added."""
    out, lse = (case.host(x) for x in got)
    info = ml_dtypes.finfo(out.dtype)
    own = float(info.eps) * np.abs(want.out) + float(info.smallest_subnormal)
    case.same(what, out, want.out, off[0] + own)
    case.same(f"{what}: lse", lse, want.lse, off[1])


def options_of(case: Case, S_q: int, S_k: int) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Keywords of `attention` that decide which keys are seen, and these keys."""
    found: dict[str, Any] = {"align": case.pick(("bottom-right", "top-left"))}
    if case.chance(0.4):
        found["causal"] = True
    if case.chance(0.3):
        found["window"] = (case.number_from(-1, 40), case.number_from(-1, 10))
    seen = seen_keys(S_q, S_k, found)
    if case.chance(0.4):
        found["mask"], allowed = combined(case, S_q, S_k, case.pick(case.pool.mask_blocks))
        seen = seen & allowed
    return found, seen


@kind("attention.plain", 14)
def attention(case: Case) -> None:
    dtype, D, D_v = case.pick(case.pool.heads)
    B, H, group = case.pick((1, 2)), case.pick((1, 2)), case.pick((1, 2, 4))
    S_q, S_k = length(case), length(case)
    q, k, v = (normal(case, s, dtype) for s in ((B, H * group, S_q, D), (B, H, S_k, D), (B, H, S_k, D_v)))
    options, seen = options_of(case, S_q, S_k)
    scale = case.pick((None, None, 0.3))
    softcap = case.pick((None, None, None, 5.0))
    layout = case.pick(("bhsd", "bshd"))
    there = [_laid_out(case, x, layout) for x in (q, k, v)]
    want = exact(q, k, v, seen, scale, softcap)
    off = bounds(want, dtype, accumulator_dtype(dtype), D, not case.place.is_host)
    for _ in range(2):  # the second call may repeat the launch of the first
        out, lse = bg.attention(*there, scale=scale, softcap=softcap, layout=layout, return_lse=True, **options)
        got = (out if layout == "bhsd" else out.swapaxes(1, 2), lse)
        near(case, f"attention {dtype} {D, D_v} {S_q, S_k} {sorted(options)}", got, want, off)


def _laid_out(case: Case, x: np.ndarray[Any, Any], layout: str) -> Any:
    """An operand here in a layout; sometimes a part of a longer array."""
    if layout == "bshd":
        x = np.ascontiguousarray(x.swapaxes(1, 2))
    if case.chance(0.8):
        return here(case, x)
    room = here(case, np.concatenate([x, x], axis=1))
    return room[:, : x.shape[1]]


@kind("attention.sequences", 5)
def sequences(case: Case) -> None:
    dtype, D, D_v = case.pick(case.pool.heads)
    H, group, count = case.pick((1, 2)), case.pick((1, 2)), case.number_from(1, 4)
    q_cuts, k_cuts = (np.append(0, np.cumsum(case.rng.integers(0, 90, count))) for _ in range(2))
    if case.chance(0.5):
        k_cuts = q_cuts
    if not q_cuts[-1] or not k_cuts[-1]:
        return
    q = normal(case, (int(q_cuts[-1]), H * group, D), dtype)
    k, v = (normal(case, (int(k_cuts[-1]), H, d), dtype) for d in (D, D_v))
    options: dict[str, Any] = {"causal": case.chance(0.5), "align": case.pick(("bottom-right", "top-left"))}
    seen = np.zeros((len(q), len(k)), bool)
    for i in range(count):
        rows, cols = slice(*q_cuts[i : i + 2]), slice(*k_cuts[i : i + 2])
        seen[rows, cols] = seen_keys(rows.stop - rows.start, cols.stop - cols.start, options)
    want = exact(*(x[None].swapaxes(1, 2) for x in (q, k, v)), seen, None, None)
    cuts = [here(case, x.astype(np.int32)) if case.chance(0.5) else x for x in (q_cuts, k_cuts)]
    there = [here(case, x) for x in (q, k, v)]
    out, lse = bg.attention(*there, cu_seqlens_q=cuts[0], cu_seqlens_k=cuts[1], return_lse=True, **options)
    off = bounds(want, dtype, accumulator_dtype(dtype), D, not case.place.is_host)
    near(case, f"cu_seqlens {q_cuts} {k_cuts} {dtype}", (case.host(out)[None].swapaxes(1, 2), lse[None]), want, off)


@kind("attention.fp8", 4)
def attention_fp8(case: Case) -> None:
    _, D, D_v = case.pick(case.pool.heads)
    B, H, group, S_q, S_k = 1, case.pick((1, 2)), case.pick((1, 2)), length(case), length(case)
    shapes = ((B, H * group, S_q, D), (B, H, S_k, D), (B, H, S_k, D_v))
    coded = [normal(case, s, F32).astype(FLOAT8) for s in shapes]
    scales = [case.rng.uniform(0.5, 2, s[:2]).astype(np.float32) for s in shapes]
    options, seen = options_of(case, S_q, S_k)
    exactly = [x.astype(np.float64) * s[:, :, None, None] for x, s in zip(coded, scales, strict=True)]
    want = exact(*exactly, seen, None, None)
    given: dict[str, Any] = {f"{name}_scale": here(case, s) for name, s in zip("qkv", scales, strict=True)}
    there = [here(case, x.view(np.uint8)) for x in coded]
    got = bg.attention(*there, return_lse=True, **given, **options)
    near(case, f"fp8 {D, D_v} {S_q, S_k} {sorted(options)}", got, want, fp8_bounds(want, not case.place.is_host))


# --------------------------------------------------------------------------------------------- decode
@kind("decode.cache", 8)
def decode(case: Case) -> None:
    """A cache that grows, is read after each step, and loses sequences now and then."""
    dtype, D = case.pick(case.pool.decode_heads)
    B, H, group, page = case.number_from(1, 3), case.pick((1, 2)), case.pick((1, 4)), case.pick((None, 16, 32))
    cache = bg.KVCache(B, H, 160, D, dtype=dtype, page=page, device=case.place.backend.name)
    held: list[list[Any]] = [[np.zeros((H, 0, D), dtype)] * 2 for _ in range(B)]
    if case.chance(0.3):
        cache.reserve(case.number_from(1, 160))
    for _ in range(case.number_from(1, 4)):
        n = case.number_from(1, 40)
        layout = case.pick(("bhsd", "bshd"))
        k, v = (normal(case, (B, H, n, D), dtype) for _ in range(2))
        takes = case.rng.integers(0, n, B, endpoint=True) if case.chance(0.6) else np.full(B, n)
        turned = [here(case, np.ascontiguousarray(x if layout == "bhsd" else x.swapaxes(1, 2))) for x in (k, v)]
        with at_times_overlapping(case):
            cache.append(*turned, None if (takes == n).all() else takes.tolist(), layout=layout)
        for b in range(B):
            held[b] = [
                np.concatenate([old, new[b, :, : takes[b]]], axis=1) for old, new in zip(held[b], (k, v), strict=True)
            ]
        case.true("lengths", cache.lengths.tolist() == [x.shape[1] for x, _ in held])
        read(case, cache, held, group)
        if case.chance(0.2):
            b = case.number_from(0, B - 1)
            cache.reset(b)
            held[b] = [np.zeros((H, 0, D), dtype)] * 2
    b = case.number_from(0, B - 1)
    for what, got, kept in zip(("keys", "values"), cache.gathered(b), held[b], strict=True):
        case.same(f"gathered {what}", got, widened(kept))
    case.true("text", "KVCache" in repr(cache) and cache.nbytes > 0 and cache.device is not None)
    case.true("nothing refused", not cache.refused.any())


@kind("decode.graph", 1.5, card=True)
def decode_graph(case: Case) -> None:
    """A graph appends a token to each sequence and reads the cache; it is replayed, at times until nothing fits."""
    import cupy

    dtype, D = case.pick(case.pool.decode_heads)
    B, H, group, page = case.number_from(1, 3), case.pick((1, 2)), case.pick((1, 4)), case.pick((None, 16))
    capacity, n = case.number_from(20, 80), case.number_from(1, 17)
    cache = bg.KVCache(B, H, capacity, D, dtype=dtype, page=page, device=case.place.backend.name)
    k, v = (normal(case, (B, H, n, D), dtype) for _ in range(2))
    cache.append(here(case, k), here(case, v))
    cache.reserve(capacity)
    held = [[k[b], v[b]] for b in range(B)]
    new_k, new_v = (here(case, np.zeros((B, H, 1, D), dtype)) for _ in range(2))
    q = here(case, normal(case, (B, H * group, 1, D), dtype))
    out = here(case, np.zeros((B, H * group, 1, D), dtype))
    stream = cupy.cuda.Stream(non_blocking=True)
    warm = bg.KVCache(B, H, 16, D, dtype=dtype, device=case.place.backend.name)
    cupy.cuda.get_current_stream().synchronize()
    with stream, at_times_overlapping(case):
        for store in (warm, cache):
            if store is cache:
                stream.begin_capture()
            store.append(new_k, new_v)
            bg.attention_decode(q, store, out=out)
        graph = stream.end_capture()
    steps = case.number_from(1, 8) if case.chance(0.7) else capacity - n + 2
    for _ in range(steps):
        k, v = (normal(case, (B, H, 1, D), dtype) for _ in range(2))
        new_k[...], new_v[...] = here(case, k), here(case, v)
        cupy.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        if held[0][0].shape[1] < capacity:
            held = [[np.concatenate([x, y[b]], axis=1) for x, y in zip(held[b], (k, v), strict=True)] for b in range(B)]
    case.true("lengths", cache.lengths.tolist() == [x.shape[1] for x, _ in held])
    case.true("refused", cache.refused.tolist() == [max(0, n + steps - capacity)] * B)
    read(case, cache, held, group)
    keys, values = (np.stack([both[i] for both in held]) for i in range(2))
    want = exact(q.get(), keys, values, np.ones((1, 1, 1, keys.shape[2]), bool), None, None)
    off = bounds(want, dtype, accumulator_dtype(dtype), D, True)[0]
    case.same("the decode of a graph", out, want.out, off + 1e-5)


def read(case: Case, cache: Any, held: list[list[Any]], group: int) -> None:
    """Compare `attention_decode` with the tokens that the sequences hold."""
    B, H, D, S_q = cache.batch, cache.kv_heads, cache.head_dim, case.pick((1, 1, 3))
    q = normal(case, (B, H * group, S_q, D), cache.dtype)
    options: dict[str, Any] = {"window": (case.number_from(0, 60), 0)} if case.chance(0.3) else {}
    n = max(1, max(k.shape[1] for k, _ in held))
    k, v = (np.zeros((B, H, n, D), cache.dtype) for _ in range(2))
    seen = np.zeros((B, 1, S_q, n), bool)
    for b, (keys, kept) in enumerate(held):
        k[b, :, : keys.shape[1]], v[b, :, : keys.shape[1]] = keys, kept
        if keys.shape[1]:
            rows = seen_keys(S_q, keys.shape[1], {"causal": True} | options)
            seen[b, 0, :, : keys.shape[1]] = rows
    if case.chance(0.3):
        block = cache.page or 16
        chosen = case.rng.permutation(-(-n // block))[: case.number_from(1, 4)]
        options |= {"blocks": here(case, chosen.astype(np.int32)[None, None]), "block": block}
        seen = seen & np.isin(np.arange(n) // block, chosen)
    want = exact(q, k, v, seen, None, None)
    acc = accumulator_dtype(cache.dtype)
    off = bounds(want, cache.dtype, acc, D, not case.place.is_host)
    with at_times_overlapping(case):
        got = bg.attention_decode(here(case, q), cache, return_lse=True, **options)
    near(case, f"decode {cache.dtype} {D} {cache.lengths} page {cache.page} {sorted(options)}", got, want, off)
