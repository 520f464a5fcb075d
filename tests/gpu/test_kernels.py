"""Every kernel against float64 on the card: odd sizes, empty rows, every dtype, poisoned outputs, bad indices.

Seeds are fixed so that each test's outputs have a checksum in gpu_record.json; the property tests draw fresh inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm._backend import registry
from bsrgemm._kernels import forced_kernel
from bsrgemm.dtypes import BFLOAT16, BOOL, DEVICE_DTYPES, HALF_DTYPES, result_dtype

pytestmark = pytest.mark.gpu

Matrix = tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]


def kernel(*names: str) -> Any:
    return pytest.mark.kernel(*names)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if dtype == BOOL:
        return rng.random(shape) < 0.4
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(max(info.min, -50), min(info.max, 50), shape).astype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def pattern(
    rng: np.random.Generator,
    rows: int,
    cols: int,
    R: int,
    C: int,
    dtype: Any,
    index: Any = np.int32,
    density: float = 0.4,
) -> Matrix:
    """Random blocks: unsorted, some twice, first and last block row empty."""
    stored = rng.random((rows, cols)) < density
    stored[[0, -1]] = False
    i, j = np.nonzero(stored)
    twice = rng.random(len(i)) < 0.1
    i, j = np.concatenate([i, i[twice]]), np.concatenate([j, j[twice]])
    order = np.lexsort((rng.random(len(i)), i))
    i, j = i[order], j[order]
    indptr = np.searchsorted(i, np.arange(rows + 1)).astype(index)
    return values(rng, (len(i), R, C), np.dtype(dtype)), j.astype(index), indptr, (rows * R, cols * C)


def dense(matrix: Matrix, dtype: Any) -> np.ndarray:
    data, indices, indptr, (M, N) = matrix
    R, C = data.shape[1:]
    out = np.zeros((M // R, N // C, R, C), dtype)
    rows = np.repeat(np.arange(M // R), np.diff(indptr))
    for k, (i, j) in enumerate(zip(rows, indices, strict=True)):
        if dtype == BOOL:
            out[i, j] |= data[k]
        else:
            out[i, j] += data[k].astype(dtype)
    return out.transpose(0, 2, 1, 3).reshape(M, N)


def sanitized(values: Iterable[Any], *chosen: str) -> list[Any]:
    """Parameters, of which those with a chosen name are also run under compute-sanitizer."""
    return [pytest.param(x, id=str(x), marks=pytest.mark.sanitizer if str(x) in chosen else ()) for x in values]


def exact_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype in which the reference is computed."""
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = result_dtype(dtype, other)
    if dtype == BOOL or dtype.kind in "iu":
        return dtype
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def assert_close(got: np.ndarray, want: np.ndarray, size: np.ndarray | float, terms: int, acc: Any) -> None:
    """|got - want| within the rounding of `terms` additions in `acc` and one rounding to the result's dtype."""
    if got.dtype == BOOL or got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want.astype(got.dtype))
        return
    from ml_dtypes import finfo

    eps_acc = float(finfo(np.dtype(acc)).eps)
    eps_out = float(finfo(got.dtype).eps)
    wide = got.astype(exact_dtype(got.dtype))
    assert not np.isnan(wide).any()
    bound = (terms + 4) * eps_acc * size + eps_out * np.abs(want) + np.finfo(np.float16).tiny
    assert (np.abs(wide - want) <= bound).all(), float(np.max(np.abs(wide - want) / bound))


def acc_of(dtype: np.dtype[Any]) -> Any:
    return np.float32 if dtype in HALF_DTYPES else dtype


def device(matrix: Matrix) -> Any:
    import cupy

    data, indices, indptr, shape = matrix
    return bg.bsr_array(tuple(cupy.asarray(x) for x in (data, indices, indptr)), shape=shape)


def strided(x: np.ndarray, layout: str) -> Any:
    """`x` on the card in another memory layout; the gaps are poisoned."""
    import cupy

    if layout == "C":
        return cupy.asarray(x)
    if layout == "F":
        return cupy.asarray(np.ascontiguousarray(x.T)).T
    wide = cupy.full((x.shape[0] * 2 + 1, x.shape[1] * 3 + 2), 113).astype(x.dtype)
    view = wide[1::2, 2::3][::-1] if layout == "reversed" else wide[1::2, 2::3]
    view[...] = cupy.asarray(x)
    return view


SHAPES = [(1, 1), (2, 3), (3, 3), (5, 2), (8, 8), (9, 4), (16, 16), (17, 13), (33, 40)]
LAYOUTS = ["C", "F", "gaps", "reversed"]
HALF = np.dtype(np.float16)


@kernel("gemm_simt", "spmv", "spmv_small", "spmm")
@pytest.mark.parametrize("dtype", DEVICE_DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 2, 3, 7, 16, 33, 130])
def test_product_is_right_for_every_dtype_and_width(dtype, N, rng, checksum) -> None:
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
        checksum(out)
        assert_close(out.get(), want, size, 2 * A[3][1], acc_of(np.dtype(dtype)))


@kernel("gemm_simt", "spmv", "spmv_small", "spmm")
@pytest.mark.parametrize("N", sanitized([1, 2, 5, 40], "1", "5"))
@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_c", LAYOUTS)
def test_strides_alpha_beta_and_out_dtype(N, layout_b, layout_c, rng, checksum) -> None:
    import cupy

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
        checksum(cupy.ascontiguousarray(out))
        assert_close(out.get(), want, size, 2 * A[3][1], out_dtype)
        poison = strided(np.full(old.shape, np.nan if out_dtype.kind == "f" else 99, out_dtype), layout_c)
        bg.matmul(device(A), strided(B, layout_b), out=poison, alpha=alpha)  # beta = 0 must not read out
        assert_close(poison.get(), want - beta * old.astype(exact), size, 2 * A[3][1], out_dtype)


@kernel("gemm_simt", "spmv", "spmv_small", "spmm")
@pytest.mark.parametrize("N", [1, 20])
def test_mixed_dtypes_have_the_promoted_result(N, rng, checksum) -> None:
    names = ["bool", "int8", "uint16", "int64", "float16", BFLOAT16, "float32", "float64", "complex64"]
    for a, b in itertools.product(map(np.dtype, names), repeat=2):
        A = pattern(rng, 4, 3, 3, 4, a)
        B = values(rng, (A[3][1], N), b)
        import cupy

        got = device(A) @ cupy.asarray(B)
        assert got.dtype == result_dtype(a, b), (a, b)
        checksum(got)
        exact = exact_dtype(a, b)
        stored = dense(A, a if a.kind in "biu" else exact).astype(exact)  # integers add up in their own dtype
        want = stored @ B.astype(exact)
        size = 0.0 if exact == BOOL else np.abs(stored) @ np.abs(B.astype(exact))
        assert_close(got.get(), want, size, 2 * A[3][1], acc_of(got.dtype))


@kernel("gemm_simt", "spmv", "spmv_small", "spmm")
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


