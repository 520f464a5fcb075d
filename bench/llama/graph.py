"""One token of the model as a CUDA graph: from the last token to the next, nothing is decided by the host.

Products with the weights, appending to the caches and attention are calls of bsrgemm. What lies between them, the
embedding and the choice of the next token are six small kernels. The position is read on the GPU. All of these kernels
may overlap (`bsrgemm.overlapping`): the weights do not change while the model is used.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import bsrgemm as bg

from ..internals import overlapping_kernel
from .model import EPSILON, Model, Weight

#: Numbers are float16, computed in float32. A row has as many elements as it likes, always an even number.
SOURCE = f"""
typedef unsigned short u16;
typedef unsigned long long u64;

// On Hopper a kernel may begin before the ones in front of it have ended; it waits before it reads what they write.
#if __CUDA_ARCH__ >= 900
#define BEGIN                                                      \\
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  \\
  asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define BEGIN
#endif

__device__ __forceinline__ float wide(u16 x) {{
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}}
__device__ __forceinline__ u16 narrow(float x) {{
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}}

// x = embedding[tokens[place]]
extern "C" __global__ void llama_embed(const u16* embedding, const int* tokens, const int* place, u16* x, int width) {{
  BEGIN;
  const u16* row = embedding + (long long)tokens[*place] * width;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) x[i] = row[i];
}}

// y = x / sqrt(mean(x^2) + epsilon) * weight, by one CTA of 1024 threads
extern "C" __global__ void llama_norm_row(const u16* x, const u16* weight, u16* y, int width) {{
  BEGIN;
  __shared__ float sums[32];
  const ushort2* pairs = (const ushort2*)x;
  float sum = 0;
  for (int i = threadIdx.x; i < width / 2; i += 1024) {{
    const float a = wide(pairs[i].x), b = wide(pairs[i].y);
    sum += a * a + b * b;
  }}
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = sums[threadIdx.x % 32];
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  const float scale = rsqrtf(sum / width + {EPSILON}f);
  for (int i = threadIdx.x; i < width / 2; i += 1024) {{
    const ushort2 w = ((const ushort2*)weight)[i];
    ((ushort2*)y)[i] = make_ushort2(narrow(wide(pairs[i].x) * scale * wide(w.x)),
                                    narrow(wide(pairs[i].y) * scale * wide(w.y)));
  }}
}}

// Turns the pairs (i, i + half) of the first heads of x by the angles of the position.
extern "C" __global__ void llama_rotate_at(u16* x, const float* cos, const float* sin, const int* place, int heads,
                                           int half) {{
  BEGIN;
  const int i = blockIdx.x * blockDim.x + threadIdx.x, head = i / half, j = i % half;
  if (head >= heads) return;
  const long long angle = (long long)*place * half + j;
  u16 *a = x + head * 2 * half + j, *b = a + half;
  const float c = cos[angle], s = sin[angle], u = wide(*a), v = wide(*b);
  *a = narrow(u * c - v * s);
  *b = narrow(v * c + u * s);
}}

// y = silu(gate) * up, where `both` is the row of gate followed by the row of up
extern "C" __global__ void llama_swiglu_row(const u16* both, u16* y, int inner) {{
  BEGIN;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= inner) return;
  const float gate = wide(both[i]), up = wide(both[inner + i]);
  y[i] = narrow(gate / (1.0f + expf(-gate)) * up);
}}

// best = the largest logit and its number; the first of equal ones. CTAs of 1024 threads.
extern "C" __global__ void llama_largest(const u16* logits, u64* best, int count) {{
  BEGIN;
  __shared__ u64 found[32];
  u64 mine = 0;
  for (int i = blockIdx.x * 1024 + threadIdx.x; i < count; i += gridDim.x * 1024) {{
    const unsigned bits = __float_as_uint(wide(logits[i]));
    const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    mine = max(mine, (u64)ordered << 32 | (0xffffffffu - i));
  }}
  for (int step = 16; step; step /= 2) mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, step));
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  mine = found[threadIdx.x];
  for (int step = 16; step; step /= 2) mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, step));
  if (threadIdx.x == 0) atomicMax(best, mine);
}}

