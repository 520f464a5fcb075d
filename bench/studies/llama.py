"""A model of the shape of Llama 3.1 8B, end to end: prefill with `attention`, then token by token with `KVCache`.

Random weights, each a dense array that is also a matrix of blocks as wide as itself. First the logits of a short prompt
are compared with those of plain attention. Then tokens in a second, launched kernel by kernel and as a CUDA graph of
a step, the share of attention, and what 8 heads of keys and values save against 32. A quick run has 8 layers; without a
GPU a tiny model runs on the CPU, without graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import bsrgemm as bg

from ..llama.graph import GraphDecoder
from ..llama.model import TINY, TOLERANCE, Attend, Model, Product, Shape, Weight, decoding, plain, prefilling
from ..measure import Row, Run
from ..place import Place
from ..report import Column, bandwidth, field, three
from ..study import Study


def watched(attend: Attend, place: Place) -> tuple[Attend, Callable[[], float]]:
    """An `Attend`, and its seconds over all layers: by events on the GPU, which it does not wait for."""
    marks: list[tuple[Any, Any]] = []

    def now() -> Any:
        return place.xp.cuda.get_current_stream().record() if place.on_gpu else time.perf_counter()

    def call(number: int, q: Any, k: Any, v: Any) -> Any:
        before = now()
        result = attend(number, q, k, v)
        marks.append((before, now()))
        return result

    def seconds() -> float:
        place.synchronize()
        return sum(place.xp.cuda.get_elapsed_time(a, b) / 1e3 if place.on_gpu else b - a for a, b in marks)

    return call, seconds


#: (model, caches with a prompt, logits after it, number of tokens) -> tokens and the logits after each of them
Generator = Callable[[Model, list[bg.KVCache], Any, int], list[Any]]


def generate(model: Model, caches: list[bg.KVCache], logits: Any, count: int) -> list[Any]:
    """The next `count` tokens, each the most likely one, and the logits after each of them."""
    found, start = [], int(caches[0].lengths[0])
    for place in range(start, start + count):
        token = logits.argmax(axis=1)
        logits = model.forward(token, place, decoding(caches))
        found.append((token, logits))
    return found


def replayed(model: Model, caches: list[bg.KVCache], logits: Any, count: int) -> list[Any]:
    """The same as `generate` by a graph of one step, whose logits are copied after each replay."""
    decoder = GraphDecoder(model, caches, int(logits.argmax()), int(caches[0].lengths[0]))
    found = []
    for number in range(count):
        decoder.generate(1)
        found.append((model.xp.asarray(decoder.made()[number : number + 1]), decoder.logits.copy()))
    return found


def compared(model: Model, way: Generator = generate) -> dict[str, Any]:
    """A prompt and a few tokens against the plain attention of all tokens: differences of logits over their spread."""
    xp, (length, count) = model.xp, model.shape.short
    tokens = xp.asarray(np.random.default_rng(1).integers(0, model.shape.vocabulary, length))
    caches = model.caches(length + count)
    logits = model.forward(tokens, 0, prefilling(caches))
    worst, square, same = 0.0, 0.0, True
    for token, ours in [(None, logits), *way(model, caches, logits, count)]:
        tokens = tokens if token is None else xp.concatenate([tokens, token])
        want = model.forward(tokens, 0, plain).astype(np.float32)
        off = (ours.astype(np.float32) - want) / want.std()
        worst, square = max(worst, float(abs(off).max())), max(square, float((off * off).mean()))
        same &= int(ours.argmax()) == int(want.argmax())
    # the root mean square may be a fifth of the largest difference
    error = max(worst, 5 * square**0.5) / TOLERANCE[model.shape.dtype]
    return {"largest": worst, "mean": square**0.5, "same": same, "error": error}


def llama(run: Run) -> Iterator[Row]:
    """Logits, prefill, decode, and one layer's attention with the KV heads repeated."""
    place = run.place
    shape = Shape() if place.on_gpu else TINY
    if place.quick and place.on_gpu:
        shape = replace(shape, layers=8, prompt=2048, tokens=32)
    run.say("weights")
    model = Model(shape, place.xp)
    ways: dict[str, Generator] = {"kernel by kernel": generate} | ({"by a graph": replayed} if place.on_gpu else {})
    for by, way in ways.items():
        run.say("comparison with plain attention")
        row: Row = {"what": f"logits of {shape.layers} layers, {by}"} | compared(model, way)
        yield row | ({} if row["error"] <= 1 else {"wrong": True})
        if row["error"] > 1:
            return  # wrong results are not timed
    run.say("prefill")
    if place.on_gpu and run.with_peers:
        yield prefill(model, place, "cuBLAS", Weight.dense_product)[0]
    row, caches, logits = prefill(model, place, "bsrgemm", Weight.product)
    yield row
    run.say("decode")
    row, token = decoded(model, place, caches, logits)
    yield row
    if place.on_gpu:
        yield decoded(model, place, caches, token, by_graph=True)[0]
    yield heads(model, place, caches)