@kernel("gemm_simt", "spmv", "spmv_small", "spmm")
@pytest.mark.parametrize("N", [1, 64])
def test_results_repeat_bit_by_bit(N, rng) -> None:
    import cupy

    A = device(pattern(rng, 40, 40, 7, 7, "float32"))
    B = cupy.asarray(values(rng, (A.shape[1], N), np.dtype("float32")))
    first = A @ B
    for _ in range(1000):
        assert bool((first == A @ B).all())


@kernel("gemm_simt")
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


@kernel("spgemm_simt")
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DEVICE_DTYPES, ids=str)
def test_sparse_product_is_right_for_every_dtype(dtype, rng, checksum) -> None:
    for R, K, N in [(1, 1, 1), (2, 3, 4), (7, 5, 3), (16, 16, 16), (13, 1, 20)]:
        A, B = pattern(rng, 6, 5, R, K, dtype), pattern(rng, 5, 7, K, N, dtype, np.int64)
        got = device(A) @ device(B)
        assert got.blocksize == (R, N)
        checksum(got.data)
        exact = exact_dtype(dtype)
        a, b = dense(A, exact), dense(B, exact)
        size = 0.0 if exact == BOOL else np.abs(a) @ np.abs(b)
        assert_close(got.toarray().get(), a @ b, size, 4 * A[3][1], acc_of(np.dtype(dtype)))


@kernel("segment")
@pytest.mark.parametrize("dtype", sanitized(DEVICE_DTYPES, "bool", "int8", "float16", "complex128"))
@pytest.mark.parametrize("op", ["add", "maximum", "minimum", "fmax", "fmin"])
def test_segments_reduce_like_numpy(dtype, op, rng, checksum) -> None:
    import cupy

    for width, lengths in [(1, [1, 2, 1]), (5, [3, 1, 4]), (40, [1, 1]), (3, [100, 33, 1]), (1, [5000])]:
        x = values(rng, (sum(lengths), width), dtype)
        if np.dtype(dtype).kind in "fc":
            x[rng.random(x.shape) < 0.05] = np.nan if op != "add" else 1
        order = rng.permutation(len(x))
        starts = np.cumsum([0, *lengths[:-1]])
        host, cuda = registry.host(), registry.cuda()
        for permutation in (None, order):
            want = host.segment_reduce(op, x, permutation, starts)
            moved = None if permutation is None else cupy.asarray(permutation)
            got = cuda.segment_reduce(op, cupy.asarray(x), moved, cupy.asarray(starts))
            checksum(got)
            if op != "add" or got.dtype == BOOL or np.dtype(dtype).kind in "iu":
                np.testing.assert_array_equal(got.get(), want)
            else:
                wide = x.astype(exact_dtype(np.dtype(dtype)))
                exact = host.segment_reduce("add", wide, permutation, starts)
                size = host.segment_reduce("add", np.abs(wide), permutation, starts)
                assert_close(got.get(), exact, size, max(lengths), acc_of(np.dtype(dtype)))


@kernel("expand")
@pytest.mark.sanitizer
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_expand_names_the_row_of_every_entry(index, rng, checksum) -> None:
    import cupy

    for counts in ([0, 0, 3], [5], [1] * 700, [0, 9000, 0, 1], list(rng.integers(0, 4, 5000))):
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(index)
        got = registry.cuda().expand(cupy.asarray(indptr), int(indptr[-1]))
        checksum(got)
        np.testing.assert_array_equal(got.get(), np.repeat(np.arange(len(counts)), counts))


@kernel("gemm_simt", "spmv", "spmv_small", "spmm")
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


@kernel("gemm_simt", "spmv", "gemm_sm90")
def test_a_product_can_be_captured_in_a_graph_and_runs_on_the_current_stream(rng) -> None:
    import cupy

    for (R, C), dtype, N in [((3, 3), "float64", 1), ((3, 3), "float64", 10), ((64, 64), "float16", 40)]:
        A = device(pattern(rng, 8, 8, R, C, dtype))
        B = cupy.asarray(values(rng, (8 * C, N), np.dtype(dtype)))
        want = A @ B
        out = cupy.empty_like(want)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            bg.matmul(A, B, out=out)
            stream.synchronize()
            stream.begin_capture()
            bg.matmul(A, B, out=out)
            graph = stream.end_capture()
            out.fill(np.nan)
            graph.launch()
            stream.synchronize()
        assert bool((out == want).all())


@pytest.mark.parametrize(("side", "dtype", "N"), [(3, "float64", 1), (128, "float16", 64)])
@kernel("spmv_small", "gemm_sm90")
def test_a_graph_keeps_the_memory_in_which_it_adds_pieces_of_rows(side, dtype, N, rng) -> None:
    """Arrays made after the capture are not where the pieces of a long row are added up, and outlive its launch."""
    import cupy

    columns = 3000 if side == 3 else 512
    blocks = values(rng, (columns, side, side), np.dtype(dtype))
    index = np.arange(columns, dtype=np.int32), np.array([0, 0, columns], np.int32)
    A = device((blocks, *index, (2 * side, columns * side)))
    B = cupy.asarray(values(rng, (columns * side, N), np.dtype(dtype)))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        want = A @ B
        out = cupy.empty_like(want)
        stream.synchronize()
        stream.begin_capture()
        bg.matmul(A, B, out=out)
        graph = stream.end_capture()
        others = [cupy.full(1 << k, 7, np.float32) for k in range(8, 24) for _ in range(4)]
        for _ in range(3):
            out.fill(0)
            graph.launch()
        stream.synchronize()
        assert bool((out == want).all())
        assert all(bool((x == 7).all()) for x in others)


@kernel("gemm_sm90", "gemm_sm80")
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

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        want = out.copy()
        call()
        stream.synchronize()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        others = [cupy.full(1 << k, 7, np.float32) for k in range(8, 22) for _ in range(6)]
        for _ in range(3):
            out.fill(0)
            graph.launch()
        stream.synchronize()
        assert bool((out == want).all())
        assert all(bool((x == 7).all()) for x in others)


# -------------------------------------------------------------------- the tensor cores of Hopper
def served_by(A: Any, name: str = "gemm_sm90") -> bool:
    """Did all products of this matrix run on that kernel? Cards that are no Hopper cannot tell."""
    import cupy

    from bsrgemm._kernels.workspace import StreamOrdered

    plans = [made.value if isinstance(made, StreamOrdered) else made for made in A._matrix_cache.plans.values()]
    names = {plan.config.spec().entry for plan in plans}
    return names == {name} or cupy.cuda.Device().compute_capability != "90"


