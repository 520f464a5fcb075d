"""Products on the card against float64: odd sizes, every dtype, poisoned outputs, bad indices, batches, graphs."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import registry
from bsrgemm.dtypes import BFLOAT16, BOOL, DEVICE_DTYPES, result_dtype

from .marks import some_under_memcheck
from .product_cases import (
    LAYOUTS,
    acc_of,
    assert_close,
    dense,
    device,
    exact_dtype,
    exact_product,
    kernels_of,
    pattern,
    strided,
    values,
)
from .repeats import bystanders, captured, differing, intact, new_stream

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (2, 3), (3, 3), (5, 2), (8, 8), (9, 4), (16, 16), (17, 13), (33, 40)]


@pytest.mark.parametrize("dtype", DEVICE_DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 2, 3, 7, 16, 33, 130])
def test_product_is_right_for_every_dtype_and_width(dtype, N, rng) -> None:
    import cupy

    for (R, C), index in zip(SHAPES, itertools.cycle([np.int32, np.int64])):
        A = pattern(rng, 7, 6, R, C, dtype, index)
        B = values(rng, (A[3][1], N), dtype)
        exact = exact_dtype(dtype)
        want = dense(A, exact) @ B.astype(exact)
        size = np.abs(dense(A, exact)) @ np.abs(B.astype(exact)) if dtype.kind not in "b" else 0.0
        out = cupy.full(want.shape, 77).astype(dtype)  # poisoned: every element must be written
        got = bg.matmul(device(A), cupy.asarray(B), out=out)
        assert got is out
        assert_close(out.get(), want, size, 2 * A[3][1], acc_of(np.dtype(dtype)))


@pytest.mark.parametrize("N", some_under_memcheck([1, 2, 5, 40], [1, 5]))
@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_c", LAYOUTS)
def test_strides_alpha_beta_and_out_dtype(N, layout_b, layout_c, rng) -> None:

    for (R, C), (dtype, out_dtype) in zip(
        [(3, 5), (8, 8), (17, 2)], [("float32", "float32"), ("float16", "float32"), ("int8", "int32")], strict=True
    ):
        dtype, out_dtype = np.dtype(dtype), np.dtype(out_dtype)
        A = pattern(rng, 6, 5, R, C, dtype)
        B = values(rng, (A[3][1], N), dtype)
        old = values(rng, (A[3][0], N), out_dtype)
        alpha, beta = (3, -2) if dtype.kind == "i" else (0.75, -1.5)
        out = strided(old, layout_c)
        bg.matmul(device(A), strided(B, layout_b), out=out, alpha=alpha, beta=beta)
        exact = exact_dtype(out_dtype)
        want = alpha * (dense(A, exact) @ B.astype(exact)) + beta * old.astype(exact)
        size = abs(alpha) * (np.abs(dense(A, exact)) @ np.abs(B.astype(exact))) + abs(beta) * np.abs(old)
        assert_close(out.get(), want, size, 2 * A[3][1], out_dtype)
        poison = strided(np.full(old.shape, np.nan if out_dtype.kind == "f" else 99, out_dtype), layout_c)
        bg.matmul(device(A), strided(B, layout_b), out=poison, alpha=alpha)  # beta = 0 must not read out
        assert_close(poison.get(), want - beta * old.astype(exact), size, 2 * A[3][1], out_dtype)


@pytest.mark.parametrize("N", [1, 20])
def test_mixed_dtypes_have_the_promoted_result(N, rng) -> None:
    import cupy

    names = ["bool", "int8", "uint16", "int64", "float16", BFLOAT16, "float32", "float64", "complex64"]
    for a, b in itertools.product(map(np.dtype, names), repeat=2):
        A = pattern(rng, 4, 3, 3, 4, a)
        B = values(rng, (A[3][1], N), b)
        got = device(A) @ cupy.asarray(B)
        assert got.dtype == result_dtype(a, b), (a, b)
        exact = exact_dtype(a, b)
        stored = dense(A, a if a.kind in "biu" else exact).astype(exact)  # integers add up in their own dtype
        want = stored @ B.astype(exact)
        size = 0.0 if exact == BOOL else np.abs(stored) @ np.abs(B.astype(exact))
        assert_close(got.get(), want, size, 2 * A[3][1], acc_of(got.dtype))


@pytest.mark.sanitizer
@pytest.mark.parametrize("N", [1, 12])
def test_indices_overwritten_after_construction_touch_no_foreign_memory(N, rng) -> None:
    import cupy

    A = device(pattern(rng, 6, 5, 4, 3, "float32"))
    B = cupy.asarray(values(rng, (A.shape[1], N), np.dtype("float32")))
    for damage in (-1, 5, 2**31 - 1, -(2**31)):
        A.indices[:3] = damage
        assert bool(cupy.isfinite(A @ B).all())
        A.indptr[2] = damage
        assert bool(cupy.isfinite(A @ B).all())


@pytest.mark.parametrize("N", [1, 64])
def test_results_repeat_bit_by_bit(N, rng) -> None:
    import cupy

    A = device(pattern(rng, 40, 40, 7, 7, "float32"))
    B = cupy.asarray(values(rng, (A.shape[1], N), np.dtype("float32")))
    assert differing(lambda: A @ B, A @ B, 1000) == 0


@pytest.mark.sanitizer
def test_nan_and_inf_spread_only_through_stored_blocks(rng) -> None:
    import cupy

    A = device(pattern(rng, 5, 6, 4, 4, "float32"))
    B = cupy.asarray(values(rng, (24, 9), np.dtype("float32")))
    B[5] = np.nan
    touched = cupy.zeros(20, bool)
    rows = registry.cuda().expand(A.indptr, len(A.indices))
    for i in rows[A.indices == 1].get():
        touched[i * 4 : i * 4 + 4] = True
    assert bool((cupy.isnan(A @ B).any(axis=1) == touched).all())


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DEVICE_DTYPES, ids=str)
def test_sparse_product_is_right_for_every_dtype(dtype, rng) -> None:
    for R, K, N in [(1, 1, 1), (2, 3, 4), (7, 5, 3), (16, 16, 16), (13, 1, 20)]:
        A, B = pattern(rng, 6, 5, R, K, dtype), pattern(rng, 5, 7, K, N, dtype, np.int64)
        got = device(A) @ device(B)
        assert got.blocksize == (R, N)
        exact = exact_dtype(dtype)
        a, b = dense(A, exact), dense(B, exact)
        size = 0.0 if exact == BOOL else np.abs(a) @ np.abs(b)
        assert_close(got.toarray().get(), a @ b, size, 4 * A[3][1], acc_of(np.dtype(dtype)))


def test_more_than_2_to_31_stored_elements(rng) -> None:
    import cupy

    blocks, side = (1 << 31) // (1 << 14) + 3, 1 << 7  # one byte each: 2 GiB and a little
    data = cupy.zeros((blocks, side, side), np.int8)
    data[-1] = cupy.asarray(values(rng, (side, side), np.dtype(np.int8)))
    indptr = cupy.asarray([0, 0, blocks], dtype=np.int64)
    indices = cupy.full(blocks, 1, np.int64)
    A = bg.bsr_array((data, indices, indptr), shape=(2 * side, 2 * side))
    assert A.nnz > 2**31
    for N in (1, 3):
        B = cupy.asarray(values(rng, (2 * side, N), np.dtype(np.int8)))
        got = bg.matmul(A, B, out_dtype=np.int32)
        want = data[-1].get().astype(np.int32) @ B[side:].get().astype(np.int32)
        np.testing.assert_array_equal(got[side:].get(), want)
        assert not bool(got[:side].any())


def test_a_product_can_be_captured_in_a_graph_and_runs_on_the_current_stream(rng) -> None:
    import cupy

    for (R, C), dtype, N in [((3, 3), "float64", 1), ((3, 3), "float64", 10), ((64, 64), "float16", 40)]:
        A = device(pattern(rng, 8, 8, R, C, dtype))
        B = cupy.asarray(values(rng, (8 * C, N), np.dtype(dtype)))
        want = A @ B
        out = cupy.empty_like(want)
        stream = new_stream()
        with stream:
            bg.matmul(A, B, out=out)
            graph = captured(stream, partial(bg.matmul, A, B, out=out))
            out.fill(np.nan)
            graph.launch()
            stream.synchronize()
        assert bool((out == want).all())


def assert_replays_write_to_out_alone(stream: Any, graph: Any, out: Any, want: Any, sizes: list[int]) -> None:
    """Not to arrays of so many bytes that were made after the capture."""
    others = bystanders(sizes)
    for _ in range(3):
        out.fill(0)
        graph.launch()
    stream.synchronize()
    assert bool((out == want).all())
    assert intact(others)


@pytest.mark.parametrize(("side", "dtype", "N"), [(3, "float64", 1), (128, "float16", 64)])
def test_a_graph_keeps_the_memory_in_which_it_adds_pieces_of_rows(side, dtype, N, rng) -> None:
    """Arrays made after the capture are not where the pieces of a long row are added up, and outlive its launch."""
    import cupy

    columns = 3000 if side == 3 else 512
    blocks = values(rng, (columns, side, side), np.dtype(dtype))
    index = np.arange(columns, dtype=np.int32), np.array([0, 0, columns], np.int32)
    A = device((blocks, *index, (2 * side, columns * side)))
    B = cupy.asarray(values(rng, (columns * side, N), np.dtype(dtype)))
    stream = new_stream()
    with stream:
        want = A @ B
        out = cupy.empty_like(want)
        graph = captured(stream, lambda: bg.matmul(A, B, out=out))
        assert_replays_write_to_out_alone(stream, graph, out, want, [4 << k for k in range(8, 24)] * 4)


@pytest.mark.parametrize("what", ["unaligned", "complex", "fp8"])
def test_a_graph_keeps_the_copies_that_it_makes_of_operands(what, rng) -> None:
    import cupy

    N = 77 if what == "unaligned" else 96
    kind = {"complex": "complex64", "fp8": "uint8"}.get(what, "float16")
    A = device(pattern(rng, 8, 8, 64, 64, kind))
    A.sum_duplicates()
    B = cupy.asarray(values(rng, (8 * 64, N), np.dtype(kind)))
    if what == "fp8":
        A.data &= 0x37  # small numbers and no NaN
        B &= 0x37
    out = cupy.empty((8 * 64, N), "float32" if what == "fp8" else kind)

    def call() -> None:
        bg.matmul(A, B, out=out, **({"scale_a": 0.5} if what == "fp8" else {}))

    stream = new_stream()
    with stream:
        call()
        want = out.copy()
        call()
        graph = captured(stream, call)
        assert_replays_write_to_out_alone(stream, graph, out, want, [4 << k for k in range(8, 22)] * 6)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", "complex128", "bool"])
def test_product_with_the_transpose_on_the_plain_cores(dtype, rng) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for (R, C), N in itertools.product([(1, 1), (3, 2), (8, 5), (17, 13)], [1, 2, 7, 130]):
        A = pattern(rng, 7, 6, R, C, dtype)
        B = values(rng, (A[3][0], N), dtype)
        exact = exact_dtype(dtype)
        D = dense(A, exact)
        size = 0.0 if dtype == BOOL else np.abs(D.T) @ np.abs(B.astype(exact))
        got = device(A).T @ cupy.asarray(B)
        assert_close(got.get(), D.T @ B.astype(exact), size, 2 * A[3][0], acc_of(dtype))


@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(64, 64), (16, 16), (3, 5)], ids=str)
def test_batches_are_one_launch(block, rng) -> None:
    import cupy

    dtype = np.dtype(np.float16)
    A = pattern(rng, 6, 5, *block, dtype)
    for N in (1, 5, 40, 264):
        B = values(rng, (3, A[3][1], N), dtype)
        dA = device(A)
        got = dA @ cupy.asarray(B)
        assert len(set(kernels_of(dA))) == 1
        for k in range(3):
            want, size = exact_product(A, B[k])
            assert_close(got[k].get(), want, size, 2 * A[3][1], np.float32)
        spread = cupy.zeros((5, A[3][1], 2 * N), dtype)[::2, :, ::2]  # gaps between batches and columns
        spread[...] = cupy.asarray(B)
        assert_close((dA @ spread)[2].get(), *exact_product(A, B[2]), 2 * A[3][1], np.float32)


@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(128, 128), (64, 96), (64, 32), (16, 16)], ids=str)
def test_scaled_bytes_are_fp8(block, rng) -> None:
    from ml_dtypes import float8_e4m3fn

    A = pattern(rng, 5, 4, *block, np.uint8)
    A = (values(rng, A[0].shape, np.dtype(np.float32)).astype(float8_e4m3fn).view(np.uint8), *A[1:])
    decoded = (A[0].view(float8_e4m3fn).astype(np.float64), *A[1:])
    for N, layout in [(40, "C"), (256, "F"), (144, "F")]:
        B = values(rng, (A[3][1], N), np.dtype(np.float32)).astype(float8_e4m3fn)
        want, size = exact_product(decoded, B.astype(np.float64))
        for out_dtype in ("float32", "float16"):
            got = bg.matmul(
                device(A), strided(B.view(np.uint8), layout), scale_a=0.5, scale_b=3.0, out_dtype=np.dtype(out_dtype)
            )
            assert got.dtype == out_dtype
            # The tensor cores keep about 13 bits of each product when they add fp8.
            bound = 2**-10 * 1.5 * size + np.finfo(out_dtype).eps * np.abs(1.5 * want) + 1e-6
            assert (np.abs(got.get() - 1.5 * want) <= bound).all()


def test_tune_keeps_the_fastest_kernel_on_disk(rng, tmp_path, monkeypatch) -> None:
    import cupy

    from bsrgemm._products import tuned

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    A = device(pattern(rng, 8, 8, 64, 64, "float16"))
    times = bg.tune(A, 64)
    assert len(times) > 3 and times == sorted(times, key=lambda pair: pair[1])
    tuned._loaded.clear()  # as another process would find it
    B = cupy.asarray(values(rng, (A.shape[1], 64), np.dtype("float16")))
    got = A @ B
    assert {str(kernel.spec()) for kernel in kernels_of(A)} == {times[0][0]}
    want, size = exact_product((A.data.get(), A.indices.get(), A.indptr.get(), A.shape), B.get())
    assert_close(got.get(), want, size, 2 * A.shape[1], np.float32)
    (file,) = (tmp_path / "bsrgemm").glob("tuned-*.json")
    file.write_text("damaged")
    tuned._loaded.clear()
    A._memo.calls.clear()
    assert_close((A @ B).get(), want, size, 2 * A.shape[1], np.float32)  # by rule
