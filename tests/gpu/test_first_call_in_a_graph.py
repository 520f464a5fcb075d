"""A matrix or a mask whose first call is captured: the graph computes its lists, and nothing else uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels.timing import sleep_on_gpu

from .product_cases import device, pattern, values
from .repeats import new_stream

pytestmark = pytest.mark.gpu


def check(first: Callable[[Any], Any], call: Callable[[Any], Any], spoil: Callable[[], None]) -> None:
    """Capture the first call of an object, call again before the graph has run, then run the graph."""
    import cupy

    want = first(None)  # of an equal object: kernels are loaded, and nothing is kept on the other one
    out = [cupy.empty_like(x) for x in want]
    stream = new_stream()
    with stream:
        stream.begin_capture()
        call(out)
        graph = stream.end_capture()
        spoil()
        for x, y in zip(call(None), want, strict=True):
            assert bool((x == y).all())
    for x, y in zip(call(None), want, strict=True):
        assert bool((x == y).all())
    with stream:
        for _ in range(2):
            for x in out:
                x.fill(0)
            graph.launch()
        stream.synchronize()
    for x, y in zip(out, want, strict=True):
        assert bool((x == y).all())


def test_a_capture_can_begin_while_lists_are_still_computed(rng: np.random.Generator) -> None:
    """A graph cannot wait for work outside of it; the host does."""
    import cupy

    dtype = np.dtype("float16")
    A = device(pattern(rng, 12, 12, 64, 64, dtype))
    B = cupy.asarray(values(rng, (768, 64), dtype))
    want, out = A.copy() @ B, cupy.zeros((768, 64), dtype)
    sleep_on_gpu(100_000_000)
    bg.matmul(A, B, out=out)
    with new_stream() as stream:
        stream.begin_capture()
        bg.matmul(A, B, out=out)
        graph = stream.end_capture()
        out.fill(0)
        graph.launch()
        stream.synchronize()
    assert bool((out == want).all())


def take_memory() -> None:
    """Fill memory that was freed, so that lists that nobody keeps are overwritten."""
    import cupy

    kept = [cupy.full(1 << k, 0x77, np.int8) for k in range(9, 22) for _ in range(8)]
    del kept


@pytest.mark.parametrize(
    ("side", "dtype", "N"), [(3, "float64", 1), (4, "float32", 8), (64, "float16", 64), (128, "float16", 256)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products(side: int, dtype: str, N: int, transposed: bool, rng: np.random.Generator) -> None:
    import cupy

    stored = pattern(rng, 12, 12, side, side, dtype)
    A, twin = device(stored), device(stored)
    B = cupy.asarray(values(rng, (12 * side, N), np.dtype(dtype)))

    def product(M: Any, out: Any) -> Any:
        M = M.T if transposed else M
        return [bg.matmul(M, B)] if out is None else [bg.matmul(M, B, out=out[0])]

    check(lambda out: product(twin, out), lambda out: product(A, out), take_memory)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("backward", [False, True])
def test_attention(block: int, backward: bool, rng: np.random.Generator) -> None:
    import cupy

    S = 1024
    dense = rng.random((S // block, S // block)) < 0.4
    q, k, v, dout = (cupy.asarray(rng.standard_normal((1, 2, S, 128)).astype(np.float16)) for _ in range(4))

    def mask() -> Any:
        return bg.BlockMask.from_dense(np.kron(dense, np.ones((block, block), bool)), block=block).to_device("cuda")

    given, twin = mask(), mask()
    out, lse = bg.attention(q, k, v, mask=mask(), return_lse=True)

    def attend(m: Any, into: Any) -> Any:
        if not backward:
            return [bg.attention(q, k, v, mask=m, out=None if into is None else into[0])]
        names = {} if into is None else dict(zip(("dq", "dk", "dv"), into, strict=True))
        return list(bg.attention_backward(dout, q, k, v, out, lse, mask=m, **names))

    check(lambda into: attend(twin, into), lambda into: attend(given, into), take_memory)