def exact_product(A: Matrix, B: np.ndarray, transposed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64 and the same of absolute values."""
    D = dense(A, np.dtype(np.float64))
    D = D.T if transposed else D
    wide = B.astype(np.float64)
    return D @ wide, np.abs(D) @ np.abs(wide)


#: From shared memory with and without a tail; from registers, in one piece of memory or not.
SM90_BLOCKS = [
    *[(64, 64), (128, 128), (128, 64), (64, 16), (192, 48), (256, 80), (64, 112), (128, 256)],
    *[(16, 16), (32, 32), (16, 64), (32, 16), (48, 80), (96, 96), (80, 48), (32, 192)],
]


#: Under memcheck a test takes ten times as long: one block of each way through the kernel.
MEMCHECKED = [(128, 64), (64, 112), (32, 32), (48, 80)]


def some_under_memcheck(blocks: list[tuple[int, int]]) -> list[Any]:
    return [pytest.param(b, id=str(b), marks=pytest.mark.sanitizer if b in MEMCHECKED else ()) for b in blocks]


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
@pytest.mark.parametrize("block", some_under_memcheck(SM90_BLOCKS))
def test_tensor_core_product_is_right_for_blocks_widths_and_layouts(dtype, block, rng, checksum) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for N, index, layout in [(16, np.int32, "C"), (72, np.int64, "F"), (256, np.int32, "F"), (520, np.int32, "C")]:
        A = pattern(rng, 5, 4, *block, dtype, index)
        B = values(rng, (A[3][1], N), dtype)
        want, size = exact_product(A, B)
        for out_dtype, order in [(dtype, "C"), (np.dtype(np.float32), "C"), (dtype, "F")]:
            out = cupy.full(want.shape, np.nan, np.float32, order=order).astype(out_dtype, order=order)
            dA = device(A)
            bg.matmul(dA, strided(B, layout), out=out)
            assert served_by(dA) or served_by(dA, "gemm_turned_sm90")
            checksum(cupy.ascontiguousarray(out))
            assert_close(out.get(), want, size, 2 * A[3][1], np.float32)


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("block", some_under_memcheck(SM90_BLOCKS))
def test_tensor_core_product_with_the_transpose(block, rng, checksum) -> None:
    import cupy

    dtype = np.dtype(np.float16)
    for N, layout, order in [(64, "C", "C"), (200, "F", "F"), (256, "C", "F")]:
        A = pattern(rng, 6, 5, *block, dtype)
        B = values(rng, (A[3][0], N), dtype)
        want, size = exact_product(A, B, transposed=True)
        dA = device(A)
        out = cupy.full(want.shape, np.nan, dtype, order=order)
        bg.matmul(dA.T, strided(B, layout), out=out)
        assert served_by(dA)
        checksum(cupy.ascontiguousarray(out))
        assert_close(out.get(), want, size, 2 * A[3][0], np.float32)
        other = cupy.asarray(np.ascontiguousarray(B.T)) @ dA  # (N, M) @ (M, K)
        assert_close(other.get(), want.T, size.T, 2 * A[3][0], np.float32)


SMALL_BLOCKS = [*((n, n) for n in range(1, 17)), (2, 3), (3, 2), (1, 16), (16, 1), (13, 11), (6, 16), (5, 8)]


@kernel("spmv_small", "spmm", "spmm_f64")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex128"])
@pytest.mark.parametrize("block", sanitized(SMALL_BLOCKS, "(3, 3)", "(13, 11)"), ids=str)
def test_small_blocks_by_one_vector_and_by_few_columns(block, dtype, rng, checksum) -> None:
    import cupy

    dtype = np.dtype(dtype)
    exact = exact_dtype(dtype)
    for index, transposed, N in itertools.product((np.int32, np.int64), (False, True), (1, 2, 5, 16, 48, 64, 100)):
        A = pattern(rng, 37, 29, *block, dtype, index, 0.3)
        D = dense(A, exact)
        D = D.T if transposed else D
        B = values(rng, (D.shape[1], N), dtype)
        dA = device(A)
        out = cupy.full((D.shape[0], N), 0.25, dtype)
        bg.matmul(dA.T if transposed else dA, cupy.asarray(B), out=out, alpha=2, beta=0.5)
        checksum(out)
        wide = B.astype(exact)
        assert_close(
            out.get(), 2 * (D @ wide) + 0.125, 2 * (np.abs(D) @ np.abs(wide)) + 1, 2 * D.shape[1], acc_of(dtype)
        )


@kernel("spmv_small")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize(
    "block",
    sanitized([(1, 1), (2, 2), (3, 3), (2, 3), (6, 3), (4, 4), (6, 6), (7, 7), (8, 8), (16, 16)], "(6, 3)"),
    ids=str,
)
def test_rows_of_one_length_by_one_vector(block, dtype, rng, checksum) -> None:
    """The fewer blocks a row has, the fewer lanes share it: 1000 rows and one, so that some lanes have none."""
    import cupy

    dtype, rows, cols = np.dtype(dtype), 1001, 40
    R, K = block
    for length in (1, 2, 3, 5, 9, 14, 18, 27):
        col = np.argsort(rng.random((rows, cols)), axis=1)[:, :length].astype(np.int32)
        data = values(rng, (rows * length, *block), dtype)
        arrays = (data, col.reshape(-1), np.arange(0, rows * length + 1, length, dtype=np.int32))
        A = bg.bsr_array(tuple(map(cupy.asarray, arrays)), shape=(rows * R, cols * K))
        x = values(rng, (cols * K,), dtype)
        got = A @ cupy.asarray(x)
        checksum(got)
        parts = x.astype(float).reshape(cols, K)[col.reshape(-1)]
        want = np.einsum("prk,pk->pr", data.astype(float), parts).reshape(rows, length, R).sum(axis=1)
        size = np.einsum("prk,pk->pr", abs(data.astype(float)), abs(parts)).reshape(rows, length, R).sum(axis=1)
        assert_close(got.get(), want.reshape(-1), size.reshape(-1), length * K, acc_of(dtype))


@kernel("spmv_small")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "block", sanitized([(2, 2), (3, 3), (2, 3), (3, 2), (4, 4), (6, 3), (8, 8)], "(2, 3)"), ids=str
)
def test_short_rows_of_different_lengths(block, dtype, rng, checksum) -> None:
    """Several rows under way at once: empty ones, one of 300 blocks among them, and bounds that are rubbish."""
    import cupy

    dtype, cols, (R, K) = np.dtype(dtype), 40, block
    for index, most in itertools.product((np.int32, np.int64), (1, 2, 5)):
        lengths = rng.integers(0, most + 1, 1003)
        lengths[17] = 300
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
        col = rng.integers(0, cols, indptr[-1]).astype(index)
        data, x = values(rng, (len(col), *block), dtype), values(rng, (cols * K,), dtype)
        A = bg.bsr_array(tuple(map(cupy.asarray, (data, col, indptr))), shape=(len(lengths) * R, cols * K))
        got = A @ cupy.asarray(x)
        checksum(got)
        parts, row = x.astype(float).reshape(cols, K)[col], np.repeat(np.arange(len(lengths)), lengths)
        want, size = np.zeros((2, len(lengths), R))
        np.add.at(want, row, np.einsum("prk,pk->pr", data.astype(float), parts))
        np.add.at(size, row, np.einsum("prk,pk->pr", abs(data.astype(float)), abs(parts)))
        assert_close(got.get(), want.reshape(-1), size.reshape(-1), 300 * K, acc_of(dtype))
        for damage in (-1, len(col), 2**31 - 1, -(2**31), *((2**32 + 3, -(2**40)) if index == np.int64 else ())):
            A.indptr[100:103] = damage
            assert bool(cupy.isfinite(A @ cupy.asarray(x)).all())


@kernel("spmm", "spmm_f64")
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (3, 3), (4, 4), (5, 5), (6, 6), (7, 3), (9, 9), (15, 16)], ids=str)
def test_blocks_that_come_through_shared_memory(block, dtype, rng, checksum) -> None:
    """Rows of many chunks, of none and of a part of one; more rows than warps; batches; every call the same bits."""
    import cupy

    dtype = np.dtype(dtype)
    R, K = block
    lengths = np.array([0, 3000, 2, 28, 0, 29, 7, 500, *rng.integers(0, 30, 700 if R < 6 else 100), 0])
    cols = 90
    col = rng.integers(0, cols, lengths.sum())
    data = values(rng, (len(col), *block), dtype)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    row = np.repeat(np.arange(len(lengths)), lengths)
    wide = np.zeros((2, len(lengths), cols, R, K))
    np.add.at(wide[0], (row, col), data)
    np.add.at(wide[1], (row, col), np.abs(data))
    D, size = (x.swapaxes(1, 2).reshape(len(lengths) * R, cols * K) for x in wide)
    for index, shape in ((np.int32, (2,)), (np.int64, (16,)), (np.int32, (34,)), (np.int32, (3, 8))):
        arrays = (data, col.astype(index), indptr.astype(index))
        A = bg.bsr_array(tuple(map(cupy.asarray, arrays)), shape=D.shape)
        B = values(rng, (*shape[:-1], D.shape[1], shape[-1]), dtype)
        dB = cupy.asarray(B)
        got = bg.matmul(A, dB)
        (plan,) = A._matrix_cache.plans.values()
        config, aligned = plan.value.config, shape[-1] * dtype.itemsize % 16 == 0
        tensor_cores = R >= 6 and dtype == np.float64 and aligned
        assert config.spec().entry == ("spmm_f64" if tensor_cores else "spmm")
        assert tensor_cores or config.staged == aligned
        checksum(got)
        assert_close(got.get(), D @ B.astype(float), size @ np.abs(B).astype(float), 3000 * K, dtype)
        for _ in range(100):
            assert bool((bg.matmul(A, dB) == got).all())


@kernel("spmm", "spmm_f64")
@pytest.mark.parametrize(
    ("block", "dtype", "entry"),
    [
        *((b, "float64", "spmm_f64") for b in ((16, 16), (17, 5), (20, 20), (32, 32), (40, 100), (64, 64), (128, 128))),
        ((16, 16), "float32", "spmm"),
        ((16, 3), "float32", "spmm"),
    ],
    ids=str,
)
def test_few_columns_read_blocks_once_whatever_their_size(block, dtype, entry, rng, checksum) -> None:
    """Tiles of the tensor cores meet the columns of all their rows: they are for more columns."""
    import cupy

    dtype = np.dtype(dtype)
    A = pattern(rng, 37, 29, *block, dtype, density=0.3)
    D = dense(A, np.dtype(np.float64))
    for N in (2, 16, 34, 64):
        B = values(rng, (D.shape[1], N), dtype)
        dA, out = device(A), cupy.full((D.shape[0], N), 0.25, dtype)
        bg.matmul(dA, cupy.asarray(B), out=out, alpha=2, beta=0.5)
        (plan,) = dA._matrix_cache.plans.values()
        config = plan.value.config
        assert N * dtype.itemsize % 16 or (config.spec().entry == entry and getattr(config, "staged", True))
        checksum(out)
        wide = B.astype(float)
        assert_close(out.get(), 2 * (D @ wide) + 0.125, 2 * (np.abs(D) @ np.abs(wide)) + 1, 2 * D.shape[1], dtype)


@kernel("spmm", "spmm_f64")
@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(3, 3), (6, 6), (9, 7), (40, 20)], ids=str)
def test_rows_take_nothing_from_blocks_that_they_lack(block, rng) -> None:
    """NaN and Inf of B where a row has no block, and of blocks whose column is out of range, in chunks with gaps."""
    import cupy

    R, K = block
    A = pattern(rng, 40, 30, R, K, np.dtype(np.float64), density=0.3)
    data, indices, indptr, shape = A
    B = values(rng, (shape[1], 16), np.dtype(np.float64))
    B[7 * K : 8 * K] = np.nan
    B[11 * K] = np.inf
    indices = indices.copy()
    spoiled = rng.integers(0, len(indices), 5)
    data = data.copy()
    data[spoiled] = np.nan
    indices[spoiled] = [-1, 30, 2**31 - 1, -(2**31), 31]
    dA = bg.bsr_array(tuple(map(cupy.asarray, (data, np.zeros_like(indices), indptr))), shape=shape)
    dA.indices[...] = cupy.asarray(indices)
    got = (dA @ cupy.asarray(B)).get()
    row = np.repeat(np.arange(40), np.diff(indptr))
    good = (indices >= 0) & (indices < 30)
    want = np.zeros((40, R, 16))
    with np.errstate(invalid="ignore"):
        np.add.at(want, row[good], data[good] @ B.reshape(30, K, 16)[indices[good]])
    want = want.reshape(-1, 16)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    sound = np.isfinite(want)
    np.testing.assert_allclose(got[sound], want[sound], rtol=1e-12, atol=1e-12)


@kernel("spmv_small")
@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(1, 1), (2, 2), (3, 3), (8, 8), (16, 16)], ids=str)
def test_long_rows_are_added_up_piece_by_piece(block, rng, checksum) -> None:
    import cupy

    lengths = np.array([0, 100_000, 2, 256, 0, 257, 1025, 7, 5000, *[3] * 500])
    col = rng.integers(0, 5000, lengths.sum()).astype(np.int32)
    data = values(rng, (len(col), *block), np.dtype(np.float64))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    A = bg.bsr_array(tuple(map(cupy.asarray, (data, col, indptr))), shape=(len(lengths) * block[0], 5000 * block[1]))
    x = values(rng, (5000 * block[1],), np.dtype(np.float64))
    got = A @ cupy.asarray(x)
    checksum(got)
    terms = np.einsum("prk,pk->pr", data, x.reshape(5000, -1)[col])
    size = np.einsum("prk,pk->pr", np.abs(data), np.abs(x).reshape(5000, -1)[col])
    row = np.repeat(np.arange(len(lengths)), lengths)
    want, bound = np.zeros((2, len(lengths), block[0]))
    np.add.at(want, row, terms)
    np.add.at(bound, row, size)
    assert_close(got.get(), want.reshape(-1), bound.reshape(-1), int(lengths.max()) * block[1], np.float64)
    for _ in range(20):
        assert bool((A @ cupy.asarray(x) == got).all())


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few columns, and copies of B with aligned rows, pay for every matrix."""
    from bsrgemm._products import heuristics

    monkeypatch.setattr(heuristics, "_LARGE", 0)
    monkeypatch.setattr(heuristics, "_WORTH_A_COPY", 0)
    heuristics.wants_aligned_rows.cache_clear()
    yield
    heuristics.wants_aligned_rows.cache_clear()


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("N", sanitized([2, 3, 7, 8, 15, 17, 33, 101, 260, 1001], "7", "33"))
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (48, 80), (16, 16)], ids=str)
def test_any_number_of_columns_runs_on_the_tensor_cores(block, N, rng, checksum, nothing_is_small) -> None:
    import cupy

    A = pattern(rng, 5, 4, *block, HALF)
    B = values(rng, (A[3][1], N), HALF)
    want, size = exact_product(A, B)
    for out_dtype, layout, beta in itertools.product(("float16", "float32"), LAYOUTS, (0, 0.5)):
        dA, out = device(A), cupy.full(want.shape, 0.25, out_dtype)
        with forced_kernel.force_kernel("GemmSm90"):  # up to 8 columns have a kernel of their own
            bg.matmul(dA, strided(B, layout), out=out, beta=beta)
        assert served_by(dA)
        checksum(out)
        assert_close(out.get(), want + 0.25 * beta, size + 0.25, 2 * A[3][1], np.float32)
    batch = values(rng, (3, A[3][1], N), HALF)
    got = device(A) @ cupy.asarray(batch)
    for one, B in zip(got.get(), batch, strict=True):
        assert_close(one, *exact_product(A, B), 2 * A[3][1], np.float32)