// The next token is the best one; its position is one further, unless there is no room for it.
extern "C" __global__ void llama_advance(u64* best, int* tokens, int* place, int room) {{
  BEGIN;
  if (*place + 1 < room) tokens[++*place] = int(0xffffffffu - (unsigned)*best);
  *best = 0;
}}
"""


@cache
def _kernels() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE)


@cache
def _kernel(name: str) -> Any:
    return overlapping_kernel(_kernels().get_function(name))


def _run(name: str, ctas: int, threads: int, *arguments: Any) -> None:
    _kernel(name)((ctas,), (threads,), arguments)


class GraphDecoder:
    """Generates tokens after a prompt whose keys and values the caches hold, by replaying a graph of one step.

    `token` is the first token of the answer, at position `start`. The first step is launched kernel by kernel, because
    nothing can be compiled during a capture; all others are replays.
    """

    def __init__(self, model: Model, caches: list[bg.KVCache], token: int, start: int) -> None:
        import cupy

        s = model.shape
        self.model, self.caches = model, caches
        empty = cupy.empty
        self.x, self.normed = empty((1, s.hidden), s.dtype), empty((1, s.hidden), s.dtype)
        self.qkv = empty((1, s.heads + 2 * s.kv_heads, s.dim), s.dtype)
        self.attended = empty((1, s.heads, s.dim), s.dtype)
        self.both, self.inner = empty((1, 2 * s.inner), s.dtype), empty((1, s.inner), s.dtype)
        self.logits = empty((1, s.vocabulary), s.dtype)
        #: tokens by position, the position of the last one, and what `llama_largest` has found
        self.tokens, self.place = cupy.zeros(len(model.cos), np.int32), cupy.full(1, start, np.int32)
        self.best = cupy.zeros(1, np.uint64)
        self.tokens[start] = token
        self.start = start
        self.graph: Any = None
        self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()

    def step(self) -> None:
        """Launch all of a step on CuPy's current stream; no memory is allocated."""
        with bg.overlapping():
            self._launch()

    def _launch(self) -> None:
        s, model = self.model.shape, self.model
        H, H_kv, half = s.heads, s.kv_heads, s.dim // 2
        _run("llama_embed", 4, 1024, model.embedding, self.tokens, self.place, self.x, np.int32(s.hidden))
        turned = np.int32(H + H_kv)
        for layer, store in zip(model.layers, self.caches, strict=True):
            self._norm(layer.norm)
            self._multiply(layer.qkv, self.normed, self.qkv.reshape(1, -1))
            angles = (model.cos, model.sin, self.place, turned, np.int32(half))
            _run("llama_rotate_at", -(-int(turned) * half // 256), 256, self.qkv, *angles)
            q, k, v = (self.qkv[None, :, a:b] for a, b in ((0, H), (H, H + H_kv), (H + H_kv, H + 2 * H_kv)))
            store.append(k, v, layout="bshd")
            bg.attention_decode(q, store, layout="bshd", out=self.attended[None])
            self._multiply(layer.out, self.attended.reshape(1, -1), self.x, add=True)
            self._norm(layer.inner_norm)
            self._multiply(layer.gate_up, self.normed, self.both)
            _run("llama_swiglu_row", -(-s.inner // 256), 256, self.both, self.inner, np.int32(s.inner))
            self._multiply(layer.down, self.inner, self.x, add=True)
        self._norm(model.norm)
        self._multiply(model.head, self.normed, self.logits)
        _run("llama_largest", -(-s.vocabulary // 1024), 1024, self.logits, self.best, np.int32(s.vocabulary))
        _run("llama_advance", 1, 1, self.best, self.tokens, self.place, np.int32(len(self.tokens)))

    def _norm(self, weight: Any) -> None:
        _run("llama_norm_row", 1, 1024, self.x, weight, self.normed, np.int32(self.x.shape[1]))

    @staticmethod
    def _multiply(weight: Weight, x: Any, out: Any, add: bool = False) -> None:
        bg.matmul(weight.blocks, x.T, out=out.T, beta=int(add))

    def generate(self, count: int) -> None:
        """Make the next `count` tokens; the host does not wait for them."""
        import cupy

        cupy.cuda.get_current_stream().synchronize()  # what other streams read of the last step
        with self.stream:
            if self.graph is None and count:
                self.step()
                self.stream.begin_capture()
                try:
                    self.step()
                finally:
                    self.graph = self.stream.end_capture()
                count -= 1
            for _ in range(count):
                self.graph.launch(self.stream)

    def made(self) -> Any:
        """The tokens of the answer so far, the first one and the one that follows from the last step included."""
        self.stream.synchronize()
        return self.tokens[self.start : int(self.place[0]) + 1]
