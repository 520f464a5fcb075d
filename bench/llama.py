"""A model of the shape of Llama 3.1 8B, end to end: prefill with `attention`, then token by token with `KVCache`.

Random weights; dense layers by cupy.matmul, everything between them by the few small kernels below. First the logits of
a short prompt are compared with those of the same model whose attention is written out plainly. Then tokens per second,
the share of attention, and what 8 heads of keys and values save against 32. Without a GPU a tiny model runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Table, has_gpu, machine, writing

import bsrgemm as bg
from bsrgemm._benchmark.timing import time_cpu, time_gpu

#: Of RMSNorm, and of rotary embedding
EPSILON, THETA = 1e-5, 500_000.0
#: Elements of weights that are drawn at a time; scores that are held at a time by the plain attention
CHUNK = 1 << 26
#: Largest difference of two logits over their spread, five times what its root mean square may be. Rounding to float16
#: through 16 layers costs 3e-3; one key of 70 that is not seen, 2e-1.
TOLERANCE = {"float16": 5e-2, "float32": 1e-4}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and of what it is asked."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    inner: int = 14336
    vocabulary: int = 128256
    dtype: str = "float16"
    prompt: int = 8192
    tokens: int = 256
    #: prompt and tokens of the comparison with plain attention
    short: tuple[int, int] = (1000, 4)

    @property
    def parameters(self) -> int:
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.dim
        layer = qkv + self.heads * self.dim * self.hidden + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


TINY = Shape(
    layers=2, hidden=256, heads=4, kv_heads=2, dim=64, inner=512, vocabulary=1000, dtype="float32",
    prompt=128, tokens=8, short=(70, 4),
)  # fmt: skip


# ---------------------------------------------------------------------------------- small kernels
@cache
def kernels() -> Any:
    """RMSNorm, rotary embedding and SwiGLU on the GPU; computed in float32 whatever the dtype.

    Their names are names of C functions: CUDA has a `norm` of its own.
    """
    import cupy

    class Kernels:
        squares = cupy.ReductionKernel(
            "T x", "float32 y", "(float)x * (float)x", "a + b", "y = a", "0", "llama_squares", reduce_type="float"
        )
        norm = cupy.ElementwiseKernel(
            "T x, float32 squares, T w, float32 mean",
            "T y",
            f"y = (T)((float)x * rsqrtf(squares * mean + {EPSILON}f) * (float)w)",
            "llama_norm",
        )
        rotate = cupy.ElementwiseKernel(
            "float32 c, float32 s",
            "T x, T y",
            "float a = (float)x, b = (float)y; x = (T)(a * c - b * s); y = (T)(b * c + a * s)",
            "llama_rotate",
        )
        swiglu = cupy.ElementwiseKernel(
            "T gate, T up", "T y", "float g = (float)gate; y = (T)(g / (1.0f + expf(-g)) * (float)up)", "llama_swiglu"
        )

    return Kernels


def rms_norm(x: Any, weight: Any) -> Any:
    """x / sqrt(mean(x^2)) * weight by rows."""
    if isinstance(x, np.ndarray):
        wide = x.astype(np.float32)
        scale = np.sqrt((wide * wide).mean(axis=1, keepdims=True) + np.float32(EPSILON))
        return (wide / scale * weight).astype(x.dtype)
    return kernels().norm(x, kernels().squares(x, axis=1, keepdims=True), weight, 1 / x.shape[1])


def rotate(x: Any, cos: Any, sin: Any) -> None:
    """Turn the pairs (i, i + D / 2) of x (tokens, heads, D) by the angles of the tokens (tokens, 1, D / 2)."""
    half = x.shape[2] // 2
    a, b = x[..., :half], x[..., half:]
    if isinstance(x, np.ndarray):
        a[...], b[...] = a * cos - b * sin, b * cos + a * sin
    else:
        kernels().rotate(cos, sin, a, b)


def swiglu(both: Any) -> Any:
    """silu(gate) * up, for rows of gate and up side by side."""
    inner = both.shape[1] // 2
    gate, up = both[:, :inner], both[:, inner:]
    if isinstance(both, np.ndarray):
        gate, up = gate.astype(np.float32), up.astype(np.float32)
        return (gate / (1 + np.exp(-gate)) * up).astype(both.dtype)
    return kernels().swiglu(gate, up)


# ------------------------------------------------------------------------------------------ model
class Layer(NamedTuple):
    """Weights of a layer, each (inputs, outputs)."""

    norm: Any
    qkv: Any
    out: Any
    inner_norm: Any
    gate_up: Any
    down: Any


#: (number of the layer, q (tokens, heads, D), k and v (tokens, KV heads, D)) -> like q
Attend = Callable[[int, Any, Any, Any], Any]


class Model:
    """Random weights, and the way of tokens through them."""

    def __init__(self, shape: Shape, xp: Any) -> None:
        self.shape, self.xp = shape, xp
        self._rng = xp.random.default_rng(0)
        h, (H, H_kv, D) = shape.hidden, (shape.heads, shape.kv_heads, shape.dim)
        quiet = 1 / (2 * shape.layers) ** 0.5  # what layers add to the sum stays of its size
        self.embedding, self.head = self._weights(shape.vocabulary, h, 1.0), self._weights(h, shape.vocabulary)
        self.norm = xp.ones(h, shape.dtype)
        self.layers = []
        for _ in range(shape.layers):
            qkv = self._weights(h, (H + 2 * H_kv) * D)
            qkv[:, : H * D] *= 3  # scores spread by 3, so that a few keys matter, as in a trained model
            out = self._weights(H * D, h, quiet / (H * D) ** 0.5)
            down = self._weights(shape.inner, h, quiet / shape.inner**0.5)
            gate_up = self._weights(h, 2 * shape.inner)
            self.layers.append(Layer(self.norm, qkv, out, self.norm, gate_up, down))
        angles = np.arange(shape.prompt + shape.tokens)[:, None] * THETA ** (-np.arange(0, D, 2) / D)
        self.cos, self.sin = (xp.asarray(f(angles).astype(np.float32)[:, None]) for f in (np.cos, np.sin))

    def _weights(self, rows: int, columns: int, spread: float | None = None) -> Any:
        """Normal numbers, of spread 1 / sqrt(rows) unless told."""
        result = self.xp.empty((rows, columns), self.shape.dtype)
        flat = result.reshape(-1)
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            drawn = self._rng.standard_normal(part.size, dtype=np.float32)
            drawn *= np.float32(rows**-0.5 if spread is None else spread)
            part[...] = drawn.astype(self.shape.dtype)
        return result

    def forward(self, tokens: Any, start: int, attend: Attend) -> Any:
        """Logits behind the last of some tokens, the first of which has place `start`."""
        s, n = self.shape, len(tokens)
        H, H_kv, D = s.heads, s.kv_heads, s.dim
        cos, sin = self.cos[start : start + n], self.sin[start : start + n]
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            qkv = (rms_norm(x, layer.norm) @ layer.qkv).reshape(n, H + 2 * H_kv, D)
            rotate(qkv[:, : H + H_kv], cos, sin)
            q, k, v = qkv[:, :H], qkv[:, H : H + H_kv], qkv[:, H + H_kv :]
            x += attend(number, q, k, v).reshape(n, H * D) @ layer.out
            x += swiglu(rms_norm(x, layer.inner_norm) @ layer.gate_up) @ layer.down
        return rms_norm(x[-1:], self.norm) @ self.head

    def caches(self, capacity: int) -> list[bg.KVCache]:
        s, device = self.shape, "cpu" if self.xp is np else "cuda"
        return [bg.KVCache(1, s.kv_heads, capacity, s.dim, dtype=s.dtype, device=device) for _ in self.layers]


def prefilling(caches: list[bg.KVCache]) -> Attend:
    """Causal attention of a prompt, whose keys and values the caches keep."""

    def attend(number: int, q: Any, k: Any, v: Any) -> Any:
        caches[number].append(k[None], v[None], layout="bshd")
        return bg.attention(q[None], k[None], v[None], causal=True, layout="bshd")[0]

    return attend


def decoding(caches: list[bg.KVCache]) -> Attend:
    """Attention of the next token on what the caches hold, and itself."""

    def attend(number: int, q: Any, k: Any, v: Any) -> Any:
        caches[number].append(k[None], v[None], layout="bshd")
        return bg.attention_decode(q[None], caches[number], layout="bshd")[0]

    return attend


def plain(number: int, q: Any, k: Any, v: Any) -> Any:
    """Causal attention with all scores of a head in float32, some queries at a time."""
    xp = bg.get_array_module(q)
    n, H, D = q.shape
    out, step = xp.empty_like(q), max(1, CHUNK // n)
    key = xp.arange(n)
    for h in range(H):
        keys, values = (x[:, h * k.shape[1] // H].astype(np.float32) for x in (k, v))
        for start in range(0, n, step):
            rows = slice(start, start + step)
            scores = q[rows, h].astype(np.float32) @ keys.T * np.float32(D**-0.5)
            scores = xp.where(key <= key[rows, None], scores, np.float32(-np.inf))
            weights = xp.exp(scores - scores.max(axis=1, keepdims=True))
            out[rows, h] = (weights @ values / weights.sum(axis=1, keepdims=True)).astype(q.dtype)
    return out


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
    """So many more tokens, each the likeliest, and the logits behind each of them."""
    found, start = [], int(caches[0].lengths[0])
    for place in range(start, start + count):
        token = logits.argmax(axis=1)
        logits = model.forward(token, place, decoding(caches))
        found.append((token, logits))
    return found


def compared(model: Model) -> tuple[float, float, bool]:
    """(largest difference of logits over their spread, its root mean square, do the likeliest tokens agree).

    A prompt and a few tokens, against the plain attention of all tokens at once behind the same ones.
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
    xp, s = model.xp, model.shape
    prompt = xp.asarray(np.random.default_rng(2).integers(0, s.vocabulary, s.prompt))

    def prefill() -> tuple[list[bg.KVCache], Any, float, float]:
        caches = model.caches(s.prompt + s.tokens)
        watch = Stopwatch(prefilling(caches), xp)
        synchronize(xp)
        start = time.perf_counter()
        logits = model.forward(prompt, 0, watch)
        synchronize(xp)
        return caches, logits, time.perf_counter() - start, watch.seconds()

    table.progress("prefill")
    prefill()  # warm
    caches, logits, seconds, inside = prefill()
    table.add(
        f"prefill of {s.prompt} tokens   {seconds * 1e3:9.1f} ms, {s.prompt / seconds:9.0f} tokens/s, "
        f"attention with the cache {inside / seconds:.1%} of the time",
        what="prefill", tokens=s.prompt, seconds=seconds, tokens_per_second=s.prompt / seconds,
        attention_seconds=inside, attention_share=inside / seconds,
    )  # fmt: skip

    table.progress("decode")
    warm = min(8, s.tokens // 2)
    logits = generate(model, caches, logits, warm)[-1][1]
    synchronize(xp)
    start = time.perf_counter()
    steps = generate(model, caches, logits, s.tokens - warm)
    synchronize(xp)
    seconds = (time.perf_counter() - start) / (s.tokens - warm)
    assert all(bool(xp.isfinite(logits).all()) for _, logits in steps[-1:])
    q = xp.ones((1, s.heads, 1, s.dim), s.dtype)

    def one() -> Any:
        return bg.attention_decode(q, caches[-1])

    inside = s.layers * (time_cpu(one) if xp is np else time_gpu(one))
    read = (s.parameters - s.vocabulary * s.hidden) * np.dtype(s.dtype).itemsize  # all weights but the embedding
    table.add(
        f"decode of {s.tokens - warm} tokens     {seconds * 1e3:9.3f} ms a token, {1 / seconds:9.1f} tokens/s, "
        f"attention kernels {inside / seconds:.1%} of the time, weights read at {read / seconds / 1e12:.2f} TB/s",
        what="decode", tokens=s.tokens - warm, seconds_per_token=seconds, tokens_per_second=1 / seconds,
        attention_seconds=inside, attention_share=inside / seconds, weight_bytes=read,
    )  # fmt: skip

    held = sum(cache.nbytes for cache in caches)
    group = s.heads // s.kv_heads
    k, v = (x[None] for x in caches[0].gathered(0))
    q = xp.ones((1, s.heads, k.shape[2], s.dim), s.dtype)
    q[...] = k.repeat(group, axis=1)
    out = xp.empty_like(q)
    both = {"shared": (k, v), "repeated": (k.repeat(group, axis=1), v.repeat(group, axis=1))}
    clock = time_cpu if xp is np else time_gpu
    times = {
        name: clock(lambda k=k, v=v: bg.attention(q, k, v, causal=True, out=out), 5) for name, (k, v) in both.items()
    }
    table.add(
        f"{s.kv_heads} KV heads for {s.heads}      {held / 1e6:9.1f} MB of keys and values, repeated "
        f"{held * group / 1e6:.1f} MB (computed); attention of a layer {times['shared'] * 1e3:.3f} ms, "
        f"repeated {times['repeated'] * 1e3:.3f} ms",
        what="kv heads", kv_bytes=held, repeated_kv_bytes=held * group, layer_seconds=times,
    )  # fmt: skip


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
    table.progress("comparison with plain attention")
    worst, mean, same = compared(model)
    good = worst <= TOLERANCE[shape.dtype] and mean <= TOLERANCE[shape.dtype] / 5
    table.add(
        f"logits against plain attention: largest difference {worst:.1e}, mean {mean:.1e} of their spread, "
        f"likeliest tokens {'agree' if same else 'differ'} | {'good' if good else 'WRONG'}",
        what="logits", largest=worst, mean=mean, same=same, good=good, layers=shape.layers,
    )  # fmt: skip
    if good:
        measure(model, table)
    else:
        table.note("not timed, since it is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 layers, 2048 tokens of prompt, 32 of answer")
    parser.add_argument("--layers", type=int, metavar="N", help="so many layers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured to this file")
    options = parser.parse_args()
    on_gpu = has_gpu()
    shape = Shape() if on_gpu else TINY
    if options.quick and on_gpu:
        shape = replace(shape, layers=8, prompt=2048, tokens=32)
    if options.layers:
        shape = replace(shape, layers=options.layers)
    xp: Any = np
    if on_gpu:
        import cupy as xp
    table = Table(f"llama_{'cuda' if on_gpu else 'cpu'}", "Llama 3.1 8B with random weights")
    start = time.perf_counter()
    try:
        with writing(table, on_gpu and not options.quick and not options.layers):
            run(shape, xp, table)
    finally:
        if options.json:
            about = {"machine": machine(), "model": shape.__dict__, "rows": table.rows}
            options.json.write_text(json.dumps(about, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