@kernel("gemm_sm80", "row_matching")
@pytest.mark.parametrize("N", [2, 5, 15, 33, 101])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_number_of_columns_runs_on_the_portable_kernel(dtype, N, rng, checksum, nothing_is_small) -> None:
    import cupy

    A = pattern(rng, 5, 4, 32, 32, np.dtype(dtype))
    B = values(rng, (A[3][1], N), np.dtype(dtype))
    want, size = exact_product(A, B)
    with forced_kernel.force_kernel("GemmSm80"):
        dA = device(A)
        out = dA @ cupy.asarray(B)
        assert served_by(dA, "gemm_sm80")
    checksum(out)
    assert_close(out.get(), want, size, 2 * A[3][1], acc_of(np.dtype(dtype)))


@kernel("gemm_simt", "spmv", "spmv_small", "spmm")
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64", "complex128", "bool"])
def test_product_with_the_transpose_on_the_plain_cores(dtype, rng, checksum) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for (R, C), N in itertools.product([(1, 1), (3, 2), (8, 5), (17, 13)], [1, 2, 7, 130]):
        A = pattern(rng, 7, 6, R, C, dtype)
        B = values(rng, (A[3][0], N), dtype)
        exact = exact_dtype(dtype)
        D = dense(A, exact)
        size = 0.0 if dtype == BOOL else np.abs(D.T) @ np.abs(B.astype(exact))
        got = device(A).T @ cupy.asarray(B)
        checksum(got)
        assert_close(got.get(), D.T @ B.astype(exact), size, 2 * A[3][0], acc_of(dtype))


