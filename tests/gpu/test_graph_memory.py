"""Captured graphs outlive what they work with.

Every public call is captured, its operands are dropped, replaced or used again, the memory that is free is handed to
others, and the graph is replayed. It finds what it needs and writes nowhere else; all is let go when the graph is gone.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from .repeats import new_stream

pytestmark = pytest.mark.gpu

#: What a call works with, by name, and the call: it returns arrays, or objects that have arrays.
Case = tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]


def matrix(rng: Any, dtype: Any, side: int = 64, rows: int = 12, density: float = 0.4, **options: Any) -> Any:
    import cupy

    there = rng.random((rows, rows)) < density
    np.fill_diagonal(there, True)
    row, column = np.nonzero(there)
    blocks = dense(rng, (len(row), side, side), dtype)
    index = cupy.asarray(column.astype(np.int32)), cupy.asarray(np.searchsorted(row, np.arange(rows + 1)).astype("i4"))
    return bg.bsr_array((blocks, *index), shape=(rows * side, rows * side), **options)


def dense(rng: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    import cupy

    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    return cupy.asarray(x.astype(dtype))


def fp8(rng: Any, shape: tuple[int, ...]) -> Any:
    import cupy
    from ml_dtypes import float8_e4m3fn

    return cupy.asarray(rng.standard_normal(shape).astype(float8_e4m3fn).view(np.uint8))


def product(dtype: str, side: int, columns: int, **how: Any) -> Callable[[Any], Case]:
    """``A @ B`` in its many kernels: small blocks, tensor cores, copies of B, other orders."""

    def make(rng: Any) -> Case:
        import cupy

        rows = how.get("rows", 12)
        A, B = matrix(rng, dtype, side, rows), dense(rng, (rows * side, columns), dtype)
        if how.get("order") == "F":
            B = cupy.asfortranarray(B)
        if how.get("shifted"):
            room = cupy.empty(B.size + 1, B.dtype)
            room[1:] = B.ravel()
            B = room[1:].reshape(B.shape)
        if how.get("vector"):
            B = B[:, 0].copy()
        if how.get("batch"):
            B = cupy.stack([B, B[::-1], 2 * B])
        if how.get("left"):
            return {"A": A, "B": B.T.copy()}, lambda x: x["B"] @ x["A"]
        if how.get("transposed"):
            return {"A": A, "B": B}, lambda x: x["A"].T @ x["B"]
        return {"A": A, "B": B}, lambda x: bg.matmul(x["A"], x["B"], precision=how.get("precision"))

    return make


def into(make: Callable[[Any], Case], beta: float) -> Callable[[Any], Case]:
    """A product that is added to an array of the caller."""

    def made(rng: Any) -> Case:
        operands, call = make(rng)
        C = dense(rng, call(operands).shape, operands["B"].dtype)  # stays: CuPy's own copy of it is a part of the graph

        def add(x: dict[str, Any]) -> Any:
            return bg.matmul(x["A"], x["B"], out=C.copy(), alpha=2, beta=beta)

        return operands, add

    return made


def scaled_product(rng: Any) -> Case:
    A8 = matrix(rng, "float32").astype("float32")
    A = bg.bsr_array((fp8(rng, A8.data.shape), A8.indices, A8.indptr), shape=A8.shape)
    return {"A": A, "B": fp8(rng, (768, 128))}, lambda x: bg.matmul(x["A"], x["B"], scale_a=0.5, scale_b=2.0)


def sampled(dtype: str, **how: Any) -> Callable[[Any], Case]:
    def make(rng: Any) -> Case:
        import cupy

        pattern, X, Y = matrix(rng, dtype), dense(rng, (768, 256), dtype), dense(rng, (256, 768), dtype)
        if how.get("columns"):
            X, Y = cupy.asfortranarray(X), Y[:, ::-1]
        options = {name: how[name] for name in ("alpha", "beta") if name in how}

        def call(x: dict[str, Any]) -> Any:
            if not how.get("out"):
                return bg.sddmm(x["X"], x["Y"], x["pattern"], **options)
            x["out"].data[...] = 3
            return bg.sddmm(x["X"], x["Y"], x["pattern"], out=x["out"], **options)

        return {"pattern": pattern, "X": X, "Y": Y, "out": bg.sddmm(X, Y, pattern)}, call

    return make


def planned(rng: Any) -> Case:
    A, B = matrix(rng, "float16"), matrix(rng, "float16")
    return {"plan": bg.plan(A, B), "A": A, "B": B}, lambda x: x["plan"](x["A"], x["B"])


def product_gradients(rng: Any) -> Case:
    A, B = matrix(rng, "float32"), dense(rng, (768, 96), "float32")
    dC = dense(rng, (768, 96), "float32")
    return {"A": A, "B": B, "dC": dC}, lambda x: bg.matmul_backward(x["dC"], x["A"], x["B"], alpha=2.0)


def sampled_gradients(rng: Any) -> Case:
    pattern, X, Y = matrix(rng, "float32"), dense(rng, (768, 64), "float32"), dense(rng, (64, 768), "float32")
    dS = bg.sddmm(X, Y, pattern)
    operands = {"pattern": pattern, "X": X, "Y": Y, "dS": dS}
    return operands, lambda x: bg.sddmm_backward(x["dS"], x["X"], x["Y"], x["pattern"])


def heads(rng: Any, dtype: str, length: int = 384, width: int = 64) -> dict[str, Any]:
    return {name: dense(rng, (2, 4, length, width), dtype) for name in "qkv"}


def attended(dtype: str, gradients: bool = False, **how: Any) -> Callable[[Any], Case]:
    def make(rng: Any) -> Case:
        import cupy

        x = heads(rng, dtype)
        options: dict[str, Any] = {"causal": how.get("causal", False)}
        if how.get("mask"):
            there = rng.random((3, 3)) < 0.6
            there[:, 0] = True
            x["mask"] = bg.BlockMask.from_dense(cupy.asarray(np.kron(there, rng.random((128, 128)) < 0.7)), block=128)
        if how.get("strided"):  # no copy engine reads it: rows begin anywhere
            for name in "qkv":
                room = cupy.empty((2, 4, 384, 65), dtype)
                room[..., :64] = x[name]
                x[name] = room[..., :64]
        if how.get("lengths"):
            for name in "qkv":
                x[name] = dense(rng, (384, 4, 64), dtype)
            x["lengths"] = cupy.asarray(np.array([0, 100, 100, 384]), how["lengths"])
        if how.get("window"):
            options["window"] = how["window"]

        def call(x: dict[str, Any]) -> Any:
            more = dict(options)
            if "mask" in x:
                more["mask"] = x["mask"]
            if "lengths" in x:
                more |= {"cu_seqlens_q": x["lengths"], "cu_seqlens_k": x["lengths"]}
            found = bg.attention(x["q"], x["k"], x["v"], return_lse=True, **more)
            if not gradients:
                return found
            return bg.attention_backward(x["q"] * 0.5, x["q"], x["k"], x["v"], *found, **more)

        return x, call

    return make


def attended_in_fp8(rng: Any) -> Case:
    import cupy

    x = {name: fp8(rng, (2, 4, 384, 64)) for name in "qkv"}
    x["scales"] = cupy.asarray(np.linspace(0.5, 2, 4).astype("float32"))
    return x, lambda x: bg.attention(x["q"], x["k"], x["v"], q_scale=x["scales"], k_scale=0.5)


def merged(rng: Any) -> Case:
    x = heads(rng, "float16")
    x["parts"] = [bg.attention(x["q"], x["k"][:, :, s], x["v"][:, :, s], return_lse=True) for s in np.s_[:200, 200:]]
    return x, lambda x: bg.merge_states(*zip(*x["parts"], strict=True))


def decoded(paged: bool) -> Callable[[Any], Case]:
    def make(rng: Any) -> Case:
        import cupy

        more = {"page": 64, "pages": 64} if paged else {}
        cache = bg.KVCache(2, 4, 1024, 64, dtype="float16", device="cuda", **more)
        cache.append(dense(rng, (2, 4, 700, 64), "float16"), dense(rng, (2, 4, 700, 64), "float16"))
        x = {"cache": cache, "q": dense(rng, (2, 8, 1, 64), "float16")}
        if paged:
            x["blocks"] = cupy.asarray(np.array([[[0, 3, 5, -1]]]), np.int64)
        return x, lambda x: bg.attention_decode(x["q"], x["cache"], blocks=x.get("blocks"), return_lse=True)

    return make


def method(name: str, dtype: str = "float64", side: int = 4) -> Callable[[Any], Case]:
    """A method of a matrix, or an operator with a number."""

    def make(rng: Any) -> Case:
        calls = {
            "twice": lambda A: A * 2,
            "magnitudes": abs,
            "power": lambda A: A.power(2),
            "cast": lambda A: A.astype("float32"),
        }
        A = matrix(rng, dtype, side, 60, 0.1)
        A.sum_duplicates()  # now it is known that there are none
        return {"A": A}, lambda x: calls.get(name, lambda A: getattr(A, name)())(x["A"])

    return make


def preconditioned(name: str) -> Callable[[Any], Case]:
    def make(rng: Any) -> Case:
        import cupy

        n = 48
        line = np.arange(n)
        S = np.zeros((n, n))
        S[line, line], S[line[1:], line[:-1]], S[line[:-1], line[1:]] = 2, -1, -1
        A = bg.bsr_array(cupy.asarray(np.kron(S, np.eye(3)) + 0.1 * np.eye(3 * n)), blocksize=(3, 3))
        return {"M": getattr(bg.linalg, name)(A), "r": dense(rng, (3 * n,), "float64")}, lambda x: x["M"] @ x["r"]

    return make


def batched(rng: Any) -> Case:
    A = bg.bsr_batch([matrix(np.random.default_rng(1), "float64", 3, 20) * (k + 1) for k in range(3)])
    return {"A": A, "X": dense(rng, (3, 60, 2), "float64")}, lambda x: x["A"] @ x["X"]


CASES: dict[str, Callable[[Any], Case]] = {
    "f16": product("float16", 64, 128),
    "f16, few columns": product("float16", 64, 4),
    "f16, blocks of 16": product("float16", 16, 96),
    "f16, many columns": product("float16", 128, 512),
    "f16, B in columns": product("float16", 64, 128, order="F"),
    "f16, odd columns": product("float16", 64, 101, rows=24),
    "f16, B anywhere": product("float16", 64, 128, shifted=True),
    "f16, a batch": product("float16", 64, 64, batch=True),
    "f16, transposed": product("float16", 64, 128, transposed=True),
    "f16, from the left": product("float16", 64, 128, left=True),
    "f32 by three tf32": product("float32", 64, 512, rows=40),
    "tf32 by a copy": product("float32", 64, 1024, rows=40, precision="tf32"),
    "f32, few columns": product("float32", 32, 8),
    "f64": product("float64", 64, 128),
    "f64, 3 x 3": product("float64", 3, 1, rows=200, vector=True),
    "f64, 3 x 3, transposed": product("float64", 3, 1, rows=200, vector=True, transposed=True),
    "f64, 3 x 3, 16 columns": product("float64", 3, 16, rows=200),
    "c64 as real numbers": product("complex64", 32, 128),
    "c128": product("complex128", 5, 7),
    "added": into(product("float16", 64, 128), 0.5),
    "added, complex": into(product("complex64", 32, 128), 0.5),
    "overwritten": into(product("float64", 64, 128), 0),
    "fp8": scaled_product,
    "sampled": sampled("float16"),
    "sampled, in columns": sampled("float16", columns=True),
    "sampled into": sampled("float16", out=True),
    "sampled, added": sampled("float32", out=True, alpha=2.0, beta=0.5),
    "planned": planned,
    "gradients of a product": product_gradients,
    "gradients of a sampled one": sampled_gradients,
    "attention": attended("float16"),
    "attention, causal": attended("float16", causal=True),
    "attention, a mask": attended("float16", mask=True),
    "attention, strides": attended("float16", strided=True),
    "attention, lengths": attended("float16", lengths="int32"),
    "attention, wide lengths": attended("float16", lengths="int64", causal=True),
    "attention, float32": attended("float32", window=(50, 0)),
    "attention, fp8": attended_in_fp8,
    "backward": attended("float16", gradients=True),
    "backward, a mask": attended("float16", gradients=True, mask=True),
    "backward, strides": attended("float16", gradients=True, strided=True),
    "backward, wide lengths": attended("float16", gradients=True, lengths="int64", causal=True),
    "backward, float32": attended("float32", gradients=True),
    "merged": merged,
    "decode": decoded(False),
    "decode, pages": decoded(True),
    "twice": method("twice"),
    "magnitudes": method("magnitudes", "complex128"),
    "conjugate": method("conj", "complex128"),
    "power": method("power"),
    "cast": method("cast"),
    "dense": method("toarray"),
    **{name: preconditioned(name) for name in ("block_jacobi", "chebyshev", "ilu0", "ic0", "smoothed_aggregation")},
    "a batch": batched,
}


def arrays(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple | list):
        for part in x:
            yield from arrays(part)
    else:
        yield x.data if hasattr(x, "indptr") else x


def captured(stream: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call returns while it is captured, and the graph."""
    stream.begin_capture()
    try:
        found = call()
    except BaseException:
        with contextlib.suppress(Exception):
            stream.end_capture()
        raise
    return found, stream.end_capture()


