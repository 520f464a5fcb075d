"""Matrices in panels as Dask arrays: products, slices and sums are those of the whole matrix; the rest is refused."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from dask.sizeof import sizeof  # noqa: E402

from bsrgemm.interop import dask as panels  # noqa: E402

from .. import fake_cupy  # noqa: E402

pytestmark = pytest.mark.fake

# 60 x 48 in blocks of 4 x 3; panels of 16, 16, 16 and 12 rows
S = bg.random(60, 48, blocksize=(4, 3), density=0.4, seed=0)
B = bg.random(48, 40, blocksize=(3, 5), density=0.4, seed=1)
X = np.random.default_rng(2).standard_normal((48, 5))
Y = np.random.default_rng(3).standard_normal((60, 5))
A = panels.from_bsr(S, 16)
PB = panels.from_bsr(B, 9)
D, E = S.toarray(), B.toarray()


@pytest.fixture(autouse=True)
def _in_this_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


def computed(x: Any) -> Any:
    """The result as a NumPy array."""
    found = x.compute()
    return found.toarray() if isinstance(found, bg.bsr_array) else found


def chunked(x: Any, *chunks: Any) -> Any:
    return da.from_array(x, chunks=chunks)


# ----------------------------------------------------------------------------------------- products
DENSE: dict[str, tuple[Callable[[], Any], Any]] = {
    "matrix": (lambda: A @ X, D @ X),
    "vector": (lambda: A @ X[:, 0], D @ X[:, 0]),
    "list": (lambda: A @ X[:, 0].tolist(), D @ X[:, 0]),
    "chunks of columns": (lambda: A @ chunked(X, 48, 2), D @ X),
    "chunks of rows and columns": (lambda: A @ chunked(X, 12, 2), D @ X),
    "chunks of a vector": (lambda: A @ chunked(X[:, 0], 9), D @ X[:, 0]),
    "on the left": (lambda: Y.T @ A, Y.T @ D),
    "vector on the left": (lambda: Y[:, 0] @ A, Y[:, 0] @ D),
    "chunks on the left": (lambda: chunked(Y.T, 2, 16) @ A, Y.T @ D),
    "transpose": (lambda: A.T @ Y, D.T @ Y),
    "transpose of a vector": (lambda: A.T @ Y[:, 0], D.T @ Y[:, 0]),
    "transpose and chunks": (lambda: A.T @ chunked(Y, 16, 2), D.T @ Y),
    "transpose on the right": (lambda: X.T @ A.T, X.T @ D.T),
    "transpose on the right, chunks": (lambda: chunked(X.T, 2, 12) @ A.T, X.T @ D.T),
    "what a product gives": (lambda: A.T @ (A @ X), D.T @ (D @ X)),
    "matmul": (lambda: panels.matmul(A, X), D @ X),
    "method dot": (lambda: A.dot(X), D @ X),
    "numpy.dot": (lambda: np.dot(A, X), D @ X),
    "dask.array.dot": (lambda: da.dot(A, chunked(X, 48, 2)), D @ X),
    "dask.array.dot with NumPy": (lambda: da.dot(A, X), D @ X),
    "dask.array.dot with a vector": (lambda: da.dot(A, X[:, 0]), D @ X[:, 0]),
    "dask.array.dot of a vector": (lambda: da.dot(chunked(Y[:, 0], 16), A), Y[:, 0] @ D),
    "dask.array.tensordot": (lambda: da.tensordot(A, chunked(Y, 16, 2), axes=((0,), (0,))), D.T @ Y),
    "dask.array.tensordot on the left": (lambda: da.tensordot(X, A, axes=((0,), (1,))), X.T @ D.T),
    "dask.array.dot on the left": (lambda: da.dot(chunked(Y.T, 2, 16), A), Y.T @ D),
}


@pytest.mark.parametrize("name", DENSE)
def test_products_with_dense_operands(name: str) -> None:
    make, want = DENSE[name]
    made = make()
    assert type(made) is da.Array and made.shape == want.shape and made.dtype == want.dtype
    found = made.compute()
    np.testing.assert_allclose(found, want, atol=1e-12)
    for sides, axis in zip(made.chunks, range(made.ndim), strict=True):
        assert sum(sides) == found.shape[axis]


SPARSE: dict[str, tuple[Callable[[], Any], Any]] = {
    "in memory": (lambda: A @ B, D @ E),
    "bsr_matrix": (lambda: A @ bg.bsr_matrix(B), D @ E),
    "panels": (lambda: A @ PB, D @ E),
    "in memory on the left": (lambda: S @ PB, D @ E),
    "transposes": (lambda: PB.T @ A.T, E.T @ D.T),
    "summed over panels": (lambda: A.T @ A, D.T @ D),
    "three factors": (lambda: A.T @ A @ PB, D.T @ D @ E),
    "one panel of columns": (lambda: A @ A.T.rechunk({1: -1}), D @ D.T),
    "one panel of rows": (lambda: A.rechunk({0: -1}) @ A.T, D @ D.T),
}


@pytest.mark.parametrize("name", SPARSE)
def test_products_with_sparse_operands(name: str) -> None:
    make, want = SPARSE[name]
    made = make()
    assert isinstance(made, panels.PanelArray) and made.shape == want.shape
    found = made.compute()
    assert type(found) is type(S) and found.blocksize == made.blocksize and found.dtype == made.dtype
    np.testing.assert_allclose(found.toarray(), want, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, bool, np.int8, np.complex64, np.longdouble], ids=str)
def test_dtypes_are_those_of_the_matrix_in_memory(dtype: Any) -> None:
    s, x, y = (S.sign().astype(dtype), np.sign(X).astype(dtype), np.sign(Y).astype(dtype))
    P = panels.from_bsr(s, 16)
    for made, want in (
        (P @ x, s @ x),
        (P @ chunked(x, 12, 2), s @ x),
        (P.T @ y, s.T @ y),
        (P.sum(axis=0), s.sum(axis=0)),
        (P.sum(), s.sum()),
        (2 * P, 2 * s),
        (P / 2, s / 2),
        (P.astype("float32"), s.astype("float32")),
    ):
        found = made.compute()
        assert made.dtype == found.dtype == want.dtype
        found, want = (v.toarray() if isinstance(v, bg.bsr_array) else v for v in (found, want))
        np.testing.assert_array_equal(found, want)


def test_sums_of_16_bit_floats_over_chunks_are_rounded_once() -> None:
    s = bg.bsr_array(np.full((2, 8), 1.0, np.float16), blocksize=(2, 2))
    x = np.array([2048, 0, 1, 0, 1, 0, 1, 0], np.float16)  # 2048 + 1 is 2048 in float16, and 2051 rounds to 2052
    want = np.full(2, 2052, np.float16)
    assert (panels.from_bsr(s, 2) @ chunked(x, 2)).compute().tolist() == want.tolist()
    tall = panels.from_bsr(bg.bsr_array(s.T), 2)
    assert (tall.T @ x).compute().tolist() == want.tolist()
    many = bg.bsr_array(np.repeat(x, 2)[:, None] * np.ones(2, np.float16), blocksize=(2, 2))
    assert panels.from_bsr(many, 2).sum(axis=0).compute().tolist() == (2 * want).tolist() == many.sum(axis=0).tolist()
    large = bg.bsr_array(np.array([[4e4], [4e4], [-4e4]], np.float16), blocksize=(1, 1))
    total = panels.from_bsr(large, 1).sum()
    assert total.compute() == large.sum() == np.float16(4e4) and total.dtype == total.compute().dtype == np.float16


def test_a_sum_of_many_panels_is_a_tree_with_the_same_bits_under_every_scheduler() -> None:
    s = bg.random(160, 6, blocksize=(2, 2), density=0.9, seed=4)
    y = np.random.default_rng(5).standard_normal(160)
    made = panels.from_bsr(s, 2).T @ y
    found = made.compute()
    np.testing.assert_allclose(found, s.T @ y, atol=1e-12)
    for _ in range(2):
        assert np.array_equal(made.compute(scheduler="threads"), found)
    most = max(len(task.dependencies) for task in made.__dask_graph__().to_dict().values())
    assert most == 8


def test_a_product_loads_only_the_panels_it_needs() -> None:
    loaded = []

    def panel(i: int) -> Any:
        loaded.append(i)
        return S[16 * i : 16 * i + 16]

    made = [dask.delayed(panel)(i) for i in range(3)]
    P = panels.from_delayed(made, [16] * 3, 48, blocksize=(4, 3), dtype=float)
    np.testing.assert_allclose((P[16:24] @ X).compute(), D[16:24] @ X)
    assert loaded == [1]
    P.partitions[2].sum().compute()
    assert loaded == [1, 2]


# -------------------------------------------------------------------------- slices, sums, arithmetic
SAME: dict[str, tuple[Callable[[], Any], Any]] = {
    "whole": (lambda: A, D),
    "rows": (lambda: A[8:40], D[8:40]),
    "negative rows": (lambda: A[-20:], D[-20:]),
    "rows and columns": (lambda: A[8:40, 3:9], D[8:40, 3:9]),
    "rows and columns of the transpose": (lambda: A.T[3:9, 8:40], D.T[3:9, 8:40]),
    "no rows": (lambda: A[4:4], D[4:4]),
    "no columns": (lambda: A[:, 0:0], D[:, 0:0]),
    "one panel": (lambda: A.partitions[1], D[16:32]),
    "last panel": (lambda: A.blocks[-1], D[48:]),
    "some panels": (lambda: A.partitions[1:3], D[16:48]),
    "every other panel": (lambda: A.partitions[::2], np.concatenate([D[:16], D[32:48]])),
    "larger panels": (lambda: A.rechunk({0: 24}), D),
    "smaller panels": (lambda: A.rechunk(4), D),
    "uneven panels": (lambda: A.rechunk(((8, 40, 12), (48,))), D),
    "panels of columns": (lambda: A.T.rechunk({1: 24}), D.T),
    "transposed twice": (lambda: A.T.T, D),
    "transpose": (lambda: A.transpose(), D.T),
    "twice": (lambda: 2 * A, 2 * D),
    "by a scalar of NumPy": (lambda: np.float64(2) * A, 2 * D),
    "half": (lambda: A / 2, D / 2),
    "negative": (lambda: -A, -D),
    "sum": (lambda: A + 2 * A, 3 * D),
    "difference": (lambda: A - 3 * A, -2 * D),
    "mapped": (lambda: A.map_panels(lambda p: p.power(2)), D**2),
    "other blocks": (lambda: A.map_panels(lambda p: p.tobsr((2, 6)), blocksize=(2, 6)), D),
    "copied": (lambda: copy.deepcopy(A), D),
    "pickled": (lambda: pickle.loads(pickle.dumps(A)), D),
    "persisted": (lambda: A.persist(), D),
}


@pytest.mark.parametrize("name", SAME)
def test_matrices_made_from_panels(name: str) -> None:
    make, want = SAME[name]
    made = make()
    assert isinstance(made, panels.PanelArray) and made.shape == want.shape
    found = made.compute()
    assert found.blocksize == made.blocksize
    np.testing.assert_allclose(found.toarray(), want, rtol=1e-14)


@pytest.mark.parametrize("axis", [None, 0, 1, -1, -2])
def test_sums(axis: int | None) -> None:
    for P, dense in ((A, D), (A.T, D.T)):
        made = P.sum(axis=axis)
        assert type(made) is da.Array and made.shape == dense.sum(axis=axis).shape
        np.testing.assert_allclose(made.compute(), dense.sum(axis=axis), atol=1e-12)


def test_dense_chunks_and_chunks_of_dask_alone() -> None:
    np.testing.assert_array_equal(A.toarray().compute(), D)
    np.testing.assert_allclose(A.T.toarray().mean(axis=0).compute(), D.T.mean(axis=0))
    assert type(A.to_dask_array()) is da.Array
    assert isinstance(A.to_dask_array().compute(), bg.bsr_array)
    np.testing.assert_array_equal(A.map_blocks(lambda p: p.toarray(), dtype=float).compute(), D)
    assert [d.compute().shape[0] for d in A.to_delayed().ravel()] == [16, 16, 16, 12]


def test_persisted_panels_are_computed_once() -> None:
    counts = []

    def panel() -> Any:
        counts.append(1)
        return S

    P = panels.from_delayed([dask.delayed(panel)()], [60], 48, blocksize=(4, 3), dtype=float).persist()
    (P @ X).compute(), P.sum().compute()
    assert isinstance(P, panels.PanelArray) and len(counts) == 1


def test_random_panels_and_chunks_give_what_the_whole_matrix_gives() -> None:
    rng = np.random.default_rng(6)

    def cut(total: int, block: int) -> tuple[int, ...]:
        """A random division into whole blocks, some parts of which may be empty."""
        places = np.sort(rng.integers(0, total // block + 1, rng.integers(0, 4)))
        return tuple(int(n) * block for n in np.diff([0, *places, total // block]))

    for case in range(20):
        R, C = (int(n) for n in rng.integers(1, 5, 2))
        M, N = R * int(rng.integers(1, 9)), C * int(rng.integers(1, 9))
        s = bg.random(M, N, blocksize=(R, C), density=0.5, seed=case)
        P = panels.from_bsr(s, M).rechunk((cut(M, R), (N,)))
        x, y = rng.standard_normal((N, 3)), rng.standard_normal((M, 3))
        right, left = chunked(x, cut(N, C), (1, 2)), chunked(y, P.chunks[0], (2, 1))
        a, b = R * int(rng.integers(0, M // R + 1)), C * int(rng.integers(0, N // C + 1))
        for made, want in (
            (P @ right, s @ x),
            (P.T @ left, s.T @ y),
            (left.T @ P, y.T @ s.toarray()),
            (P[a:, :b].sum(axis=1), s.toarray()[a:, :b].sum(axis=1)),
            (P.rechunk({0: cut(M, R)}).T.toarray(), s.toarray().T),
        ):
            np.testing.assert_allclose(made.compute(), want, atol=1e-12, err_msg=f"case {case}")


def test_matrices_of_any_layout_are_cut() -> None:
    """Transposes that are not built, blocks with strides, indices that are not sorted, a bsr_matrix."""
    strided = bg.bsr_array((np.repeat(S.data, 2, axis=2)[:, :, ::2], S.indices, S.indptr), shape=S.shape)
    unsorted = bg.bsr_array((S.data[::-1].copy(), S.indices[::-1].copy(), [0, *[len(S.data)] * 15]), shape=S.shape)
    for matrix in (S.T, strided, unsorted, bg.bsr_matrix(S)):
        P = panels.from_bsr(matrix, 12)
        assert isinstance(P.compute(), bg.bsr_array)
        np.testing.assert_array_equal(P.compute().toarray(), matrix.toarray())


def test_equal_matrices_have_equal_names_and_others_do_not() -> None:
    used = S.copy()
    assert used.has_canonical_format and used.has_sorted_indices and (used @ X).shape == (60, 5)  # it keeps what it saw
    again = panels.from_bsr(used, 16)
    assert again.name == A.name and (again @ X).name == (A @ X).name
    other = S.copy()
    other.data[0, 0, 0] += 1
    assert len({panels.from_bsr(M, rows).name for M, rows in ((S, 16), (S, 20), (other, 16))}) == 3
    assert (A * 2).name != (A * 3).name != (A / 3).name
    assert (A @ X).name != (A @ (X + 1)).name


def test_panels_share_the_blocks_of_the_matrix() -> None:
    s = S.copy()
    P = panels.from_bsr(s, 16)
    s.data *= 2
    np.testing.assert_array_equal(P.compute().toarray(), 2 * D)
    assert not np.shares_memory(panels.from_bsr(s, 60).compute().data, s.data)


def test_dask_knows_how_large_a_panel_is() -> None:
    assert sizeof(S) == S.nbytes > 1000


def test_a_matrix_without_rows_columns_or_blocks() -> None:
    for shape in ((0, 6), (6, 0), (0, 0), (6, 6)):
        empty = bg.bsr_array(shape, dtype=float, blocksize=(2, 3))
        P = panels.from_bsr(empty, 4)
        assert P.compute().shape == shape
        assert (P @ np.ones(shape[1])).compute().tolist() == [0] * shape[0]
        assert (P.T @ np.ones(shape[0])).compute().tolist() == [0] * shape[1]
        assert P.sum().compute() == 0


def test_another_device_is_served_by_the_same_graph() -> None:
    """The fake CuPy refuses whatever CuPy would refuse."""
    fake = fake_cupy.backend()
    from dask.array.dispatch import concatenate_lookup

    concatenate_lookup.register(fake.xp.ndarray, fake.xp.concatenate)
    there = panels.from_bsr(S.to_device("cuda"), 16)
    moved = A.to_device("cuda")
    x, y = fake.from_host(X), fake.from_host(Y)
    for P in (there, moved):
        assert P.device == "cuda"
        for made, want in (
            (P @ x, D @ X),
            (P @ x[:, 0], D @ X[:, 0]),
            (P.T @ y, D.T @ Y),
            (panels.matmul(y.T, P), Y.T @ D),
            (P.T @ (P @ x), D.T @ (D @ X)),
            (P.sum(axis=0), D.sum(axis=0)),
            (P.sum(), D.sum()),
            (P.toarray(), D),
        ):
            assert isinstance(made._meta, fake.xp.ndarray)
            found = made.compute()
            assert isinstance(found, fake.xp.ndarray)
            np.testing.assert_allclose(fake.to_host(found), want, atol=1e-12)
        assert (P @ B.to_device("cuda")).compute().device == fake.xp.cuda.Device()
        np.testing.assert_allclose(P[8:40].compute().get().toarray(), D[8:40])
    assert moved.to_device("cpu").compute().device == "cpu"
    for wrong in (lambda: moved @ X, lambda: A @ x, lambda: moved @ B, lambda: A @ PB.to_device("cuda")):
        with pytest.raises(TypeError, match=r"'cuda'.*to_device"):
            wrong()


# ------------------------------------------------------------------------------------------ bad input
def _delayed(*made: Any, **change: Any) -> Any:
    said = {"rows": [16] * len(made), "columns": 48, "blocksize": (4, 3), "dtype": float} | change
    return panels.from_delayed([dask.delayed(m, traverse=False) for m in made], **said)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (S[:16].astype("float32"), "panel 1: wanted dtype float64, got float32"),
        (S[:16].tobsr((2, 3)), r"panel 1: wanted block size \(4, 3\), got \(2, 3\)"),
        (S[:12], r"panel 1: wanted shape \(16, 48\), got \(12, 48\)"),
        (S[:16, :45], r"panel 1: wanted shape \(16, 48\), got \(16, 45\)"),
    ],
    ids=["dtype", "block size", "rows", "columns"],
)
def test_panels_of_different_kinds_are_refused_by_their_number(second: Any, words: str) -> None:
    made = _delayed(S[:16], second) @ X
    with pytest.raises(ValueError, match=words):
        made.compute()


@pytest.mark.parametrize("second", [D[:16], S[:16].tocsr(), bg.bsr_matrix(S[:16]), None], ids=lambda x: str(type(x)))
def test_a_panel_that_is_no_bsr_array_is_refused(second: Any) -> None:
    with pytest.raises(TypeError, match="panel 1: wanted a bsr_array, got"):
        _delayed(S[:16], second).compute()


def test_a_function_that_changes_the_shape_of_a_panel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"panel \d: wanted shape .*, got \(48, "):
        A.map_panels(lambda p: p.T.copy(), blocksize=(4, 3)).compute()
    with pytest.raises(ValueError, match=r"panel \d: wanted dtype float64, got bool"):
        A.map_panels(lambda p: p.astype(bool)).compute()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rows_per_chunk inside a block": (lambda: panels.from_bsr(S, 6), ValueError, "the 4 rows.*got 6; 4 and 8 are"),
    "rows_per_chunk below a block": (lambda: panels.from_bsr(S, 3), ValueError, "got 3; 4 and 8 are"),
    "rows_per_chunk of 0": (lambda: panels.from_bsr(S, 0), ValueError, "rows_per_chunk: wanted a positive"),
    "rows_per_chunk no number": (lambda: panels.from_bsr(S, 4.0), ValueError, "rows_per_chunk: wanted an integer"),
    "dense matrix": (lambda: panels.from_bsr(D, 4), TypeError, "A: wanted a bsr_array"),
    "delayed rows inside a block": (lambda: _delayed(S[:16], rows=[6]), ValueError, "rows: panel 0 has 6 rows"),
    "delayed rows missing": (lambda: _delayed(S, S, rows=[60]), ValueError, "rows: wanted one number for each of 2"),
    "no panels": (lambda: _delayed(), ValueError, "at least 1"),
    "negative rows": (lambda: _delayed(S, rows=[-4]), ValueError, r"rows\[0\]: wanted an integer"),
    "columns inside a block": (lambda: _delayed(S, rows=[60], columns=47), ValueError, "columns: wanted a multiple"),
    "dtype": (lambda: _delayed(S, rows=[60], dtype="U3"), TypeError, "does not support dtype"),
    "not delayed": (
        lambda: panels.from_delayed([S], [60], 48, blocksize=(4, 3), dtype=float), TypeError, "panels: wanted delayed",
    ),
    "no panels among the operands": (lambda: panels.matmul(S, X), TypeError, "wanted a PanelArray among the operands"),
    "length": (lambda: A @ np.ones(3), ValueError, r"B: wanted shape \(48,\) or \(48, n\), got \(3,\)"),
    "length on the left": (lambda: X @ A, ValueError, r"A: wanted shape \(60,\) or \(n, 60\), got \(48, 5\)"),
    "batch": (lambda: A @ np.ones((48, 2, 2)), ValueError, r"got \(48, 2, 2\)"),
    "dtype of the operand": (lambda: A @ np.full(48, None), TypeError, "B: does not support dtype object"),
    "dtype of chunks": (lambda: A @ chunked(np.full(48, "x"), 48), TypeError, "B: does not support dtype <U1"),
    "scipy": (lambda: A @ S.tocsr(), TypeError, "B: wanted a PanelArray.*got csr_array"),
    "text": (lambda: A @ "x", TypeError, "B: wanted a PanelArray.*got str"),
    "chunks inside a block": (lambda: A @ chunked(X, 10, 5), ValueError, r"B: a chunk begins at 10.*of 3; B.rechunk"),
    "chunks that are not the panels": (lambda: A.T @ chunked(Y, 20, 5), ValueError, r"B: .*\{0: A.chunks\[1\]\}"),
    "chunks on the left": (lambda: chunked(Y.T, 5, 20) @ A, ValueError, r"A: wanted.*\{1: B.chunks\[0\]\}"),
    "unknown chunks": (
        lambda: A @ chunked(X[:, 0], 48)[chunked(X[:, 0], 48) > -9], ValueError, "B: has chunks of unknown sizes",
    ),
    "chunks of sparse matrices": (lambda: A @ PB.to_dask_array(), TypeError, "B: its chunks are bsr_array"),
    "shapes of sparse operands": (lambda: A @ A, ValueError, r"shapes \(60, 48\) and \(60, 48\) do not fit"),
    "shapes in memory": (lambda: S @ A, ValueError, "do not fit"),
    "a grid": (lambda: A @ A.T, ValueError, "4 panels of rows times 4 panels of columns.*rechunk"),
    "panels inside block columns": (
        lambda: A @ panels.from_bsr(B.tobsr((4, 5)), 16), ValueError, "B: a panel begins at row 16, inside a block",
    ),
    "panels in a block of a matrix": (
        lambda: S @ panels.from_bsr(B.tobsr((4, 5)), 16), ValueError, "B: a panel begins at row 16, inside a block",
    ),
    "panels that are summed": (lambda: A.T @ A.rechunk(20), ValueError, "the panels along the axis of the sums differ"),
    "rechunk inside a block": (lambda: A.rechunk({0: 6}), ValueError, "chunks: panel 0 has 6 rows"),
    "rechunk columns inside a block": (lambda: A.T.rechunk({1: 6}), ValueError, "panel 0 has 6 columns.*the 4 columns"),
    "rechunk along both axes": (lambda: A.rechunk((16, 3)), ValueError, "would cut"),
    "dask.array.dot with chunks": (lambda: da.dot(A, chunked(X, 12, 5)), ValueError, "dot must be one chunk"),
    "slice inside a block": (lambda: A[1:3], ValueError, "rows 1:3.*multiples of 4; 0:4 do"),
    "columns of a slice": (lambda: A[:, 1:3], ValueError, "columns 1:3.*multiples of 3; 0:3 do"),
    "number": (lambda: A[0], TypeError, "index: wanted one or two slices"),
    "step": (lambda: A[::4], TypeError, "index: wanted one or two slices"),
    "too many": (lambda: A[:, :, :], TypeError, "index: wanted one or two slices"),
    "panel out of range": (lambda: A.partitions[4], IndexError, "below 4"),
    "no panel": (lambda: A.partitions[2:1], IndexError, "none of the 4"),
    "panel by name": (lambda: A.partitions["x"], IndexError, "wanted the number"),
    "axis": (lambda: A.sum(axis=2), ValueError, "axis: wanted None, 0 or 1, got 2"),
    "blocks that do not divide": (lambda: A.map_panels(abs, blocksize=(5, 3)), ValueError, "panel 0 has 16 rows"),
    "dtype of astype": (lambda: A.astype("U3"), TypeError, "dtype"),
    "device": (lambda: A.to_device("tpu"), ValueError, "tpu"),
    "product by an array": (lambda: A * X, TypeError, "wanted a number, got ndarray"),
    "number plus matrix": (lambda: A + 1, TypeError, "wanted a PanelArray, got int"),
    "other panels": (lambda: A + panels.from_bsr(S, 20), ValueError, "wanted panels of the same sizes"),
    "other blocks": (lambda: A - panels.from_bsr(S.tobsr((4, 6)), 16), ValueError, "wanted panels of the same sizes"),
    "mean": (lambda: A.mean(), AttributeError, "no 'mean'.*map_panels"),
    "nbytes": (lambda: A.nbytes, AttributeError, "no 'nbytes'"),
    "comparison": (lambda: A == A, TypeError, "no operation __eq__"),
    "power": (lambda: A**2, TypeError, "no operation __pow__"),
    "number from a matrix": (lambda: float(A), TypeError, "no operation __float__"),
    "rows one by one": (lambda: list(A), TypeError, "no operation __iter__"),
    "assignment": (lambda: A.__setitem__(0, 1), TypeError, "no operation __setitem__"),
    "NumPy array": (lambda: np.asarray(A), TypeError, "does not become a NumPy array"),
    "NumPy function": (lambda: np.mean(A), TypeError, "numpy.mean does not take a PanelArray"),
    "ufunc": (lambda: np.exp(A), TypeError, "does not support ufuncs"),
    "plus an array of Dask": (lambda: chunked(D, 16, 48) + A, TypeError, "no operation __radd__"),
    "times a matrix in memory": (lambda: S * A, TypeError, "wanted a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_the_words_for_it(name: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


#: Public names that were tried
SERVED = {
    *("T", "astype", "blocks", "blocksize", "chunks", "chunksize", "compute", "copy", "dask", "device", "dot"),
    *("dtype", "itemsize", "map_blocks", "map_panels", "name", "ndim", "npartitions", "numblocks", "partitions"),
    *("persist", "rechunk", "shape", "size", "sum", "to_dask_array", "to_delayed", "to_device", "toarray"),
    *("transpose", "visualize"),
}


def test_nothing_of_dask_is_offered_that_was_not_looked_at() -> None:
    """A name that a later version of Dask adds is refused until somebody has tried it."""
    served = {n for n in dir(panels.PanelArray) if not n.startswith("_") and hasattr(A, n)}
    assert served == SERVED
    assert "map_overlap" in dir(da.Array) and not hasattr(A, "map_overlap")


def test_the_picture_of_a_notebook_does_not_show_the_size_of_a_dense_array() -> None:
    assert A._repr_html_() is None
    assert repr(A) == "PanelArray(shape=(60, 48), dtype=float64, blocksize=(4, 3), panels=4, device='cpu')"


def test_a_product_over_both_axes_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="wanted one axis of each operand"):
        da.tensordot(A.T.T, chunked(D, 16, 48), axes=2).compute()


def test_scipy_sees_the_same_products() -> None:
    want = scipy.sparse.bsr_array((S.data, S.indices, S.indptr), shape=S.shape) @ X
    np.testing.assert_allclose((A @ X).compute(), want, atol=1e-12)


def test_an_import_brings_nothing_that_was_not_asked_for() -> None:
    code = (
        "import sys, bsrgemm; print([m for m in ('dask', 'distributed', 'zarr', 'mpi4py') if m in sys.modules]); "
        "import bsrgemm.interop.dask; print([m for m in ('distributed', 'zarr', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


@pytest.mark.long
def test_query_planning_is_refused_with_the_way_out() -> None:
    code = "import dask; dask.config.set({'array.query-planning': True}); import bsrgemm.interop.dask"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ImportError: bsrgemm.interop.dask: does not work with Dask's query" in done.stderr


def test_the_reference_lists_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "dask.rst").read_text(encoding="utf-8")
    listed = re.findall(r"^ {3}interop\.dask\.(\S+)$", text, re.MULTILINE)
    own = {f"PanelArray.{name}" for name in SERVED - panels.PanelArray._KEPT}
    assert sorted(listed) == sorted({*panels.__all__, *own})
    assert all(f"``{name}``" in text for name in panels.PanelArray._KEPT)


def test_operations_that_panels_do_not_have_name_the_way_out() -> None:
    A = bg.eye(8, blocksize=(2, 2))
    D = panels.from_bsr(A, 4)
    with pytest.raises(TypeError, match=r"^func: wanted a function of a panel, got None"):
        D.map_panels(None)
    with pytest.raises(
        TypeError, match=r"wanted a PanelArray, got host_bsr_array; from_bsr\(B, rows_per_chunk\) makes"
    ):
        D + A
    for solve in (bg.linalg.cg, bg.linalg.gmres):
        with pytest.raises(
            TypeError, match=r"^A: wanted .*, got PanelArray: its products wait .*; A\.compute\(\) is a"
        ):
            solve(D, np.ones(8))