@kernel("gemm_sm90", "gemm_simt", "spmv", "row_matching")
@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(64, 64), (16, 16), (3, 5)], ids=str)
def test_batches_are_one_launch(block, rng, checksum) -> None:
    import cupy

    dtype = np.dtype(np.float16)
    A = pattern(rng, 6, 5, *block, dtype)
    for N in (1, 5, 40, 264):
        B = values(rng, (3, A[3][1], N), dtype)
        dA = device(A)
        got = dA @ cupy.asarray(B)
        assert len(dA._matrix_cache.plans) == 1
        checksum(got)
        for k in range(3):
            want, size = exact_product(A, B[k])
            assert_close(got[k].get(), want, size, 2 * A[3][1], np.float32)
        spread = cupy.zeros((5, A[3][1], 2 * N), dtype)[::2, :, ::2]  # no batch, row or column next to the other
        spread[...] = cupy.asarray(B)
        assert_close((dA @ spread)[2].get(), *exact_product(A, B[2]), 2 * A[3][1], np.float32)


@kernel("gemm_sm90", "row_matching")
@pytest.mark.sanitizer
def test_tensor_core_product_scales_and_adds(rng, checksum) -> None:
    import cupy

    for dtype, out_dtype, block in itertools.product(
        ["float16", BFLOAT16], ["own", "float32"], [(128, 32), (64, 64), (32, 32)]
    ):
        dtype = np.dtype(dtype)
        out_dtype = dtype if out_dtype == "own" else np.dtype(out_dtype)
        A = pattern(rng, 4, 3, *block, dtype)
        B, old = values(rng, (A[3][1], 100), dtype), values(rng, (A[3][0], 100), out_dtype)
        exact, size = exact_product(A, B)
        for alpha, beta in [(0.5, 0), (1, 1), (-2, 0.25)]:
            out = cupy.asarray(old)
            dA = device(A)
            bg.matmul(dA, cupy.asarray(B[:, :96].copy()), out=out[:, :96], alpha=alpha, beta=beta)
            checksum(out)
            want = alpha * exact + beta * old.astype(np.float64)
            weight = abs(alpha) * size + abs(beta) * np.abs(old.astype(np.float64))
            assert_close(out.get()[:, :96], want[:, :96], weight[:, :96], 2 * A[3][1], np.float32)
            np.testing.assert_array_equal(out.get()[:, 96:], old[:, 96:])  # nothing beyond the view is written


@kernel("gemm_sm90", "gemm_simt")
@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(128, 128), (64, 96), (64, 32), (16, 16)], ids=str)
def test_scaled_bytes_are_fp8(block, rng, checksum) -> None:
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
            checksum(got)
            # The tensor cores keep some 13 bits of each product when they add fp8.
            bound = 2**-10 * 1.5 * size + np.finfo(out_dtype).eps * np.abs(1.5 * want) + 1e-6
            assert (np.abs(got.get() - 1.5 * want) <= bound).all()


