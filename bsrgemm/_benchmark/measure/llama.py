"""A model of the shape of Llama 3.1 8B, end to end: prefill with `attention`, then token by token with `KVCache`.

Random weights, each a dense array that is also a matrix of blocks as wide as itself: dense layers by bsrgemm, those of
the prompt also by cuBLAS, everything between them by a few small kernels. First the logits of a short prompt are
compared with those of the same model whose attention is written out plainly. Then tokens per second, launched kernel by
kernel and as a CUDA graph of one step, the share of attention, and what 8 heads of keys and values save against 32.
Without a GPU a tiny model runs on the CPU, without graphs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import bsrgemm as bg

from .. import machine, provenance
from ..cases.llama import TINY, TOLERANCE, Attend, Model, Product, Shape, Weight, decoding, plain, prefilling
from ..cases.llama_graph import GraphDecoder
from ..runner import Bench
from ..table import Table, writing
from ..timing import Clock


# ------------------------------------------------------------------------------------ measurement
def synchronize(xp: Any) -> None:
    if xp is not np:
        xp.cuda.Device().synchronize()


class Stopwatch:
    """Seconds of an `Attend`, summed over the layers: by events on the GPU, which it does not wait for."""

    def __init__(self, attend: Attend, xp: Any) -> None:
        self._attend, self._xp = attend, xp
        self._marks: list[tuple[Any, Any]] = []

    def __call__(self, number: int, q: Any, k: Any, v: Any) -> Any:
        before = self._now()
        result = self._attend(number, q, k, v)
        self._marks.append((before, self._now()))
        return result

    def _now(self) -> Any:
        return time.perf_counter() if self._xp is np else self._xp.cuda.get_current_stream().record()

    def seconds(self) -> float:
        synchronize(self._xp)
        if self._xp is np:
            return sum(b - a for a, b in self._marks)
        return sum(self._xp.cuda.get_elapsed_time(a, b) for a, b in self._marks) / 1e3


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
    xp = model.xp
    decoder = GraphDecoder(model, caches, int(logits.argmax()), int(caches[0].lengths[0]))
    found = []
    for number in range(count):
        decoder.generate(1)
        found.append((xp.asarray(decoder.made()[number : number + 1]), decoder.logits.copy()))
    return found


#: (model, caches with a prompt, logits after it, number of tokens) -> tokens and the logits after each of them
Generator = Callable[[Model, list[bg.KVCache], Any, int], list[Any]]


def compared(model: Model, generate: Generator = generate) -> tuple[float, float, bool]:
    """(largest difference of logits over their spread, its root mean square, do the likeliest tokens agree).

    A prompt and a few tokens, against the plain attention of all tokens at once.
    """
    xp, (length, count) = model.xp, model.shape.short
    prompt = xp.asarray(np.random.default_rng(1).integers(0, model.shape.vocabulary, length))
    caches = model.caches(length + count)
    logits = model.forward(prompt, 0, prefilling(caches))
    steps = generate(model, caches, logits, count)
    worst, square, same = 0.0, 0.0, True
    tokens = prompt
    for token, ours in [(None, logits), *steps]:
        tokens = tokens if token is None else xp.concatenate([tokens, token])
        want = model.forward(tokens, 0, plain).astype(np.float32)
        off = (ours.astype(np.float32) - want) / want.std()
        worst, square = max(worst, float(abs(off).max())), max(square, float((off * off).mean()))
        same &= int(ours.argmax()) == int(want.argmax())
    return worst, square**0.5, same


def measure(model: Model, table: Table) -> None:
    """Prefill, decode, and one layer's attention with the KV heads repeated."""
    on_gpu = model.xp is not np
    if on_gpu:
        measure_prefill(model, table, "cuBLAS", Weight.dense_product)
    caches, logits = measure_prefill(model, table, "bsrgemm", Weight.product)
    token = measure_decode(model, table, caches, logits)
    if on_gpu:
        measure_graph(model, table, caches, token)
    measure_heads(model, table, caches)


