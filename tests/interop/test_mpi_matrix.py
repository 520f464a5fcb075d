"""Matrices in panels, on ranks that are threads: products, vectors, files and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg
from bsrgemm.interop import mpi
from bsrgemm.interop.mpi.sparse import Gathering, Product, TransposedProduct

from .. import fake_cupy
from .ranks import outcomes_of, run

pytestmark = pytest.mark.fake

SIZES = (1, 2, 3, 4)


def matrix(shape: tuple[int, int], blocksize: tuple[int, int], dtype: Any = np.float64, seed: int = 0) -> Any:
    """Blocks at random places, also far from the diagonal, of small integers: sums are exact in any order."""
    rng = np.random.default_rng([seed, *shape])
    R, C = blocksize
    S = scipy.sparse.random_array((shape[0] // R, shape[1] // C), density=0.3, rng=rng).tocoo()
    data = rng.integers(-4, 5, (S.nnz, R, C)).astype(dtype)
    if data.dtype.kind == "c":
        data = data + 1j * rng.integers(-4, 5, data.shape)
    return bg.bsr_array((data.astype(dtype), (S.row, S.col)), shape=shape)


def vector(shape: Any, dtype: Any = np.float64, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    found = rng.integers(-4, 5, shape)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * rng.integers(-4, 5, shape)
    return found.astype(dtype)


CASES = [((12, 12), (3, 3)), ((60, 60), (2, 2)), ((12, 40), (3, 2)), ((40, 12), (4, 1)), ((2, 2), (2, 2))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("shape", "blocksize"), CASES)
def test_products_are_those_of_one_rank(shape: Any, blocksize: Any, size: int) -> None:
    """Integers are exact, so that results are equal; more ranks than block rows leave some without rows."""
    A = matrix(shape, blocksize)
    x, X, z, Z = vector(shape[1]), vector((shape[1], 3)), vector(shape[0]), vector((shape[0], 3))

    def program(comm: Any) -> Any:
        D = mpi.partition(A if comm.rank == 0 else None, comm)
        assert D.shape == A.shape and D.blocksize == A.blocksize and D.dtype == A.dtype and D.nnz == A.nnz
        assert D.local_shape == (len(D.rows), len(D.columns)) == D.T.local_shape[::-1]
        out = [D.gather(D @ D.scatter(v if comm.rank == 0 else None, 1)) for v in (x, X)]
        back = [D.gather(D.T @ D.scatter(v if comm.rank == 0 else None), 1) for v in (z, Z)]
        return [*out, *back]

    results = run(size, program)
    for found, want in zip(results[0], (A @ x, A @ X, A.T @ z, A.T @ Z), strict=True):
        np.testing.assert_array_equal(found, want)
    assert all(part is None for other in results[1:] for part in other)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "float16", "int32", ml_dtypes.bfloat16])
def test_dtypes_are_kept(dtype: Any) -> None:
    A, x = matrix((24, 24), (2, 2), dtype), vector(24, dtype)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        y = D.scatter(x)
        return D.gather(D @ y), D.gather(D.T @ y), D.gather(D.H @ y)

    for found, want in zip(run(3, program)[0], (A @ x, A.T @ x, A.conj().T @ x), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)


def test_factors_and_out_are_those_of_matmul() -> None:
    A, x, y = matrix((40, 40), (2, 2)), vector((40, 2)), vector((40, 2), seed=3)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        out = np.asfortranarray(D.scatter(y))  # rows of ghosts are added to whatever layout the result has
        assert D.multiply(D.scatter(x), out, alpha=2, beta=-3) is out
        return D.gather(out), D.gather(D.astype(np.float32) @ D.scatter(x).astype(np.float32))

    found, narrow = run(3, program)[0]
    np.testing.assert_array_equal(found, 2 * (A @ x) - 3 * y)
    assert narrow.dtype == np.float32
    np.testing.assert_array_equal(narrow, A @ x)


@pytest.mark.parametrize("size", [1, 3])
def test_inner_products_and_norms_are_over_all_ranks_with_the_same_bits(size: int) -> None:
    A, u, v = matrix((30, 30), (3, 3)), vector((30, 2), complex), vector((30, 2), complex, seed=5)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        a, b = D.scatter(u), D.scatter(v)
        return D.vdot(a, b), D.norm(a)

    results = run(size, program)
    for dots, norms in results:
        np.testing.assert_array_equal(dots, (u.conj() * v).sum(axis=0))
        np.testing.assert_allclose(norms, np.linalg.norm(u, axis=0), rtol=1e-15)
        assert norms.tobytes() == results[0][1].tobytes()


def test_each_ghost_column_travels_once() -> None:
    """The bytes of a product are those of the distinct block columns that a rank needs and does not have."""
    A = matrix((60, 60), (2, 2))
    pattern = np.zeros((30, 30), bool)
    pattern[np.repeat(np.arange(30), np.diff(A.indptr)), A.indices] = True

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        x = D.scatter(vector((60, 3)))
        before = comm.sent
        D @ x
        first, last = D.rows.start // 2, D.rows.stop // 2
        needed = pattern[first:last].any(axis=0)
        needed[first:last] = False
        return comm.sent - before, D.halo_bytes(3), int(needed.sum()) * 2 * 3 * 8

    results = run(3, program)
    assert all(bytes_ == least for _, bytes_, least in results)
    assert sum(sent for sent, _, _ in results) == sum(least for _, _, least in results) > 0


@pytest.mark.parametrize("rows", [[30, 0, 0], [0, 0, 30], [1, 28, 1]])
def test_rows_are_spread_as_asked_also_to_ranks_without_any(rows: list[int]) -> None:
    A, x = matrix((60, 60), (2, 2)), vector(60)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, rows=rows)
        assert len(D.rows) == 2 * rows[comm.rank]
        assert ("no rows" in repr(D)) == (not rows[comm.rank])
        y = D.scatter(x)
        return D.gather(D @ y), D.gather(D.T @ y), float(D.norm(y))

    for found, want in zip(run(3, program)[0], (A @ x, A.T @ x, np.linalg.norm(x)), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-15)


def test_ranks_get_about_as_many_blocks_by_default() -> None:
    """The first quarter of the rows has most of the blocks."""
    dense = np.eye(80)
    dense[:20] = 1
    A = bg.bsr_array(dense, blocksize=(1, 1))
    counts = run(4, lambda comm: len(mpi.partition(A, comm).rows))
    assert sum(counts) == 80 and counts[0] < 10 and counts[3] > 50


@pytest.mark.parametrize("size", [1, 3])
def test_panels_that_ranks_have_make_the_same_matrix(size: int) -> None:
    A, x = matrix((40, 24), (2, 3)), vector(24)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        panel = D.panel()
        np.testing.assert_array_equal(panel.toarray(), A.toarray()[D.rows.start : D.rows.stop])
        columns = [8, *[0] * (size - 1)]
        E = mpi.from_local(panel, comm, columns=columns)
        assert len(E.columns) == (0 if comm.rank else 24)
        return E.gather(E @ E.scatter(x, 1))

    np.testing.assert_array_equal(run(size, program)[0], A @ x)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["float64", ml_dtypes.bfloat16])
def test_a_file_is_read_by_panels(tmp_path: Path, compressed: bool, dtype: Any) -> None:
    A, x = matrix((60, 60), (3, 3), dtype), vector(60, dtype)
    bg.save_npz(tmp_path / "A.npz", A, compressed=compressed)

    def program(comm: Any) -> Any:
        D = mpi.from_file(tmp_path / "A.npz", comm)
        return D.gather(D @ D.scatter(x)), D.dtype

    for size in (1, 3):
        found, kept = run(size, program)[0]
        assert kept == A.dtype
        np.testing.assert_array_equal(found, A @ x)


def test_the_array_code_runs_on_a_device() -> None:
    """The model of CuPy's arrays refuses what CuPy refuses."""
    device = fake_cupy.backend()
    A, x, X = matrix((40, 40), (2, 2)), vector(40), vector((40, 3))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, device=device.name)
        y, Y = D.scatter(device.from_host(x)), D.scatter(device.from_host(X))
        found = [D.gather(v) for v in (D @ y, D @ Y, D.T @ y)]
        assert device.is_dense(D.vdot(Y, Y)) and device.is_dense(D.norm(y))
        found += [D.vdot(Y, Y), D.norm(y)]
        panel = D.panel()
        both = [Gathering()(multiply()(D, panel), comm) for multiply in (Product, TransposedProduct)]
        return [device.to_host(v) for v in (*found, *(B.toarray() for B in both))] if comm.rank == 0 else None

    S = A.toarray()
    dots = (X * X).sum(axis=0), (x @ x) ** 0.5
    for found, want in zip(run(3, program)[0], (A @ x, A @ X, A.T @ x, *dots, S @ S, S.T @ S), strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_products_of_panels_are_those_of_one_rank(size: int, dtype: str) -> None:
    A, B = matrix((40, 40), (2, 2), dtype), matrix((40, 60), (2, 3), dtype, seed=7)

    def program(comm: Any) -> Any:
        D, E = mpi.partition(A, comm), mpi.partition(B, comm)
        E = mpi.from_local(B[D.rows.start : D.rows.stop], comm)
        first, second, whole = Product(), TransposedProduct(), (Gathering(), Gathering())
        found, sent = [], [comm.sent]
        for factor in (1, -3):  # the second time with other numbers
            F = E.with_numbers(E.panel() * factor)
            found.append((whole[0](first(D, F.panel()), comm), whole[1](second(F, D.panel()), comm)))
            sent.append(comm.sent)
        assert sent[2] - sent[1] < sent[1] - sent[0] or comm.size == 1, "patterns travel once"
        return found

    a, b = A.toarray(), B.toarray()
    for results in run(size, program):
        for factor, (AB, BA) in zip((1, -3), results, strict=True):
            np.testing.assert_array_equal(AB.toarray(), factor * (a @ b))
            np.testing.assert_array_equal(BA.toarray(), factor * (b.conj().T @ a))


def test_results_repeat_bit_by_bit() -> None:
    rng = np.random.default_rng(0)
    A = bg.bsr_array(rng.standard_normal((60, 60)), blocksize=(3, 3))
    x = rng.standard_normal((60, 2))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        y = D.scatter(x)
        return [v.tobytes() for v in (D @ y, D.T @ y, D.vdot(y, D @ y))]

    first = run(3, program)
    assert all(run(3, program) == first for _ in range(3))


# ---------------------------------------------------------------------------------------- bad input
def refused(size: int, program: Any, kind: type[Exception], *words: str) -> None:
    """All ranks raise an error of this kind with these words."""
    for error in outcomes_of(size, program):
        assert isinstance(error, kind), error
        assert all(word in str(error) for word in words), error


def test_ranks_with_different_panels_are_refused_by_all() -> None:
    other = [
        ("float32", matrix((12, 12), (3, 3), np.float32)),
        ("(2, 2)", matrix((12, 12), (2, 2))),
        ("15 columns", matrix((12, 15), (3, 3))),
    ]
    good = matrix((12, 12), (3, 3))
    for word, panel in other:
        refused(
            3,
            lambda comm, panel=panel: mpi.from_local(panel if comm.rank == 1 else good, comm),
            ValueError,
            "panel: wanted the same on all ranks",
            word,
            "rank 1",
        )


def test_panels_that_are_not_whole_blocks_are_refused_by_all() -> None:
    A = matrix((12, 12), (3, 3))
    refused(2, lambda comm: mpi.partition(A, comm, rows=[1, 2]), ValueError, "rows: wanted block rows that add up to 4")
    refused(2, lambda comm: mpi.partition(A, comm, rows=[5, -1]), ValueError, "rows: wanted block rows")
    refused(2, lambda comm: mpi.partition(A, comm, rows=[1.5, 2.5]), TypeError, "rows: wanted a sequence of integers")
    sliced = scipy.sparse.csr_array(np.eye(7, 12))
    refused(
        2,
        lambda comm: mpi.from_local(sliced if comm.rank else A, comm),
        TypeError,
        "panel: wanted a bsr_array",
        "whole blocks",
    )
    refused(
        2, lambda comm: mpi.from_local(A, comm, columns=[1, 2]), ValueError, "columns: wanted block columns", "up to 4"
    )


def test_a_communicator_of_another_size_is_refused_by_all() -> None:
    A = matrix((12, 12), (3, 3))
    refused(2, lambda comm: mpi.partition(A, comm, rows=[1, 1, 2]), ValueError, "wanted 2 numbers, one for each rank")
    refused(2, lambda comm: mpi.partition(A, "world"), TypeError, "comm: wanted None, a communicator of mpi4py")


def test_rank_0_without_a_matrix_is_refused_by_all() -> None:
    words = "A: wanted a bsr_array or bsr_matrix on rank 0, got NoneType; rank 0 of comm passes the matrix"
    refused(2, lambda comm: mpi.partition(matrix((6, 6), (3, 3)) if comm.rank else None, comm), TypeError, words)


def test_vectors_that_do_not_fit_are_refused_by_all() -> None:
    A = matrix((12, 12), (3, 3))

    def scatter(comm: Any, b: Any) -> Any:
        return mpi.partition(A, comm).scatter(b if comm.rank == 0 else None)

    refused(2, lambda comm: scatter(comm, None), TypeError, "b: wanted a dense array on 'cpu', got NoneType")
    refused(2, lambda comm: scatter(comm, np.ones(13)), ValueError, "b: wanted shape (12,) or (12, k), got (13,)")

    def gather(comm: Any, *shapes: Any) -> Any:
        return mpi.partition(A, comm).gather(np.ones(shapes[comm.rank]))

    refused(2, lambda comm: gather(comm, 6, 7), ValueError, "y: wanted shape (6,) or (6, k), got (7,)", "[on rank 1]")
    refused(2, lambda comm: gather(comm, (6, 2), (6, 3)), ValueError, "y: wanted the same on all ranks")
    refused(2, lambda comm: mpi.partition(A, comm).gather(np.ones(6), 2), ValueError, "axis: wanted 0 or 1, got 2")


def test_a_product_that_one_rank_refuses_leaves_no_rank_waiting() -> None:
    """The rank tells what is wrong; the ranks that wait for its numbers raise too, and the next product is right."""
    A = bg.bsr_array(np.ones((12, 12)), blocksize=(3, 3))
    wrong = [np.ones(5), np.ones((2, 2, 2)), [1.0] * 6, np.array(["a"] * 6)]

    def program(comm: Any, x: Any) -> Any:
        D = mpi.partition(A, comm)
        good = np.ones(6)
        kinds = []
        for multiply in (lambda v: D @ v, lambda v: D.T @ v):
            try:
                multiply(x if comm.rank == 1 else good)
            except (TypeError, ValueError, RuntimeError) as error:
                kinds.append(type(error))
            np.testing.assert_array_equal(multiply(good), np.full(6, 12.0))
        return kinds

    for x in wrong:
        zero, one = run(2, lambda comm, x=x: program(comm, x))
        assert zero == [RuntimeError, RuntimeError]
        assert len(one) == 2 and set(one) <= {TypeError, ValueError}


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_refuses_tells_those_that_wait_for_it_and_nobody_else(refusing: int) -> None:
    """Rank 0 needs numbers of rank 1 and not the other way round; in a product with the transpose it is reversed."""
    A = bg.bsr_array(np.triu(np.ones((12, 12))), blocksize=(3, 3))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, rows=[2, 2])
        good, found = np.ones(6), []
        for operator in (D, D.T, D.H):
            try:
                operator @ (np.ones(5) if comm.rank == refusing else good)
                found.append("right")
            except (ValueError, RuntimeError) as error:
                found.append(type(error).__name__)
            whole = np.ones(12)
            want = A @ whole if operator is D else A.T @ whole
            np.testing.assert_array_equal(operator @ good, want[D.rows.start : D.rows.stop])
        return found

    found = run(2, program)
    assert found[refusing] == ["ValueError"] * 3
    waits = [refusing == 1, refusing == 0, refusing == 0]
    assert found[1 - refusing] == ["RuntimeError" if wait else "right" for wait in waits]