@kernel("gemm_sm90", "row_matching")
@pytest.mark.sanitizer
@pytest.mark.parametrize("block", [(64, 64), (32, 32), (16, 16)], ids=str)
def test_tensor_core_product_reads_nothing_outside_with_spoiled_indices(block, rng) -> None:
    import cupy

    good = pattern(rng, 6, 5, *block, "float16")
    B = cupy.asarray(values(rng, (good[3][1], 64), np.dtype("float16")))
    for damage in (-1, 5, 2**31 - 1, -(2**31)):
        for transposed in (False, True):
            A = device(good)  # spoiled before its work list is made
            X = cupy.asarray(values(rng, (good[3][0], 64), np.dtype("float16"))) if transposed else B
            A.indices[:3] = damage
            assert bool(cupy.isfinite((A.T if transposed else A) @ X).all())
            A = device(good)
            A.indptr[2] = damage
            assert bool(cupy.isfinite((A.T if transposed else A) @ X).all())
        A = device(good)  # and after
        A @ B
        A.indices[:3] = damage
        A.indptr[2] = damage
        assert bool(cupy.isfinite(A @ B).all())


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("block", some_under_memcheck([(64, 48), (128, 128), (64, 64), (32, 32), (16, 16), (48, 80)]))
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_tensor_core_product_spreads_nan_only_through_stored_blocks(block, bad, rng) -> None:
    import cupy

    A = pattern(rng, 9, 6, *block, "float16")
    B = values(rng, (A[3][1], 64), np.dtype("float16"))
    B[block[1] + 3, 5:9] = bad  # in block column 1; a tile of K reaches into it from block column 0
    with np.errstate(invalid="ignore"):
        stored = dense(A, np.dtype(np.float64))
        present = np.zeros((9, 6), bool)
        present[np.repeat(np.arange(9), np.diff(A[2])), A[1]] = True
        want, size = np.zeros((A[3][0], 64)), np.zeros((A[3][0], 64))
        R, C = block
        for i, j in zip(*np.nonzero(present), strict=True):
            left, right = stored[i * R : (i + 1) * R, j * C : (j + 1) * C], B[j * C : (j + 1) * C].astype(np.float64)
            want[i * R : (i + 1) * R] += left @ right
            size[i * R : (i + 1) * R] += np.abs(left) @ np.abs(right)
    for alpha, beta, order in [(1, 0, "C"), (1, 0, "F"), (2, -1, "C")]:
        old = values(rng, want.shape, np.dtype("float16"))
        out = cupy.asarray(old, order=order)
        bg.matmul(device(A), cupy.asarray(B), out=out, alpha=alpha, beta=beta)
        whole = alpha * want + (beta * old if beta else 0)
        weight = alpha * size + abs(beta) * np.abs(old.astype(np.float64))
        got, finite = out.get(), np.isfinite(whole)
        np.testing.assert_array_equal(np.isfinite(got.astype(np.float64)), finite)
        assert_close(got[finite], whole[finite], weight[finite], 2 * A[3][1], np.float32)


def uneven(rng: np.random.Generator, kind: str, rows: int, cols: int, block: tuple[int, int]) -> Matrix:
    """Patterns whose rows differ in length."""
    stored = np.zeros((rows, cols), bool)
    if kind == "one dense row":
        stored[rows // 2] = True
        stored[np.arange(rows), np.arange(rows) % cols] = True
    elif kind == "arrowhead":
        stored[0] = stored[:, 0] = True
        stored[np.arange(rows), np.arange(rows) % cols] = True
    elif kind == "power law":
        for i, length in enumerate((cols / np.arange(1, rows + 1)).astype(int)):
            stored[i, rng.choice(cols, length, replace=False)] = True
    elif kind == "banded":
        stored = np.abs(np.arange(rows)[:, None] - np.arange(cols)) < 3
    elif kind == "one full row":
        stored[1] = True
    i, j = np.nonzero(stored)
    indptr = np.searchsorted(i, np.arange(rows + 1)).astype(np.int32)
    R, C = block
    return values(rng, (len(i), R, C), np.dtype(np.float16)), j.astype(np.int32), indptr, (rows * R, cols * C)


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (16, 16)], ids=str)
@pytest.mark.parametrize("kind", ["one dense row", "arrowhead", "power law", "banded", "one full row"])
def test_uneven_rows_come_in_pieces_and_repeat_bit_by_bit(kind, block, rng, checksum) -> None:
    import cupy

    A = uneven(rng, kind, 12, 4096 // block[1], block)
    cut = False
    for N in (64, 256, 1000):
        B = values(rng, (A[3][1], N), np.dtype(np.float16))
        dA = device(A)
        got = dA @ cupy.asarray(B)
        cut |= any(made.value.scratch.floats > 0 for made in dA._matrix_cache.plans.values())
        checksum(got)
        want, size = exact_product(A, B)
        assert_close(got.get(), want, size, 2 * A[3][1], np.float32)
        differing = cupy.zeros((), np.int64)
        for _ in range(100):
            differing += (got != dA @ cupy.asarray(B)).sum()
        assert int(differing) == 0
    assert cut


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (32, 32), (16, 16), (48, 80)], ids=str)
def test_tensor_core_product_repeats_bit_by_bit(block, rng) -> None:
    import cupy

    A = device(pattern(rng, 30, 20, *block, "float16"))
    B = cupy.asarray(values(rng, (A.shape[1], 1000), np.dtype("float16")))
    first = A @ B
    differing = cupy.zeros((), np.int64)
    for _ in range(1000):
        differing += (first != A @ B).sum()
    assert int(differing) == 0


@kernel("gemm_sm90")
def test_two_streams_share_a_matrix(rng) -> None:
    import cupy

    A = device(pattern(rng, 40, 30, 64, 64, "float16"))
    B = cupy.asarray(values(rng, (A.shape[1], 512), np.dtype("float16")))
    want = device((A.data.get(), A.indices.get(), A.indptr.get(), A.shape)) @ B
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    results: list[Any] = []
    for _ in range(50):
        for stream in streams:
            with stream:
                results.append(A @ B)
    cupy.cuda.Device().synchronize()
    assert all(bool((x == want).all()) for x in results)


@kernel("gemm_sm90", "row_matching")
@pytest.mark.parametrize("block", [(64, 64), (128, 80), (256, 128), (32, 32), (16, 16), (48, 80)], ids=str)
@pytest.mark.parametrize("N", [64, 1000])
def test_tensor_core_pipeline_survives_delays_and_poisoned_slots(block, N, rng, monkeypatch) -> None:
    import cupy

    from bsrgemm._kernels import jit
    from bsrgemm._products import configs

    A = pattern(rng, 30, 20, *block, "float16")
    B = cupy.asarray(values(rng, (A[3][1], N), np.dtype("float16")))
    calm = device(A) @ B
    plain = configs.GemmSm90.spec

    def stressed(config: Any) -> Any:
        spec = plain(config)
        return jit.KernelSpec(spec.source, spec.entry, (*spec.defines, ("STRESS", 1)))

    monkeypatch.setattr(configs.GemmSm90, "spec", stressed)
    dA = device(A)
    for _ in range(20):
        assert bool((dA @ B == calm).all())


@kernel("gemm_sm90")
def test_operands_that_lie_badly_are_multiplied_all_the_same(rng) -> None:
    import cupy

    for block in [(64, 64), (16, 16)]:
        A = pattern(rng, 3, 3, *block, "float16")
        B = values(rng, (A[3][1], 45), np.dtype("float16"))  # rows of 90 bytes
        want, size = exact_product(A, B)
        room = cupy.zeros(B.size + 8, np.float16)
        data = cupy.zeros(A[0].size + 8, np.float16)
        for shift in (0, 1, 3):
            moved = room[shift : shift + B.size].reshape(B.shape)
            moved[...] = cupy.asarray(B)
            assert_close((device(A) @ moved).get(), want, size, 2 * A[3][1], np.float32)
            blocks = data[shift : shift + A[0].size].reshape(A[0].shape)
            blocks[...] = cupy.asarray(A[0])
            dA = bg.bsr_array((blocks, cupy.asarray(A[1]), cupy.asarray(A[2])), shape=A[3])
            assert dA.data.data.ptr == blocks.data.ptr
            assert_close((dA @ cupy.asarray(B)).get(), want, size, 2 * A[3][1], np.float32)