def measure_prefill(model: Model, table: Table, by: str, product: Product) -> tuple[list[bg.KVCache], Any]:
    """Tokens a second of a prompt, and the share of attention in it; the filled caches and the last logits."""
    xp, s = model.xp, model.shape
    prompt = xp.asarray(np.random.default_rng(2).integers(0, s.vocabulary, s.prompt))

    def prefill() -> tuple[list[bg.KVCache], Any, float, float]:
        caches = model.caches(s.positions)
        watch = Stopwatch(prefilling(caches), xp)
        synchronize(xp)
        start = time.perf_counter()
        logits = model.forward(prompt, 0, watch, product)
        synchronize(xp)
        return caches, logits, time.perf_counter() - start, watch.seconds()

    table.progress("prefill")
    prefill()  # warm
    caches, logits, seconds, inside = prefill()
    table.add(
        f"prefill of {s.prompt} tokens   {seconds * 1e3:9.1f} ms, {s.prompt / seconds:9.0f} tokens/s, "
        f"attention with the cache {inside / seconds:.1%} of the time, dense layers by {by}",
        what="prefill", tokens=s.prompt, seconds=seconds, tokens_per_second=s.prompt / seconds,
        attention_seconds=inside, attention_share=inside / seconds, by=by,
    )  # fmt: skip
    return caches, logits