def churned() -> list[Any]:
    """All memory that the pool has and some more, taken by others, who can tell whether somebody writes there."""
    import cupy

    gc.collect()
    cupy.cuda.Device().synchronize()
    sizes = [512 << k for k in range(16) for _ in range(6)]
    return [cupy.full(size, 0x77, "u1") for size in sizes]


@pytest.mark.parametrize("then", ["dropped", "assigned", "used again"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_has_what_it_needs_and_writes_nowhere_else(name: str, then: str, rng: np.random.Generator) -> None:
    from bsrgemm._kernels import graphs

    gc.collect()
    before = graphs.sweep()
    operands, call = CASES[name](rng)
    stream = new_stream()
    with stream:
        call(operands)
        want = [x.copy() for x in arrays(call(operands))]
        stream.synchronize()
        found, graph = captured(stream, lambda: call(operands))
        out = list(arrays(found))
        del found
        if then == "assigned":
            A = operands.get("A", operands.get("pattern"))
            if not isinstance(A, bg.bsr_array):
                pytest.skip("there is no matrix whose values could be assigned")
            A.data = A.data * 2
            call(operands)
        if then == "used again":
            call(operands)
        else:
            operands.clear()
        others = churned()
        for _ in range(2):
            graph.launch()
            stream.synchronize()
            for x, y in zip(out, want, strict=True):
                assert bool(((x == y) | ((x != x) & (y != y))).all())
        assert all(bool((x == 0x77).all()) for x in others)
    del graph, out
    gc.collect()
    for _ in range(200):  # the driver says on a thread of its own that a graph is gone
        if graphs.sweep() <= before:
            break
        time.sleep(0.01)
    assert graphs.sweep() <= before