def prefill(model: Model, place: Place, by: str, product: Product) -> tuple[Row, list[bg.KVCache], Any]:
    """Tokens in a second of a prompt; the filled caches and the last logits."""
    s = model.shape
    prompt = place.xp.asarray(np.random.default_rng(2).integers(0, s.vocabulary, s.prompt))

    for _ in range(2):  # the first one is warm-up
        caches = model.caches(s.positions)
        attend, inside = watched(prefilling(caches), place)
        place.synchronize()
        start = time.perf_counter()
        logits = model.forward(prompt, 0, attend, product)
        place.synchronize()
        seconds = time.perf_counter() - start
    row = {"what": f"prefill of {s.prompt} tokens, dense layers by {by}", "seconds": seconds,
           "tokens": s.prompt / seconds, "share": inside() / seconds}  # fmt: skip
    return row, caches, logits


def decoded(
    model: Model, place: Place, caches: list[bg.KVCache], after: Any, by_graph: bool = False
) -> tuple[Row, int]:
    """Tokens one by one after some logits, each kernel launched by the host, or after a token by replays of a graph.

    The row has the share of attention kernels, and the rate at which weights are read; then the token that comes next.
    """
    s = model.shape
    count = s.tokens if by_graph else s.launched
    warm = min(8, count // 2)
    if by_graph:
        decoder = GraphDecoder(model, caches, after, int(caches[0].lengths[0]))
        decoder.generate(warm)
    else:
        after = generate(model, caches, after, warm)[-1][1]
    place.synchronize()
    start = time.perf_counter()
    if by_graph:
        decoder.generate(count - warm)
        logits = decoder.logits
    else:
        logits = generate(model, caches, after, count - warm)[-1][1]
    place.synchronize()
    each = (time.perf_counter() - start) / (count - warm)
    if not bool(place.xp.isfinite(logits).all()) or caches[0].refused.any():
        raise ValueError("logits: wanted finite numbers, and room in the caches for all tokens")
    q = place.xp.ones((1, s.heads, 1, s.dim), s.dtype)
    inside = s.layers * place.seconds(lambda: bg.attention_decode(q, caches[-1]))
    read = (s.parameters - s.vocabulary * s.hidden) * np.dtype(s.dtype).itemsize  # all weights but the embedding
    row = {"what": f"decode of {count - warm} tokens, {'by a graph' if by_graph else 'kernel by kernel'}",
           "seconds": each * (count - warm), "tokens": 1 / each, "share": inside / each, "weights": read / each,
           }  # fmt: skip
    return row, int(logits.argmax())


def heads(model: Model, place: Place, caches: list[bg.KVCache]) -> Row:
    """Bytes of keys and values, and the attention of a layer, with shared and with repeated KV heads."""
    s = model.shape
    held, group = sum(cache.nbytes for cache in caches), s.heads // s.kv_heads
    k, v = (x[None] for x in caches[0].gathered(0))
    q = place.xp.ones((1, s.heads, k.shape[2], s.dim), s.dtype)
    q[...] = k.repeat(group, axis=1)
    out = place.xp.empty_like(q)
    seconds = {}
    for name, kv in {"shared": (k, v), "repeated": tuple(x.repeat(group, axis=1) for x in (k, v))}.items():
        seconds[name] = place.seconds(partial(bg.attention, q, *kv, causal=True, out=out))
    return {"what": f"attention of a layer, {s.kv_heads} KV heads for {s.heads}, {held / 1e9:.2f} GB of them",
            "seconds": seconds["shared"], "repeated": seconds["repeated"], "kv_bytes": held}  # fmt: skip


STUDIES = (
    Study(
        "llama", "a model of the shape of Llama 3.1 8B, random weights", llama,
        (
            Column("tokens a second", lambda row: three(row.get("tokens")) if row.get("tokens") else ""),
            field("attention's share", "share", lambda share: f"{share:.0%}"),
            field("weights read", "weights", bandwidth),
            Column("largest difference of logits", lambda row: f"{row['largest']:.1e}" if "largest" in row else ""),
            Column("ms", lambda row: f"{row['seconds'] * 1e3:.2f}" if row.get("seconds") else ""),
            field("repeated heads, ms", "repeated", lambda x: f"{x * 1e3:.2f}"),
        ),
    ),
)  # fmt: skip