def test_a_complex_adjoint_refuses_what_is_no_array_on_one_rank() -> None:
    A = bg.bsr_array(1j * np.ones((12, 12)), blocksize=(3, 3))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        with pytest.raises(TypeError if comm.rank else RuntimeError, match="wanted"):
            D.H @ ([1.0] * 6 if comm.rank else np.ones(6))
        return D.H @ np.ones(6)

    np.testing.assert_array_equal(np.concatenate(run(2, program)), np.full(12, -12j))


def test_a_product_that_fails_while_messages_travel_takes_them() -> None:
    A = matrix((12, 12), (3, 3))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        for k in range(3):
            x = D.scatter(vector((12,), seed=k))
            if comm.rank:
                with pytest.raises(ValueError, match="out: wanted float64 of shape"):
                    D.multiply(x, out=np.empty(1))
            else:
                D.multiply(x)
        return D @ D.scatter(vector((12,), seed=9))

    np.testing.assert_allclose(np.concatenate(run(2, program)), A @ vector((12,), seed=9), rtol=1e-13)


@pytest.mark.parametrize("order", ["F", "every second"])
def test_columns_may_lie_in_any_order_in_memory(order: str) -> None:
    A, X = matrix((30, 30), (3, 3)), vector((30, 4))

    def laid(x: Any) -> Any:
        if order == "F":
            return np.asfortranarray(x)
        wide = np.zeros((2 * len(x), 2 * x.shape[1]))
        wide[::2, ::2] = x
        return wide[::2, ::2]

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        x = D.scatter(laid(X))
        return D @ laid(x), D.T @ laid(x), D.gather(laid(x))

    ahead, back, whole = zip(*run(3, program), strict=True)
    np.testing.assert_allclose(np.concatenate(ahead), A @ X, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(np.concatenate(back), A.T @ X, rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(whole[0], X)


@pytest.mark.parametrize(
    ("dtype", "value", "sums"),
    [
        *((np.float16, 100, np.float32), (ml_dtypes.bfloat16, 1, np.float32), (np.float32, 1, np.float32)),
        *((np.int8, 100, np.int64), (np.uint8, 200, np.uint64), (bool, 1, np.int64)),
    ],
)
def test_inner_products_of_narrow_numbers_are_summed_in_wide_ones(dtype: Any, value: int, sums: Any) -> None:
    """1,000 products of 100 by 100 are more than float16 holds, and bfloat16 does not count beyond 256."""
    u = np.full((1000, 2), value, dtype)

    def program(comm: Any) -> Any:
        D = mpi.partition(bg.eye(1000, blocksize=(2, 2)), comm)
        mine = D.scatter(u)
        return D.vdot(mine, mine), D.norm(mine)

    for size in (1, 2):
        for dots, norms in run(size, program):
            assert dots.dtype == sums
            np.testing.assert_array_equal(dots, np.full(2, 1000 * value**2))
            np.testing.assert_allclose(norms, np.full(2, value * 1000**0.5), rtol=1e-6)


def test_inner_products_that_one_rank_refuses_leave_no_rank_waiting() -> None:
    A = matrix((12, 12), (3, 3))
    wrong = [np.ones(5), np.ones((2, 2, 2)), np.ones((6, 2)), [1.0] * 6, np.array(["a"] * 6), np.array([None] * 6)]

    def program(comm: Any, x: Any) -> Any:
        D, good, found = mpi.partition(A, comm), np.ones(6), []
        for call in (lambda v: D.vdot(good, v), lambda v: D.vdot(v, good), D.norm):
            try:
                call(x if comm.rank == 1 else good)
            except (TypeError, ValueError, RuntimeError) as error:
                found.append(type(error))
            assert D.vdot(good, 2 * good) == 24 and D.norm(good) == 12**0.5
        return found

    for x in wrong:
        zero, one = run(2, lambda comm, x=x: program(comm, x))
        if np.shape(x) == (6, 2):  # norms of two columns are no error by themselves, and those of one on rank 0 neither
            assert zero == [RuntimeError, RuntimeError, ValueError] and one == [ValueError] * 3
        else:
            assert zero == [RuntimeError] * 3 and len(one) == 3 and set(one) <= {TypeError, ValueError}


@pytest.mark.parametrize("other", [np.ones(6, np.float32), np.ones((6, 1))])
def test_inner_products_of_other_dtypes_or_columns_are_refused_by_all(other: Any) -> None:
    def program(comm: Any) -> Any:
        u = other if comm.rank else np.ones(6)
        return mpi.partition(matrix((12, 12), (3, 3)), comm).vdot(u, u)

    refused(2, program, ValueError, "u, v: wanted the same on all ranks, got float64 of shape () on rank 0 and")


def test_what_other_ranks_pass_to_scatter_is_not_looked_at() -> None:
    A, b = matrix((12, 12), (3, 3)), np.arange(12.0)
    for other in (None, [1.0], "text", np.ones((2, 2, 2))):
        parts = run(2, lambda comm, other=other: mpi.partition(A, comm).scatter(other if comm.rank else b))
        np.testing.assert_array_equal(np.concatenate(parts), b)


def test_objects_are_neither_scattered_nor_gathered() -> None:
    A, things = matrix((12, 12), (3, 3)), np.array([None] * 12)
    refused(2, lambda comm: mpi.partition(A, comm).scatter(things), TypeError, "b: wanted numbers, got object")
    refused(2, lambda comm: mpi.partition(A, comm).gather(things[:6]), TypeError, "y: wanted numbers, got object")


def test_the_transpose_of_the_transpose_is_the_matrix() -> None:
    D = mpi.partition(matrix((6, 12), (3, 3)))
    assert D.T.T is D and D.H.T is D and D.T.H is D
    Z = mpi.partition(bg.bsr_array(1j * np.eye(4), blocksize=(2, 2)))
    assert Z.T.T is Z and Z.H.H is Z
    with pytest.raises(TypeError, match=r"D\.H\.T: products with the conjugate of a complex matrix"):
        _ = Z.H.T


def test_files_that_hold_no_such_matrix_are_refused_by_all(tmp_path: Path) -> None:
    refused(2, lambda comm: mpi.from_file(tmp_path / "none.npz", comm), FileNotFoundError)
    (tmp_path / "text.npz").write_text("no archive")
    refused(2, lambda comm: mpi.from_file(tmp_path / "text.npz", comm), ValueError, "path:", "text.npz")
    scipy.sparse.save_npz(tmp_path / "csr.npz", scipy.sparse.csr_array(np.eye(4)))
    refused(2, lambda comm: mpi.from_file(tmp_path / "csr.npz", comm), ValueError, "wanted the format bsr", "csr")
    A = matrix((12, 12), (3, 3))
    arrays = {"format": b"bsr", "shape": (12, 12), "data": A.data, "indices": A.indices, "indptr": A.indptr}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("indptr", {"indptr": A.indptr[::-1]}),
        ("indptr", {"indptr": np.array([0.0, 1.0])}),
        ("block rows", {"shape": (16, 12)}),
        ("data", {"data": A.data[:, 0]}),
        ("data", {"data": A.data[:1]}),
        ("", {"indices": A.indices + 40}),
        ("data", {"data": np.asfortranarray(A.data)}),
    ]
    for k, (word, change) in enumerate(wrong):
        np.savez(tmp_path / f"{k}.npz", **(arrays | change))
        refused(2, lambda comm, k=k: mpi.from_file(tmp_path / f"{k}.npz", comm), ValueError, word)
    whole = (tmp_path / "0.npz").read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    refused(2, lambda comm: mpi.from_file(tmp_path / "short.npz", comm), ValueError, "short.npz")
