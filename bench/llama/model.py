"""A model of the shape of Llama 3.1 8B with random weights: its small kernels, layers, and ways to attend."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import bsrgemm as bg

from ..data import normal

#: Rows of the blocks of a weight: those of a tile of gemm_sm90, and a multiple of those of gemm_few
BLOCK_ROWS = 128
#: The epsilon of RMSNorm, and the base of the rotary embedding
EPSILON, THETA = 1e-5, 500_000.0
#: Elements of weights that are drawn at a time; scores that are held at a time by the plain attention
CHUNK = 1 << 26
#: Largest difference of two logits over their spread, five times what its root mean square may be. Rounding to float16
#: through 16 layers costs 3e-3; one key of 70 that is not seen, 2e-1.
TOLERANCE = {"float16": 5e-2, "float32": 1e-4}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the lengths of prompts and answers."""

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
    def launched(self) -> int:
        """Tokens of an answer that are made kernel by kernel, before `tokens` of them by a graph."""
        return max(2, self.tokens // 4)

    @property
    def positions(self) -> int:
        return self.prompt + self.launched + self.tokens

    @property
    def parameters(self) -> int:
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.dim
        layer = qkv + self.heads * self.dim * self.hidden + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


TINY = Shape(
    layers=2, hidden=256, heads=4, kv_heads=2, dim=64, inner=512, vocabulary=1000, dtype="float32",
    prompt=128, tokens=8, short=(70, 4),
)  # fmt: skip


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


class Weight(NamedTuple):
    """A dense layer (outputs, inputs), and the same memory as a matrix of blocks that are as wide as the layer."""

    dense: Any
    blocks: bg.bsr_array

    @classmethod
    def of(cls, dense: Any) -> Weight:
        outputs, inputs = dense.shape
        rows = math.gcd(outputs, BLOCK_ROWS)
        xp = bg.get_array_module(dense)
        indptr = xp.arange(outputs // rows + 1, dtype=np.int32)
        blocks = (dense.reshape(-1, rows, inputs), xp.zeros(outputs // rows, np.int32), indptr)
        return cls(dense, bg.bsr_array(blocks, shape=dense.shape))

    def product(self, x: Any) -> Any:
        """x @ dense.T for rows x, by bsrgemm."""
        out = bg.get_array_module(x).empty((len(x), len(self.dense)), x.dtype)
        bg.matmul(self.blocks, x.T, out=out.T)
        return out

    def dense_product(self, x: Any) -> Any:
        """The same by NumPy or cuBLAS."""
        return x @ self.dense.T


#: Weights of a layer
Layer = namedtuple("Layer", "norm qkv out inner_norm gate_up down")
#: (number of the layer, q (tokens, heads, D), k and v (tokens, KV heads, D)) -> like q
Attend = Callable[[int, Any, Any, Any], Any]
#: (weight (outputs, inputs), x (tokens, inputs)) -> (tokens, outputs)
Product = Callable[[Weight, Any], Any]


class Model:
    """Random weights, and the computation of logits from tokens."""

    def __init__(self, shape: Shape, xp: Any) -> None:
        self.shape, self.xp = shape, xp
        h, (H, H_kv, D) = shape.hidden, (shape.heads, shape.kv_heads, shape.dim)
        quiet = 1 / (2 * shape.layers) ** 0.5  # what layers add to the sum stays of its size
        self.embedding, self.head = self._numbers(shape.vocabulary, h, 1.0), self._weight(shape.vocabulary, h)
        self.norm = xp.ones(h, shape.dtype)
        self.layers = []
        for _ in range(shape.layers):
            qkv = self._weight((H + 2 * H_kv) * D, h)
            qkv.dense[: H * D] *= 3  # scores spread by 3, so that a few keys matter, as in a trained model
            out = self._weight(h, H * D, quiet / (H * D) ** 0.5)
            down = self._weight(h, shape.inner, quiet / shape.inner**0.5)
            gate_up = self._weight(2 * shape.inner, h)
            self.layers.append(Layer(self.norm, qkv, out, self.norm, gate_up, down))
        angles = np.arange(shape.positions)[:, None] * THETA ** (-np.arange(0, D, 2) / D)
        self.cos, self.sin = (xp.asarray(f(angles).astype(np.float32)[:, None]) for f in (np.cos, np.sin))

    def _weight(self, outputs: int, inputs: int, spread: float | None = None) -> Weight:
        """A layer of normal numbers, with standard deviation 1 / sqrt(inputs) by default."""
        return Weight.of(self._numbers(outputs, inputs, inputs**-0.5 if spread is None else spread))

    def _numbers(self, rows: int, columns: int, spread: float) -> Any:
        result = normal((rows, columns), self.shape.dtype, self.xp)
        result *= result.dtype.type(spread)
        return result

    def forward(self, tokens: Any, start: int, attend: Attend, product: Product = Weight.product) -> Any:
        """Logits after the last of some tokens; the first token is at position `start`."""
        s, n = self.shape, len(tokens)
        H, H_kv, D = s.heads, s.kv_heads, s.dim
        cos, sin = self.cos[start : start + n], self.sin[start : start + n]
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            qkv = product(layer.qkv, rms_norm(x, layer.norm)).reshape(n, H + 2 * H_kv, D)
            rotate(qkv[:, : H + H_kv], cos, sin)
            q, k, v = qkv[:, :H], qkv[:, H : H + H_kv], qkv[:, H + H_kv :]
            x += product(layer.out, attend(number, q, k, v).reshape(n, H * D))
            x += product(layer.down, swiglu(product(layer.gate_up, rms_norm(x, layer.inner_norm))))
        return product(self.head, rms_norm(x[-1:], self.norm))

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
