"""Writes into `indices` and `indptr` in place are seen by every product on the GPU, as scipy sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm._backend.index_arrays import Unwritten

pytestmark = pytest.mark.gpu
F16, F32, F64 = (np.dtype(x) for x in "efd")
#: Blocks of kernels without a work list, of mma.sync, and of the tensor cores with groups of block rows.
BLOCKS = [(3, F64), (16, F16), (64, F16), (128, F16)]
ROWS, COLS, COLUMNS = 6, 8, 40


def matrices(block: int, dtype: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """A matrix on the GPU of small integers, so that every sum is exact, and its twin of scipy in float64."""
    import cupy

    lengths = np.array([3, 2, 0, 4, 1, 2])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    indices = np.concatenate([np.sort(rng.permutation(COLS)[:n]) for n in lengths]).astype(np.int32)
    data = rng.integers(-2, 3, (len(indices), block, block)).astype(dtype)
    shape = (ROWS * block, COLS * block)
    A = bg.bsr_array(tuple(map(cupy.asarray, (data, indices, indptr))), shape=shape)
    twin = sp.bsr_array((data.astype(F64), indices.copy(), indptr.copy()), shape=shape)
    return A, twin


def put(x: Any, values: Any) -> Any:
    """Values for an assignment, on the device of the array."""
    import cupy

    values = np.array(values, x.dtype)
    return values if isinstance(x, np.ndarray) else cupy.asarray(values)


def permuted(A: Any) -> None:
    """The blocks of the first block row change places."""
    A.indices[:3] = A.indices[:3][::-1].copy()


def through_a_view(A: Any) -> None:
    row = A.indices[5:9]
    row[::2] = put(row, [7, 0])


def filled(A: Any) -> None:
    A.indices[9:10].fill(5)


def shifted(A: Any) -> None:
    A.indices[3:5] += put(A.indices, [1, 1])
    A.indices[3:5] %= COLS


def another_row(A: Any) -> None:
    """The last block of the first block row becomes the first of the second."""
    A.indptr[1] = 2


def other_rows(A: Any) -> None:
    """The empty block row takes the first blocks of the next."""
    bounds = A.indptr[2:5]
    bounds[...] = put(bounds, [4, 7, 9])


WRITES: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (permuted, through_a_view, filled, shifted, another_row, other_rows)
}


def dense(x: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (x.toarray() if hasattr(x, "toarray") else x).get()
    return found.astype(F64)


@pytest.fixture
def operations(rng: np.random.Generator) -> Callable[..., dict[str, tuple[Any, Any]]]:
    """Every product of a matrix with what scipy says, by name."""

    def make(A: Any, twin: Any, again: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        import cupy

        block, dtype = A.blocksize[0], A.dtype
        wide = F64 if dtype == F64 else F32
        if not again:
            for name, shape in (("X", (COLS * block, COLUMNS)), ("Y", (ROWS * block, COLUMNS))):
                again[name] = rng.integers(-1, 2, shape).astype(dtype)
                again["d" + name] = cupy.asarray(again[name])
            again["out"] = cupy.empty((ROWS * block, COLUMNS), wide)
            again["T"] = A.T
            again["columns"] = bg.bsr_array(
                (cupy.ones((COLS, block, block), dtype), cupy.arange(COLS) % 2, cupy.arange(COLS + 1)),
                shape=(COLS * block, 2 * block),
            )
        X, Y, dX, dY = (again[name] for name in ("X", "Y", "dX", "dY"))
        S, B = twin.toarray(), again["columns"]
        stored = sp.bsr_array((np.ones(twin.data.shape), twin.indices, twin.indptr), shape=twin.shape).toarray()
        XX, YY = X.astype(F64), Y.astype(F64)
        return {
            "A @ X": (bg.matmul(A, dX, out_dtype=wide), S @ XX),
            "A @ X into out": (bg.matmul(A, dX, out=again["out"]), S @ XX),
            "A.T @ X": (bg.matmul(A.T, dY, out_dtype=wide), S.T @ YY),
            "a transpose made before": (bg.matmul(again["T"], dY, out_dtype=wide), S.T @ YY),
            "X @ A": (bg.matmul(dY.T, A, out_dtype=wide), YY.T @ S),
            "A @ x": (bg.matmul(A, dX[:, 0], out_dtype=wide), S @ XX[:, 0]),
            "A @ B": (A.astype(wide) @ B, S @ dense(B)),
            "sddmm": (bg.sddmm(dY, dX.T, A, out_dtype=wide), (stored > 0) * (YY @ XX.T)),
        }

    return make


def same(results: dict[str, tuple[Any, Any]], when: str) -> None:
    for name, (found, want) in results.items():
        np.testing.assert_array_equal(dense(found), want, f"{name} {when}")


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_product_sees_what_was_written(write, block, dtype, rng, operations) -> None:
    A, twin = matrices(block, dtype, rng)
    again: dict[str, Any] = {}
    for _ in range(2):  # the second time everything is prepared
        same(operations(A, twin, again), "before the write")
    write(A)
    write(twin)
    for _ in range(2):
        results = operations(A, twin, again)
        same(results, "after the write")
    np.testing.assert_array_equal(A.toarray().get().astype(F64), twin.toarray())


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
def test_one_write_after_the_other_is_seen(block, dtype, rng) -> None:
    import cupy

    A, twin = matrices(block, dtype, rng)
    x = rng.integers(-1, 2, (COLS * block, COLUMNS)).astype(dtype)
    X, out = cupy.asarray(x), cupy.empty((ROWS * block, COLUMNS), F64 if dtype == F64 else F32)
    for write in (*WRITES.values(), *WRITES.values()):
        bg.matmul(A, X, out=out)
        write(A)
        write(twin)
        np.testing.assert_array_equal(dense(bg.matmul(A, X, out=out)), twin.toarray() @ x.astype(F64))


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
def test_matrices_that_share_index_arrays_see_a_write_into_one(block, dtype, rng) -> None:
    import cupy

    A, twin = matrices(block, dtype, rng)
    B = bg.bsr_array(A)
    X = cupy.asarray(rng.integers(-1, 2, (COLS * block, COLUMNS)).astype(dtype))
    for M in (A, B):
        M @ X
    permuted(B)
    permuted(twin)
    for M in (A, B):
        found = dense(bg.matmul(M, X, out_dtype=F64 if dtype == F64 else F32))
        np.testing.assert_array_equal(found, twin.toarray() @ X.get().astype(F64))


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
def test_a_product_of_a_matrix_with_itself_and_its_plan(block, dtype, rng) -> None:
    A, twin = matrices(block, dtype, rng)
    for M in (A, twin):  # square: two empty block rows more
        M.resize(COLS * block, COLS * block)
    wide = A.astype(F64 if dtype == F64 else F32)
    square = bg.plan(wide, wide)
    square(wide, wide)
    wide.indptr[1] = twin.indptr[1] = 1
    np.testing.assert_array_equal(dense(wide @ wide), twin.toarray() @ twin.toarray())
    with pytest.raises(ValueError, match="got other indptr"):
        square(wide, wide)


def test_what_is_known_of_duplicates_is_not_trusted_after_a_write(rng) -> None:
    """Integers of which two are added up before a product in a wider dtype."""
    import cupy

    A = bg.bsr_array(cupy.full((8, 8), 100, np.int8), blocksize=(4, 4))
    X = cupy.ones((8, 3), np.float32)
    assert A.has_canonical_format
    np.testing.assert_array_equal((A @ X).get(), np.full((8, 3), 800.0))
    A.indices[1] = 0
    want = np.full((8, 3), 800.0)
    want[:4] = 4.0 * float(np.array(200).astype(np.int8))
    np.testing.assert_array_equal((A @ X).get(), want)


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
def test_memory_that_was_handed_out_is_read_for_each_product(block, dtype, rng) -> None:
    """A view that others make of the memory, here by its address, is not seen, so nothing is kept."""
    import cupy

    A, twin = matrices(block, dtype, rng)
    X = cupy.asarray(rng.integers(-1, 2, (COLS * block, COLUMNS)).astype(dtype))
    A @ X
    theirs = A.indices.view(type=cupy.ndarray)
    for _ in range(2):
        theirs[:3] = theirs[:3][::-1].copy()
        permuted(twin)
        found = dense(bg.matmul(A, X, out_dtype=F64 if dtype == F64 else F32))
        np.testing.assert_array_equal(found, twin.toarray() @ X.get().astype(F64))


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
def test_products_alone_keep_what_they_prepared(block, dtype, rng, operations) -> None:
    A, twin = matrices(block, dtype, rng)
    again: dict[str, Any] = {}
    operations(A, twin, again)
    cache, state = A._memo, Unwritten(A.indices, A.indptr)
    operations(A, twin, again)
    for read in (A.indices.get, A.indptr.tolist, A.__repr__):
        read()
    if dtype == F64:
        A.tocsr()
    assert A._memo is cache and state.holds_for(A)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("name", "wrong"), [("indices", 1 << 30), ("indices", -7), ("indptr", 1 << 30), ("indptr", -7)]
)
def test_an_index_out_of_range_ends_in_no_fault(name, wrong, block, dtype, rng) -> None:
    """The values are wrong, but nothing outside of the arrays is read or written."""
    import cupy

    A, _ = matrices(block, dtype, rng)
    X, Y = (cupy.ones((n * block, COLUMNS), dtype) for n in (COLS, ROWS))
    A @ X, A.T @ Y
    getattr(A, name)[1] = wrong
    for product in (lambda: A @ X, lambda: A.T @ Y, lambda: A @ X[:, 0], lambda: bg.sddmm(Y, X.T, A)):
        with contextlib.suppress(ValueError):
            product()
    cupy.cuda.get_current_stream().synchronize()
    with pytest.raises(ValueError, match=name):
        A.check_format()
