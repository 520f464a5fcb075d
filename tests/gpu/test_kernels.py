"""Every kernel against float64 on the card: odd sizes, empty rows, every dtype, poisoned outputs, bad indices.

Seeds are fixed so that each test's outputs have a checksum in gpu_record.json; the property tests draw fresh inputs.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import homes
from bsrgemm.dtypes import BFLOAT16, BOOL, DEVICE_DTYPES, HALF_DTYPES, result_dtype

pytestmark = pytest.mark.gpu

Matrix = tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]


def kernel(*names: str) -> Any:
    return pytest.mark.kernel(*names)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def checksum(record_property: Callable[[str, object], None]) -> Callable[[Any], None]:
    """Add an output to the checksum of the test."""
    state = {"crc": 0}

    def add(x: Any) -> None:
        state["crc"] = zlib.crc32(np.ascontiguousarray(x.get()).view(np.uint8).tobytes(), state["crc"])
        record_property("checksum", f"{state['crc']:08x}")

    return add


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


@kernel("gemm_simt", "spmv")
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


@kernel("gemm_simt", "spmv")
@pytest.mark.sanitizer
@pytest.mark.parametrize("N", [1, 2, 5, 40])
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


@kernel("gemm_simt", "spmv")
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


@kernel("gemm_simt", "spmv")
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


@kernel("gemm_simt", "spmv")
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
    rows = homes.cuda().expand(A.indptr, len(A.indices))
    for i in rows[A.indices == 1].get():
        touched[i * 4 : i * 4 + 4] = True
    assert bool((cupy.isnan(A @ B).any(axis=1) == touched).all())


@kernel("pairs")
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
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DEVICE_DTYPES, ids=str)
@pytest.mark.parametrize("op", ["add", "maximum", "minimum", "fmax", "fmin"])
def test_segments_reduce_like_numpy(dtype, op, rng, checksum) -> None:
    import cupy

    for width, lengths in [(1, [1, 2, 1]), (5, [3, 1, 4]), (40, [1, 1]), (3, [100, 33, 1]), (1, [5000])]:
        x = values(rng, (sum(lengths), width), dtype)
        if np.dtype(dtype).kind in "fc":
            x[rng.random(x.shape) < 0.05] = np.nan if op != "add" else 1
        order = rng.permutation(len(x))
        starts = np.cumsum([0, *lengths[:-1]])
        host, cuda = homes.host(), homes.cuda()
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
        got = homes.cuda().expand(cupy.asarray(indptr), int(indptr[-1]))
        checksum(got)
        np.testing.assert_array_equal(got.get(), np.repeat(np.arange(len(counts)), counts))


@kernel("gemm_simt", "spmv")
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


# ------------------------------------------------------------------------------------ gemm_sm90
def served_by_sm90(A: Any) -> bool:
    """Did the last product of this matrix run on gemm_sm90 (or could it not, on another card)?"""
    import cupy

    plans = A._prepared._plans.values()
    return all(p.sm90 is not None for p in plans) or cupy.cuda.Device().compute_capability != "90"


SM90_BLOCKS = [(64, 64), (128, 128), (128, 64), (64, 16), (192, 48), (256, 80), (64, 112), (128, 256)]


@kernel("gemm_sm90")
@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
@pytest.mark.parametrize("block", SM90_BLOCKS, ids=str)
def test_tensor_core_product_is_right_for_blocks_widths_and_layouts(dtype, block, rng, checksum) -> None:
    import cupy

    dtype = np.dtype(dtype)
    for N, index, layout in [(16, np.int32, "C"), (72, np.int64, "F"), (256, np.int32, "F"), (520, np.int32, "C")]:
        A = pattern(rng, 5, 4, *block, dtype, index)
        B = values(rng, (A[3][1], N), dtype)
        want = dense(A, np.dtype(np.float64)) @ B.astype(np.float64)
        size = np.abs(dense(A, np.dtype(np.float64))) @ np.abs(B.astype(np.float64))
        for out_dtype, order in [(dtype, "C"), (np.dtype(np.float32), "C"), (dtype, "F")]:
            out = cupy.full(want.shape, np.nan, np.float32, order=order).astype(out_dtype, order=order)
            dA = device(A)
            bg.matmul(dA, strided(B, layout), out=out)
            assert served_by_sm90(dA)
            checksum(cupy.ascontiguousarray(out))
            assert_close(out.get(), want, size, 2 * A[3][1], np.float32)


@kernel("gemm_sm90")
@pytest.mark.sanitizer
def test_tensor_core_product_scales_and_adds(rng, checksum) -> None:
    import cupy

    for dtype, out_dtype in itertools.product(["float16", BFLOAT16], ["own", "float32"]):
        dtype = np.dtype(dtype)
        out_dtype = dtype if out_dtype == "own" else np.dtype(out_dtype)
        A = pattern(rng, 4, 3, 128, 32, dtype)
        B, old = values(rng, (A[3][1], 100), dtype), values(rng, (A[3][0], 100), out_dtype)
        exact = dense(A, np.dtype(np.float64)) @ B.astype(np.float64)
        size = np.abs(dense(A, np.dtype(np.float64))) @ np.abs(B.astype(np.float64))
        for alpha, beta in [(0.5, 0), (1, 1), (-2, 0.25)]:
            out = cupy.asarray(old)
            dA = device(A)
            bg.matmul(dA, cupy.asarray(B[:, :96].copy()), out=out[:, :96], alpha=alpha, beta=beta)
            checksum(out)
            want = alpha * exact + beta * old.astype(np.float64)
            weight = abs(alpha) * size + abs(beta) * np.abs(old.astype(np.float64))
            assert_close(out.get()[:, :96], want[:, :96], weight[:, :96], 2 * A[3][1], np.float32)
            np.testing.assert_array_equal(out.get()[:, 96:], old[:, 96:])  # nothing beyond the view is written


@kernel("gemm_sm90")
@pytest.mark.sanitizer
def test_tensor_core_product_reads_nothing_outside_with_spoiled_indices(rng) -> None:
    import cupy

    A = device(pattern(rng, 6, 5, 64, 64, "float16"))
    B = cupy.asarray(values(rng, (A.shape[1], 64), np.dtype("float16")))
    for damage in (-1, 5, 2**31 - 1, -(2**31)):
        A.indices[:3] = damage
        assert bool(cupy.isfinite(A @ B).all())
        A.indptr[2] = damage
        assert bool(cupy.isfinite(A @ B).all())


@kernel("gemm_sm90")
def test_tensor_core_product_spreads_nan_only_through_stored_blocks(rng) -> None:
    import cupy

    for block in [(64, 48), (128, 128)]:
        A = device(pattern(rng, 5, 6, *block, "float16"))
        B = cupy.asarray(values(rng, (A.shape[1], 64), np.dtype("float16")))
        B[block[1] + 3] = np.inf  # in block column 1; a tile of K reaches into it from block column 0
        touched = cupy.zeros(5, bool)
        rows = homes.cuda().expand(A.indptr, len(A.indices))
        touched[rows[A.indices == 1]] = True
        spoiled = ~cupy.isfinite(A @ B).reshape(5, -1).all(axis=1)
        assert bool((spoiled == touched).all())


@kernel("gemm_sm90")
@pytest.mark.parametrize("block", [(64, 64), (128, 128)], ids=str)
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
@pytest.mark.parametrize("block", [(64, 64), (128, 80), (256, 128)], ids=str)
def test_tensor_core_pipeline_survives_delays_and_poisoned_slots(block, rng, monkeypatch) -> None:
    import cupy

    from bsrgemm import jit, tuning

    A = pattern(rng, 30, 20, *block, "float16")
    B = cupy.asarray(values(rng, (A[3][1], 1000), np.dtype("float16")))
    calm = device(A) @ B
    plain = tuning.GemmSm90.spec

    def stressed(config: Any) -> Any:
        spec = plain(config)
        return jit.KernelSpec(spec.source, spec.entry, (*spec.defines, ("STRESS", 1)))

    monkeypatch.setattr(tuning.GemmSm90, "spec", stressed)
    dA = device(A)
    for _ in range(20):
        assert bool((dA @ B == calm).all())


@kernel("gemm_sm90")
def test_operands_that_lie_badly_are_multiplied_all_the_same(rng) -> None:
    import cupy

    A = pattern(rng, 3, 3, 64, 64, "float16")
    B = values(rng, (A[3][1], 45), np.dtype("float16"))  # rows of 90 bytes
    want = dense(A, np.dtype(np.float64)) @ B.astype(np.float64)
    size = np.abs(dense(A, np.dtype(np.float64))) @ np.abs(B.astype(np.float64))
    room = cupy.zeros(B.size + 8, np.float16)
    for shift in (0, 1, 3):
        moved = room[shift : shift + B.size].reshape(B.shape)
        moved[...] = cupy.asarray(B)
        assert_close((device(A) @ moved).get(), want, size, 2 * A[3][1], np.float32)
