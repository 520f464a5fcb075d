"""Kernels that begin before the ones in front of them have ended: results are bit by bit those without overlap."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._kernels import jit

from .marks import on_hopper
from .product_cases import device, kernels_of, pattern, values
from .repeats import new_stream

pytestmark = pytest.mark.gpu

F16 = np.dtype(np.float16)


def wide(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """A dense weight as blocks of 128 rows that are as wide as the matrix."""
    data = (rng.standard_normal((rows // 128, 128, columns)) / columns**0.5).astype(F16)
    index = np.zeros(rows // 128, np.int32), np.arange(rows // 128 + 1, dtype=np.int32)
    return device((data, *index, (rows, columns)))


def chained(weights: list[Any], x: Any, y: Any) -> None:
    """x and y are multiplied by all weights in turn, with kernels of CuPy and sums in between."""
    for number, weight in enumerate(weights):
        bg.matmul(weight, x, out=y)
        bg.matmul(weight, y, out=x, alpha=0.5, beta=0.25)
        if number % 3 == 2:
            x *= F16.type(0.75)
            y += x


@pytest.mark.sanitizer
@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_of_products_has_the_same_bits(captured: bool, rng: Any) -> None:
    import cupy

    weights = [wide(rng, 512, 512) for _ in range(5)]
    starts = [cupy.asarray(values(rng, (512, n), F16)) for n in (1, 4)]
    results = []
    for active in (False, True):
        for start in starts:
            with new_stream() as stream, bg.overlapping() if active else contextlib.nullcontext():
                x, y = start.copy(), cupy.zeros_like(start)
                chained(weights, x, y)
                if captured:
                    stream.begin_capture()
                    chained(weights, x, y)
                    graph = stream.end_capture()
                    for _ in range(10):
                        graph.launch()
                stream.synchronize()
            results.append((x, y))
    for (x, y), (x_plain, y_plain) in zip(results[2:], results[:2], strict=True):
        assert (x == x_plain).all() and (y == y_plain).all() and bool(cupy.isfinite(x).all())
    for weight in weights:
        ahead = {kernel.read_ahead for kernel in kernels_of(weight)}
        assert ahead == ({False, True} if on_hopper() else {False})


def test_tokens_of_a_step_have_the_same_bits(rng: Any) -> None:
    """Append, attend, multiply: each kernel needs what the one in front of it wrote."""
    import cupy

    out_weight = wide(rng, 256, 256)
    k, v = (cupy.asarray(values(rng, (1, 2, 300, 64), F16)) for _ in range(2))
    tokens = cupy.asarray(values(rng, (1, 6 * 64), F16))
    results = []
    for active in (False, True):
        cache = bg.KVCache(1, 2, 512, 64, dtype=F16, device="cuda")
        cache.append(k, v)
        x = tokens.copy()
        with bg.overlapping() if active else contextlib.nullcontext():
            for _ in range(40):
                q, new_k, new_v = (x[:, a:b].reshape(1, -1, 1, 64) for a, b in ((0, 256), (256, 384), (128, 256)))
                cache.append(new_k, new_v)
                attended = bg.attention_decode(q, cache)
                bg.matmul(out_weight, attended.reshape(1, 256).T, out=x[:, :256].T, beta=0.5)
        results.append(x)
    assert (results[0] == results[1]).all() and bool(cupy.isfinite(x).all())


def test_a_matrix_that_had_to_be_copied_is_not_read_ahead(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    data, indices, indptr, shape = pattern(rng, 9, 7, 32, 64, F16)
    A = bg.bsr_array((cupy.asarray(data), cupy.asarray(indices), cupy.asarray(indptr)), shape=shape)
    twice = cupy.stack([A.data, A.data], axis=1)
    A.data = twice[:, 0]  # not contiguous
    B = cupy.asarray(values(rng, (shape[1], 3), F16))
    whole = bg.bsr_array((cupy.asarray(data), cupy.asarray(indices), cupy.asarray(indptr)), shape=shape)
    ahead: list[Any] = []
    load = jit.load

    def noted(spec: jit.KernelSpec, arch: str) -> Any:
        ahead.extend(value for name, value in spec.defines if name == "READ_AHEAD")
        return load(spec, arch)

    monkeypatch.setattr(jit, "load", noted)
    with bg.overlapping():
        got = A @ B
        whole @ B
    assert ahead == [0, int(on_hopper())]
    np.testing.assert_array_equal(got.get(), (A @ B).get())