def measure_decode(model: Model, table: Table, caches: list[bg.KVCache], logits: Any) -> int:
    """Tokens a second one by one, each kernel launched by the host; the token that comes next."""
    xp, s = model.xp, model.shape
    table.progress("decode")
    warm = min(8, s.launched // 2)
    logits = generate(model, caches, logits, warm)[-1][1]
    synchronize(xp)
    start = time.perf_counter()
    steps = generate(model, caches, logits, s.launched - warm)
    synchronize(xp)
    add_decode(model, table, caches, s.launched - warm, time.perf_counter() - start, "launched")
    logits = steps[-1][1]
    assert bool(xp.isfinite(logits).all())
    return int(logits.argmax())


def measure_graph(model: Model, table: Table, caches: list[bg.KVCache], token: int) -> None:
    """The same, a step being replayed as a CUDA graph."""
    s = model.shape
    warm = min(8, s.tokens // 2)
    decoder = GraphDecoder(model, caches, token, int(caches[0].lengths[0]))
    decoder.generate(warm)
    decoder.stream.synchronize()
    start = time.perf_counter()
    decoder.generate(s.tokens - warm)
    decoder.stream.synchronize()
    add_decode(model, table, caches, s.tokens - warm, time.perf_counter() - start, "graph")
    assert bool(model.xp.isfinite(decoder.logits).all())
    assert not caches[0].refused.any() and int(caches[0].lengths[0]) == s.positions


def add_decode(model: Model, table: Table, caches: list[bg.KVCache], count: int, seconds: float, by: str) -> None:
    """A row of so many tokens: the share of attention kernels, and the rate at which weights are read."""
    xp, s = model.xp, model.shape
    seconds /= count
    q = xp.ones((1, s.heads, 1, s.dim), s.dtype)
    inside = s.layers * clock_of(xp).seconds(lambda: bg.attention_decode(q, caches[-1]))
    read = (s.parameters - s.vocabulary * s.hidden) * np.dtype(s.dtype).itemsize  # all weights but the embedding
    how = "by replays of a graph" if by == "graph" else "kernel by kernel"
    table.add(
        f"decode of {count:3d} tokens     {seconds * 1e3:9.3f} ms a token, {1 / seconds:9.1f} tokens/s {how}, "
        f"attention kernels {inside / seconds:.1%} of the time, weights read at {read / seconds / 1e12:.2f} TB/s",
        what="decode", tokens=count, seconds_per_token=seconds, tokens_per_second=1 / seconds,
        attention_seconds=inside, attention_share=inside / seconds, weight_bytes=read, by=by,
    )  # fmt: skip


def measure_heads(model: Model, table: Table, caches: list[bg.KVCache]) -> None:
    """Bytes of keys and values, and the attention of a layer, with shared and with repeated KV heads."""
    xp, s = model.xp, model.shape
    held = sum(cache.nbytes for cache in caches)
    group = s.heads // s.kv_heads
    k, v = (x[None] for x in caches[0].gathered(0))
    q = xp.ones((1, s.heads, k.shape[2], s.dim), s.dtype)
    q[...] = k.repeat(group, axis=1)
    out = xp.empty_like(q)
    both = {"shared": (k, v), "repeated": (k.repeat(group, axis=1), v.repeat(group, axis=1))}
    calls = {name: partial(bg.attention, q, *kv, causal=True, out=out) for name, kv in both.items()}

    def failed(name: str, error: Exception) -> None:
        raise error

    times = {name: timing.seconds for name, timing in clock_of(xp).interleaved(calls, failed).items()}
    table.add(
        f"{s.kv_heads} KV heads for {s.heads}      {held / 1e6:9.1f} MB of keys and values, repeated "
        f"{held * group / 1e6:.1f} MB (computed); attention of a layer {times['shared'] * 1e3:.3f} ms, "
        f"repeated {times['repeated'] * 1e3:.3f} ms",
        what="kv heads", kv_bytes=held, repeated_kv_bytes=held * group, layer_seconds=times,
    )  # fmt: skip


def clock_of(xp: Any) -> Clock:
    return Clock("cpu" if xp is np else "cuda")


def run(shape: Shape, xp: Any, table: Table) -> None:
    """Make the model, compare it, and measure it if it is right."""
    start = time.perf_counter()
    table.progress("weights")
    model = Model(shape, xp)
    synchronize(xp)
    size = np.dtype(shape.dtype).itemsize
    table.note(
        f"{shape.layers} layers, {shape.parameters / 1e9:.2f} G parameters, {shape.parameters * size / 1e9:.1f} GB "
        f"of {shape.dtype}, made in {time.perf_counter() - start:.1f} s"
    )
    ways: dict[str, Generator] = {"launched": generate} | ({} if xp is np else {"graph": replayed})
    for by, way in ways.items():
        table.progress("comparison with plain attention")
        worst, mean, same = compared(model, way)
        good = worst <= TOLERANCE[shape.dtype] and mean <= TOLERANCE[shape.dtype] / 5
        table.add(
            f"logits against plain attention, {by}: largest difference {worst:.1e}, mean {mean:.1e} of their spread, "
            f"likeliest tokens {'agree' if same else 'differ'} | {'good' if good else 'WRONG'}",
            what="logits", largest=worst, mean=mean, same=same, good=good, layers=shape.layers, by=by,
        )  # fmt: skip
        if not good:
            table.note("not timed, since it is wrong")
            return
    measure(model, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 layers, 2048 tokens of prompt, 32 of answer")
    parser.add_argument("--layers", type=int, metavar="N", help="so many layers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured to this file")
    provenance.add_option(parser)
    options = parser.parse_args(argv)
    bench = Bench(device="cuda" if machine.has_gpu() else "cpu")
    shape = Shape() if bench.on_gpu else TINY
    if options.quick and bench.on_gpu:
        shape = replace(shape, layers=8, prompt=2048, tokens=32)
    if options.layers:
        shape = replace(shape, layers=options.layers)
    start = time.perf_counter()
    with provenance.recording() as launched:
        table = Table(f"llama_{bench.device}", "Llama 3.1 8B with random weights", launched)
        try:
            with writing(table, bench.on_gpu and not options.quick and not options.layers):
                run(shape, bench.xp, table)
        finally:
            if options.json:
                options.json.write_text(json.dumps(table.found() | {"model": shape.__dict__}, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")