@kernel("row_matching")
@pytest.mark.parametrize("per_group", [2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "cols"), [(128, 128), pytest.param(37, 5, marks=pytest.mark.sanitizer), (1300, 70), (512, 40)]
)
def test_matched_rows_share_more_columns_than_neighbours(per_group, rows, cols, rng, checksum) -> None:
    import cupy

    from bsrgemm._products import row_matching, work_list

    stored = rng.random((rows, cols)) < 0.22
    i, j = np.nonzero(stored)
    indptr = cupy.asarray(np.searchsorted(i, np.arange(rows + 1)).astype(np.int32))
    pattern_ = work_list.Pattern(cupy.asarray(j.astype(np.int32)), indptr, rows, cols, False)
    order = row_matching.matched(pattern_, 1, per_group)
    checksum(order)
    padded = -(-rows // per_group) * per_group
    np.testing.assert_array_equal(np.sort(order.get()), np.arange(padded))

    def entries(order: np.ndarray) -> int:
        full = np.zeros((padded, cols), bool)
        full[:rows] = stored
        return int(full[order].reshape(-1, per_group, cols).any(axis=1).sum())

    assert entries(order.get()) < 0.99 * entries(np.arange(padded))
    assert bool((order == row_matching.matched(pattern_, 1, per_group)).all())


# ------------------------------------------------------------- the tensor cores of Ampere and newer
SM80 = [
    ("float16", "float16", None),
    ("float16", "float32", None),
    (BFLOAT16, BFLOAT16, None),
    ("float32", "float32", None),
    ("float32", "float32", "tf32"),
    ("float64", "float64", None),
    ("int8", "int32", None),
]


def on_sm80() -> Any:
    """Inside, products run on gemm_sm80, also where gemm_sm90 would be faster."""

    return forced_kernel.force_kernel("GemmSm80")


@kernel("gemm_sm80", "row_matching")
@pytest.mark.parametrize(("dtype", "out_dtype", "precision"), SM80, ids=str)
@pytest.mark.parametrize("block", some_under_memcheck([(128, 128), (64, 96), (32, 32), (16, 64), (48, 160)]))
def test_portable_product_is_right_for_dtypes_blocks_and_layouts(
    dtype, out_dtype, precision, block, rng, checksum
) -> None:
    import cupy

    dtype, out_dtype = np.dtype(dtype), np.dtype(out_dtype)
    exact = exact_dtype(out_dtype)
    for N, layout, transposed, (alpha, beta) in [
        (16, "C", False, (1, 0)),
        (208, "F", False, (2, 0)),
        (130, "C", True, (1, -1)),
        (144, "F", True, (1, 0)),
    ]:
        A = pattern(rng, 6, 5, *(block[::-1] if transposed else block), dtype)
        M, K = A[3][::-1] if transposed else A[3]
        pitch = -(-N * dtype.itemsize // 16) * 16 // dtype.itemsize  # rows start at multiples of 16 bytes
        B = values(rng, (K, pitch), dtype)[:, :N]
        D = dense(A, exact)
        D = D.T if transposed else D
        old = values(rng, (M, N), out_dtype)
        want = alpha * (D @ B.astype(exact)) + beta * old.astype(exact)
        size = 0.0 if exact.kind == "i" else abs(alpha) * np.abs(D) @ np.abs(B.astype(exact)) + abs(beta * old)
        dA, out = device(A), cupy.asarray(old)
        room = cupy.zeros((K, pitch), dtype)
        room[:, :N] = cupy.asarray(np.ascontiguousarray(B))
        X = room[:, :N] if layout == "C" else strided(np.ascontiguousarray(B), "F")
        with on_sm80():
            bg.matmul(dA.T if transposed else dA, X, out=out, alpha=alpha, beta=beta, precision=precision)
            assert served_by(dA, "gemm_sm80") or dtype.kind == "i"  # whose duplicates are added up in another matrix
        checksum(out)
        if precision == "tf32":
            assert (np.abs(out.get() - want) <= 2**-10 * size + 1e-6).all()
        else:
            assert_close(out.get(), want, size, 2 * K, np.float32 if dtype in HALF_DTYPES else out_dtype)


@kernel("gemm_sm80", "row_matching")
@pytest.mark.parametrize(("dtype", "out_dtype", "precision"), SM80, ids=str)
def test_portable_product_repeats_and_keeps_nan_to_stored_blocks(dtype, out_dtype, precision, rng) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for block in [(128, 64), (32, 32), (16, 32)]:
        A = pattern(rng, 20, 12, *block, dtype)
        B = values(rng, (A[3][1], 400), dtype)
        if dtype.kind != "i":
            B[block[1] + 3, 7] = np.inf
            B[block[1] + 3, 9] = np.nan
        dA, X = device(A), cupy.asarray(B)
        with on_sm80():
            first = bg.matmul(dA, X, out_dtype=np.dtype(out_dtype), precision=precision)
            differing = cupy.zeros((), np.int64)
            for _ in range(300):
                again = bg.matmul(dA, X, out_dtype=np.dtype(out_dtype), precision=precision)
                differing += (first.view(np.uint8) != again.view(np.uint8)).sum()
        assert int(differing) == 0
        touched = np.zeros(20, bool)
        rows = np.repeat(np.arange(20), np.diff(A[2]))
        touched[rows[A[1] == 1]] = dtype.kind != "i"
        got = first.get().astype(np.float64)
        assert not np.isfinite(got[:, 9].reshape(20, -1)[touched]).any()
        assert not np.isfinite(got[:, 7].reshape(20, -1)[touched]).any()
        got[:, [7, 9]] = 0
        assert np.isfinite(got).all()
        untouched = first.get().astype(np.float64)[:, [7, 9]].reshape(20, -1)[~touched]
        assert np.isfinite(untouched).all()


@kernel("gemm_sm80")
def test_infinity_in_float32_stays_infinity(rng) -> None:
    import cupy

    A = pattern(rng, 3, 3, 32, 32, np.float32)
    B = np.abs(values(rng, (96, 32), np.dtype(np.float32)))
    A = (np.abs(A[0]) + 1, *A[1:])
    B[40, 3] = np.inf
    got = (device(A) @ cupy.asarray(B)).get()
    rows = np.repeat(np.arange(3), np.diff(A[2]))
    touched = np.isin(np.arange(3), rows[A[1] == 1])
    np.testing.assert_array_equal(np.isposinf(got[:, 3]), np.repeat(touched, 32))


@kernel("gemm_sm80")
def test_float32_is_as_accurate_as_cublas(rng) -> None:
    import cupy

    n = 2048
    A = device(pattern(rng, n // 32, n // 32, 32, 32, np.float32, density=0.5))
    B = cupy.asarray(values(rng, (n, n), np.dtype(np.float32)))
    D = A.toarray()
    exact = D.astype(np.float64) @ B.astype(np.float64)
    size = cupy.abs(D).astype(np.float64) @ cupy.abs(B).astype(np.float64)
    size[size == 0] = 1  # empty rows
    ours = float((cupy.abs(A @ B - exact) / size).max())
    theirs = float((cupy.abs(D @ B - exact) / size).max())
    assert 0 < ours <= 2 * theirs


@kernel("gemm_sm80")
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_products_go_through_real_ones(dtype, rng, checksum) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for block, transposed, (alpha, beta) in [
        ((32, 32), False, (1, 0)),
        ((16, 48), False, (2 - 1j, 0)),
        ((48, 16), True, (1, 0.5j)),
    ]:
        A = pattern(rng, 6, 5, *block, dtype)
        M, K = A[3][::-1] if transposed else A[3]
        B, old = values(rng, (K, 100), dtype), values(rng, (M, 100), dtype)
        D = dense(A, np.dtype(np.complex128))
        D = D.T if transposed else D
        dA, out = device(A), cupy.asarray(old)
        bg.matmul(dA.T if transposed else dA, cupy.asarray(B), out=out, alpha=alpha, beta=beta)
        want = alpha * (D @ B) + beta * old
        size = abs(alpha) * np.abs(D) @ np.abs(B) + np.abs(beta * old)
        assert dA._matrix_cache.wide
        checksum(out)
        assert_close(out.get(), want, size, 4 * K, dtype)
        dA.data *= 2  # values are read anew
        bg.matmul(dA.T if transposed else dA, cupy.asarray(B), out=out)
        assert_close(out.get(), 2 * (D @ B), 2 * size, 4 * K, dtype)


@kernel("gemm_sm90", "gemm_sm80", "gemm_simt")
def test_tune_keeps_the_fastest_kernel_on_disk(rng, tmp_path, monkeypatch) -> None:
    import cupy

    from bsrgemm._products import measured

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    A = device(pattern(rng, 8, 8, 64, 64, "float16"))
    times = bg.tune(A, 64)
    assert len(times) > 3 and times == sorted(times, key=lambda pair: pair[1])
    measured._loaded.clear()  # as another process would find it
    B = cupy.asarray(values(rng, (A.shape[1], 64), np.dtype("float16")))
    got = A @ B
    (made,) = A._matrix_cache.plans.values()
    assert str(made.value.config.spec()) == times[0][0]
    want, size = exact_product((A.data.get(), A.indices.get(), A.indptr.get(), A.shape), B.get())
    assert_close(got.get(), want, size, 2 * A.shape[1], np.float32)
    (file,) = (tmp_path / "bsrgemm").glob("tuned-*.json")
    file.write_text("damaged")
    measured._loaded.clear()
    A._matrix_cache.plans.clear()
    assert_close((A @ B).get(), want, size, 2 * A.shape[1], np.float32)  # by rule


# ----------------------------------------------------------------------------------------- work lists
def assert_same_work_list(pattern_: Any, per_row: int, per_group: int, order: Any) -> Any:
    """That of work_list.cu, beside the one made of CuPy's functions."""
    from bsrgemm._products import work_list, work_list_launch

    got = work_list_launch.merged(pattern_, per_row, per_group, order)
    want = work_list.merged(registry.cuda(), pattern_, per_row, per_group, order)
    items, wanted = work_list_launch.whole(got), work_list.whole(registry.cuda(), want)
    assert got.per_group == want.per_group and items.pieces == wanted.pieces
    for name in ("first", "last", "columns", "blocks", "row_tiles"):
        np.testing.assert_array_equal(getattr(got, name).get(), getattr(want, name).get(), err_msg=name)
    for name in ("items", "count", "splits"):
        np.testing.assert_array_equal(getattr(items, name).get(), getattr(wanted, name).get(), err_msg=name)
    return got, items


@kernel("work_list")
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(("per_row", "per_group"), [(1, 2), (1, 8), (2, 4), (3, 8)])
@pytest.mark.parametrize(
    ("rows", "cols", "density"),
    [pytest.param(13, 7, 0.4, marks=pytest.mark.sanitizer), (300, 500, 0.3), (1, 3000, 0.9), (5000, 3, 0.001)],
)
def test_work_lists_are_those_of_the_reference(rows, cols, density, per_row, per_group, index, rng, checksum) -> None:
    """Empty rows, duplicates, columns in any order."""
    import cupy

    from bsrgemm._products import row_matching, work_list

    stored = rng.random((rows, cols)) < density
    stored[rows // 2 : rows // 2 + 1000 : 2, : cols // 2] = False
    i, j = np.nonzero(stored)
    twice = rng.random(len(i)) < 0.1
    i, j = np.concatenate([i, i[twice]]), np.concatenate([j, j[twice]])
    by = np.lexsort((rng.random(len(i)), i))
    indices, indptr = j[by].astype(index), np.searchsorted(i[by], np.arange(rows + 1)).astype(index)
    for transposed in (False, True):
        pattern_ = work_list.Pattern(cupy.asarray(indices), cupy.asarray(indptr), rows, cols, transposed)
        padded = -(-pattern_.shape[0] * per_row // per_group) * per_group
        orders = [None, cupy.asarray(rng.permutation(padded).astype(np.int32))]
        orders.append(row_matching.matched(pattern_, per_row, per_group))
        for order in orders:
            groups, items = assert_same_work_list(pattern_, per_row, per_group, order)
            checksum(groups.blocks)
            checksum(items.items)


@kernel("work_list", "row_matching")
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("damage", [-1, 7, 2**31 - 1, pytest.param(-(2**31), marks=pytest.mark.sanitizer)])
def test_work_lists_of_spoiled_index_arrays_name_nothing_outside(damage, index, rng) -> None:
    import cupy

    from bsrgemm._products import row_matching, work_list

    row = np.sort(rng.integers(0, 60, 2000))
    good = rng.integers(0, 70, 2000).astype(index), np.searchsorted(row, np.arange(61)).astype(index)
    for spoiled, at in ((0, [2, 900, 1999]), (1, [2, 30]), (1, [0]), (1, [60])):
        arrays = [x.copy() for x in good]
        arrays[spoiled][at] = damage
        for transposed in (False, True):
            pattern_ = work_list.Pattern(*map(cupy.asarray, arrays), 60, 70, transposed)
            order = row_matching.matched(pattern_, 2, 4)
            np.testing.assert_array_equal(np.sort(order.get()), np.arange(order.size))
            groups, _ = assert_same_work_list(pattern_, 2, 4, order)
            assert int(groups.columns.min()) >= 0 and int(groups.columns.max()) <= pattern_.shape[1]
            assert int(groups.blocks.min()) >= -1 and int(groups.blocks.max()) < 2000


@kernel("work_list")
def test_a_million_blocks_are_listed_as_by_the_reference(rng) -> None:
    """Many tiles, each of several rounds, and sums over all of them."""
    import cupy

    from bsrgemm._products import row_matching, work_list

    side, per_row = 4096, 244
    indices = cupy.asarray(rng.integers(0, side, side * per_row).astype(np.int32))
    indptr = cupy.arange(0, side * per_row + 1, per_row, dtype=np.int32)
    for slots, per_group in ((1, 2), (2, 4), (1, 8)):
        pattern_ = work_list.Pattern(indices, indptr, side, side, False)
        assert_same_work_list(pattern_, slots, per_group, row_matching.matched(pattern_, slots, per_group))
