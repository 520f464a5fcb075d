"""What bsrgemm promises beyond scipy's BSR: more forms, dtypes and places, results that repeat."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm.dtypes import BFLOAT16, DEVICE_DTYPES, HALF_DTYPES

from ..strategies import (
    INEXACT,
    Place,
    Sample,
    assert_values,
    each_place,
    eps,
    magnitude,
    quietly,
    random_values,
    rounding,
    widened,
)
from .random_matrices import HERE, each_dtype, each_flavour, random_sample

HALVES = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)


# -------------------------------------------------------------------------------------------- block-COO
@each_place
@each_flavour
def test_block_coo_takes_blocks_in_any_order_and_infers_the_shape(place: Place, flavour: type) -> None:
    blocks = np.arange(18.0).reshape(3, 2, 3)
    A = flavour((place.put(blocks), (place.put([2, 0, 1]), place.put([1, 0, 3]))))
    assert A.shape == (6, 12) and A.blocksize == (2, 3)
    expected = np.zeros((6, 12))
    for block, i, j in zip(blocks, (2, 0, 1), (1, 0, 3), strict=True):
        expected[2 * i : 2 * i + 2, 3 * j : 3 * j + 3] = block
    assert_values(place.blocks(A, flavour).dense, expected)


@each_place
def test_block_coo_keeps_duplicates_until_they_are_added_up(place: Place) -> None:
    A = bg.bsr_array((place.put(np.ones((3, 2, 2))), (place.put([1, 1, 0]), place.put([0, 0, 1]))), shape=(4, 4))
    assert A.nnz == 12 and not A.has_canonical_format
    A.sum_duplicates()
    assert A.nnz == 8
    assert_values(place.dense(A.toarray())[2:, :2], np.full((2, 2), 2.0))


@each_place
def test_block_coo_takes_a_dtype_and_lists_of_places(place: Place) -> None:
    A = bg.bsr_array((place.put(np.ones((2, 1, 2))), ([0, 1], [1, 0])), shape=(2, 4), dtype="float32")
    assert A.dtype == np.float32
    assert_values(place.dense(A.toarray()), [[0, 0, 1, 1], [1, 1, 0, 0]])


# --------------------------------------------------------------------------------- slices and diagonals
@each_place
@each_flavour
def test_aligned_slices_and_assignment_work_where_scipy_raises(place: Place, flavour: type) -> None:
    s = random_sample((4, 5), (2, 3), seed=2, density=1.0)
    A = place.bsr(s, flavour)
    with pytest.raises((NotImplementedError, TypeError)):
        s.scipy(flavour)[0:2, 0:3]
    assert_values(place.blocks(A[2:6, 3:], flavour).dense, s.dense[2:6, 3:])
    assert_values(place.blocks(A[-2:], flavour).dense, s.dense[-2:])
    expected = s.dense.copy()
    A[2:4, 3:9] = 5.0
    expected[2:4, 3:9] = 5.0
    A[4:6] = place.put(np.arange(15.0))
    expected[4:6] = np.arange(15.0)
    A[:2, :3] = A[2:4, 3:6]
    expected[:2, :3] = expected[2:4, 3:6]
    assert_values(place.blocks(A, flavour).dense, expected)


@each_place
@each_flavour
@pytest.mark.parametrize("k", [-7, -3, 0, 2, 9])
def test_setdiag_adds_the_blocks_it_needs(place: Place, flavour: type, k: int) -> None:
    A = flavour((8, 12), blocksize=(2, 3), device=place.backend.name)
    A.setdiag(3.0, k=k)
    expected = 3.0 * np.eye(8, 12, k=k)
    blocks = place.blocks(A, flavour)
    assert (blocks.data != 0).any(axis=(1, 2)).all()
    assert_values(blocks.dense, expected)
    assert float(place.number(A.trace(offset=k))) == expected.trace(offset=k)


# ----------------------------------------------------------------------------- scipy's bugs are not ours
@each_place
def test_the_sum_of_a_matrix_with_several_blocks_is_a_number(place: Place) -> None:
    s = random_sample((3, 3), (2, 2), seed=3, density=1.0, spread="small")
    with pytest.raises(ValueError):
        s.scipy(bg.bsr_matrix).sum()  # what scipy does; when this stops raising, drop the line
    A = place.bsr(s, bg.bsr_matrix)
    assert_values(place.number(A.sum()), s.dense.sum())
    assert_values(place.number(A.mean()), s.dense.mean(), eps(s.dtype) * 40)
    assert_values(place.dense(A.sum(axis=0), matrix=True), s.dense.sum(axis=0, keepdims=True))
    assert_values(place.dense(A.sum(axis=1), matrix=True), s.dense.sum(axis=1, keepdims=True))


@each_place
@each_flavour
def test_duplicates_that_cancel_are_zero_everywhere(place: Place, flavour: type) -> None:
    data = np.array([[[1.0, 2.0]], [[-1.0, 3.0]]])
    A = place.bsr(Sample(data, np.array([0, 0]), np.array([0, 2]), (1, 2)), flavour)
    row, col = A.nonzero()
    assert_values(place.dense(row), [0])
    assert_values(place.dense(col), [1])
    assert A.count_nonzero() == 1
    assert_values(place.blocks(A.astype(bool), flavour).dense, [[False, True]])


#: Operations whose result is wider than the matrix; Y is dense, S sparse, both int64.
WIDENING: dict[str, Callable[[Any, Any, Any], Any]] = {
    "A @ Y": lambda A, Y, S: A @ Y,
    "A @ y": lambda A, Y, S: A @ Y[:, 0],
    "Y @ A": lambda A, Y, S: Y @ A,
    "A.T @ Y": lambda A, Y, S: A.T @ Y,
    "A @ S": lambda A, Y, S: A @ S,
    "S @ A": lambda A, Y, S: S @ A,
    "matmul": lambda A, Y, S: bg.matmul(A, Y, out_dtype="float64"),
    "A + Y": lambda A, Y, S: A + Y,
    "A + S": lambda A, Y, S: A + S,
    "A.multiply(S)": lambda A, Y, S: A.multiply(S),
    "A.multiply(row of S)": lambda A, Y, S: A.multiply(S[:1] if S.blocksize[0] == 1 else S.tobsr((1, 1))[:1]),
    "A * number": lambda A, Y, S: A * np.int64(3),
    "A / number": lambda A, Y, S: A / 2,
    "astype": lambda A, Y, S: A.astype("int64"),
    "astype(float)": lambda A, Y, S: A.astype("float32"),
    "sum": lambda A, Y, S: A.sum(),
    "sum over rows": lambda A, Y, S: A.sum(axis=1),
    "sum over columns": lambda A, Y, S: A.sum(axis=0),
    "mean": lambda A, Y, S: A.mean(),
    "trace": lambda A, Y, S: A.trace(),
    "sqrt": lambda A, Y, S: abs(A).sqrt(),
}


@each_place
@pytest.mark.parametrize("blocksize", [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
@pytest.mark.parametrize("name", WIDENING)
def test_duplicates_are_added_up_in_their_own_dtype(
    place: Place, name: str, dtype: str, blocksize: tuple[int, int]
) -> None:
    """True and True make True, 100 and 100 make -56: a wider result must not see the two apart."""
    R, C = blocksize
    data = np.full((3, R, C), True if dtype == "bool" else 100, dtype)
    indices, indptr = np.array([0, 0, 0], np.int32), np.full(4 // R + 1, 3, np.int32)
    indptr[0] = 0
    a = Sample(data, indices, indptr, (4, 4))
    other = Sample(
        np.arange(1, 4 // R * R * C + 1).reshape(-1, R, C),
        np.zeros(4 // R, np.int32),
        np.arange(4 // R + 1, dtype=np.int32),
        (4, 4),
    )
    dense = np.arange(16).reshape(4, 4) - 7
    result = WIDENING[name](place.bsr(a), place.put(dense), place.bsr(other))
    reference = WIDENING[name](HERE.bsr(a.merged()), dense, HERE.bsr(other))
    expected = np.asarray(reference.toarray() if hasattr(reference, "toarray") else reference)
    if place.backend.is_sparse(result):
        actual = place.blocks(result).dense
    else:
        actual = place.dense(result) if result.ndim else place.number(result)
    assert result.dtype == reference.dtype
    assert_values(actual, expected)
    if name == "A @ Y":  # the reference is itself one of ours: tie it to NumPy once
        assert_values(expected, a.dense.astype(np.int64) @ dense)


@each_place
@each_flavour
def test_comparisons_with_nan_are_false_as_in_numpy(place: Place, flavour: type) -> None:
    x = np.array([[np.nan, 1.0, 0.0, -1.0]])
    y = np.array([[1.0, np.nan, np.nan, -1.0]])
    A, B = (flavour(place.put(v), blocksize=(1, 2)) for v in (x, y))
    for op in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        with quietly():
            assert_values(place.foreign(op(A, B), "csr", flavour).toarray(), op(x, y))
            for number in (-1, 0, 1):
                assert_values(place.foreign(op(A, number), "csr", flavour).toarray(), op(x, number))


# ----------------------------------------------------------------------------------------- 16-bit floats
@each_place
@each_flavour
@HALVES
def test_16_bit_floats_go_from_end_to_end(place: Place, flavour: type, dtype: np.dtype[Any]) -> None:
    s = random_sample((3, 4), (3, 5), dtype, seed=4, duplicates=2)
    A = place.bsr(s, flavour)
    assert A.dtype == dtype
    assert_values(place.blocks(pickle.loads(pickle.dumps(A)), flavour).data, s.data)
    x = random_values(np.random.default_rng(5), (20, 7), dtype, "wide")
    X = place.put(x)
    additions = int(s.layers.sum(axis=1).max()) + 8
    product, weight = s.dense @ widened(x), s.weight @ magnitude(x)
    y = A @ X
    assert y.dtype == dtype
    assert_values(place.dense(y), product, rounding(dtype, weight, additions))
    wide = bg.matmul(A, X, out_dtype="float32")
    assert wide.dtype == np.float32
    assert_values(place.dense(wide), product, rounding(np.dtype("f"), weight, additions))
    for B in (A + A, A.multiply(A), A * 2, A.T, abs(A), -A, A @ A.T, A.copy(), A[:3], A.sin(), round(A, 1)):
        assert place.blocks(B, flavour).dtype == dtype
    assert_values(place.blocks(A + A).dense, 2 * s.dense, 2 * s.bound + eps(dtype) * s.weight)
    for result in (A.sum(), A.mean(), A.max(), A.min()):
        assert result.dtype == dtype
    total = rounding(dtype, s.weight.sum(), s.layers.sum() + 8)
    assert_values(place.number(A.sum()), s.dense.sum(), total)
    assert (A @ X.astype("float32")).dtype == np.float32
    assert (A @ X.astype("float64")).dtype == np.float64
    csr = A.astype("float32").tocsr()
    assert_values(place.foreign(csr, "csr", flavour).toarray(), s.dense, s.bound)


@each_place
@HALVES
def test_16_bit_floats_are_summed_in_float32(place: Place, dtype: np.dtype[Any]) -> None:
    """4096 ones make 4096 (float16 stops at 2048, bfloat16 at 256), and small terms are not lost."""
    n = 4096
    data = np.ones((n // 16, 1, 16), dtype)
    indices, indptr = np.arange(n // 16, dtype=np.int32), np.array([0, n // 16], np.int32)
    A = place.bsr(Sample(data, indices, indptr, (1, n)))
    ones = place.put(np.ones(n, dtype))
    assert place.dense(A @ ones).astype(float)[0] == n
    assert place.dense(A @ place.put(np.ones((n, 3), dtype))).astype(float).tolist() == [[n] * 3]
    assert float(place.number(A.sum()).astype(float)) == n
    assert place.dense(A.sum(axis=1)).astype(float)[0] == n
    assert place.blocks(A @ A.T).dense[0, 0] == n
    repeated = place.bsr(Sample(np.ones((n, 1, 1), dtype), np.zeros(n, np.int32), np.array([0, n]), (1, 1)))
    assert place.dense(repeated.toarray()).astype(float)[0, 0] == n


@each_place
@HALVES
def test_16_bit_floats_are_rounded_to_the_nearest_decimal(place: Place, dtype: np.dtype[Any]) -> None:
    """1.546875 is 1.5, not 1.6: ten times it is 15.5 in bfloat16."""
    A = bg.bsr_array(place.put(np.array([[1.546875, -1.546875]], dtype)))
    assert_values(place.dense(round(A, 1).toarray()), np.array([[1.5, -1.5]]))


# --------------------------------------------------------------------------------- blocks of every shape
@each_place
@pytest.mark.parametrize("blocksize", [(1, 7), (5, 1), (3, 5), (16, 16), (17, 13), (31, 2), (64, 48)], ids=str)
def test_any_block_shape_multiplies(place: Place, blocksize: tuple[int, int]) -> None:
    s = random_sample((3, 4), blocksize, np.float32, seed=6)
    A = place.bsr(s)
    rng = np.random.default_rng(7)
    for width in (1, 3, 33):
        x = random_values(rng, (s.shape[1], width), s.dtype, "wide")
        bound = rounding(s.dtype, s.weight @ magnitude(x), s.shape[1] + 8)
        assert_values(place.dense(A @ place.put(x)), s.dense @ widened(x), bound)
        z = random_values(rng, (width, s.shape[0]), s.dtype, "wide")
        bound = rounding(s.dtype, magnitude(z) @ s.weight, s.shape[0] + 8)
        assert_values(place.dense(place.put(z) @ A), widened(z) @ s.dense, bound)
    product = A @ A.T
    assert product.blocksize == (blocksize[0], blocksize[0])
    bound = rounding(s.dtype, s.weight @ s.weight.T, s.shape[1] + 8)
    assert_values(place.blocks(product).dense, s.dense @ s.dense.T, bound)


# ------------------------------------------------------------------------------------------- from_dense
@each_place
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "float16", "bfloat16", "int16"])
def test_from_dense_keeps_blocks_with_an_element_above_the_threshold(place: Place, dtype: str) -> None:
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    X = np.zeros((4, 6))
    X[0, 0], X[1, 5], X[3, 2] = 1.0, -3.0, 2.0
    X = X.astype(kind)
    for threshold, kept in ((0, 3), (1, 2), (2, 1), (3, 0)):
        A = bg.from_dense(place.put(X), (2, 3), threshold=threshold)
        blocks = place.blocks(A, bg.bsr_array)
        assert len(blocks.data) == kept and A.dtype == kind and blocks.is_canonical
        tiles = X.reshape(2, 2, 2, 3)
        strong = (magnitude(tiles) > threshold).any(axis=(1, 3))
        expected = np.where(strong[:, None, :, None], widened(tiles), 0).reshape(4, 6)
        assert_values(blocks.dense, expected)


@each_place
def test_from_dense_keeps_blocks_with_nan(place: Place) -> None:
    X = np.zeros((2, 4))
    X[1, 3] = np.nan
    A = bg.from_dense(place.put(X), (1, 2), threshold=5)
    assert A.nnz == 2
    assert_values(place.dense(A.toarray()), X)


@pytest.mark.fake
def test_from_dense_takes_lists_and_a_device() -> None:
    A = bg.from_dense([[1.0, 0.0], [0.0, 2.0]], (1, 1))
    assert A.nnz == 2 and A.device == "cpu"
    place = Place("cuda")
    B = bg.from_dense(np.eye(4), (2, 2), device=place.backend.name)
    assert place.backend.is_sparse(B)
    assert_values(place.blocks(B).dense, np.eye(4))


# ------------------------------------------------------------------------------------------ places
@each_place
@each_flavour
def test_a_matrix_knows_where_it_is_and_how_full(place: Place, flavour: type) -> None:
    A = flavour((place.put(np.ones((1, 2, 3))), ([0], [1])), shape=(4, 6))
    assert A.density == 0.25
    assert A.device == ("cpu" if place.is_host else place.backend.device_of(A.data))
    assert str(A.get().device) == "cpu"
    assert bg.get_array_module(A) is place.xp
    assert bg.get_array_module(np.ones(1), A) is place.xp
    assert bg.get_array_module(A.data) is place.xp
    assert bg.get_array_module(1.0) is np


@each_place
def test_isinstance_answers_for_the_public_classes_in_every_home(place: Place) -> None:
    s = random_sample((2, 2), (2, 2))
    A, M = place.bsr(s), place.bsr(s, bg.bsr_matrix)
    assert isinstance(A, bg.bsr_array) and not isinstance(A, bg.bsr_matrix)
    assert isinstance(M, bg.bsr_matrix) and not isinstance(M, bg.bsr_array)
    assert place.backend.sparse.issparse(A) and place.backend.sparse.issparse(M)
    assert type(A.T) is type(A @ A) is type(A + A) is type(A.copy()) is type(A)
    assert type(M.T) is type(M @ M) is type(M + M) is type(M.copy()) is type(M)
    if place.is_host:
        assert sp.issparse(A) and isinstance(A, sp.sparray) and not sp.isspmatrix(A)
        assert sp.isspmatrix(M)
    else:
        assert not sp.issparse(A)


@each_place
def test_a_constructor_puts_the_matrix_on_the_device_asked_for(place: Place) -> None:
    s = random_sample((2, 3), (2, 3))
    name = place.backend.name
    arrays = (s.data, s.indices, s.indptr)
    for source in (arrays, s.dense, s.scipy(), s.scipy().tocsr(), HERE.bsr(s), s.dense.tolist()):
        A = bg.bsr_array(source, shape=s.shape, blocksize=s.blocksize, device=name)
        assert place.backend.is_sparse(A)
        assert_values(place.blocks(A).dense, s.dense)
    back = bg.bsr_array(A, device="cpu")
    assert_values(HERE.blocks(back).dense, s.dense)


@each_place
@each_dtype
@each_flavour
def test_pickles_and_copies_stay_in_their_home(place: Place, dtype: np.dtype[Any], flavour: type) -> None:
    s = random_sample((2, 3), (2, 3), dtype, duplicates=1)
    A = place.bsr(s, flavour)
    stream = io.BytesIO()
    pickle.dump(A, stream)
    stream.seek(0)
    for B in (pickle.load(stream), copy.copy(A), copy.deepcopy(A), copy.deepcopy([A])[0]):
        assert type(B) is type(A)
        assert_values(place.blocks(B, flavour).data, s.data)
        if len(s.data):
            B.data[...] = 0
    assert_values(place.blocks(A, flavour).data, s.data)


@each_place
def test_a_shared_matrix_shares_and_a_copied_one_does_not(place: Place) -> None:
    s = random_sample((2, 3), (2, 3))
    data, indices, indptr = (place.put(x) for x in (s.data, s.indices, s.indptr))
    shared = bg.bsr_array((data, indices, indptr), shape=s.shape)
    assert place.xp.may_share_memory(shared.data, data)
    own = bg.bsr_array((data, indices, indptr), shape=s.shape, copy=True)
    for mine, given in ((own.data, data), (own.indices, indices), (own.indptr, indptr)):
        assert not place.xp.may_share_memory(mine, given)
    assert place.xp.may_share_memory(bg.bsr_array(shared).data, data)
    assert not place.xp.may_share_memory(bg.bsr_array(shared, copy=True).data, data)


# ---------------------------------------------------------------------------- repeatable, shared, untouched
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "A @ x": lambda A, X: A @ X[:, 0],
    "A @ X": lambda A, X: A @ X,
    "X.T @ A.T": lambda A, X: X.T @ A.T,
    "A.T @ Y": lambda A, X: A.T @ (A @ X),
    "A @ A.T": lambda A, X: (A @ A.T).data,
    "A + A": lambda A, X: (A + A).data,
    "A.multiply(A)": lambda A, X: A.multiply(A).data,
    "sum": lambda A, X: A.sum(axis=0),
    "sum of all": lambda A, X: A.sum().reshape(1),
    "toarray": lambda A, X: A.toarray(),
}


@each_place
@pytest.mark.parametrize("dtype", INEXACT, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_same_call_gives_the_same_bits(place: Place, name: str, dtype: np.dtype[Any]) -> None:
    s = random_sample((7, 9), (5, 3), dtype, seed=19, duplicates=6)
    A = place.bsr(s)
    X = place.put(random_values(np.random.default_rng(20), (s.shape[1], 19), dtype, "wide"))
    bits = {place.dense(PRODUCTS[name](A, X)).tobytes() for _ in range(20)}
    assert len(bits) == 1


@each_place
def test_two_threads_share_one_matrix(place: Place) -> None:
    s = random_sample((8, 8), (4, 4), np.float32, seed=21, duplicates=9)
    A = place.bsr(s)
    inputs = [random_values(np.random.default_rng(k), (s.shape[1], 5 + k), s.dtype, "wide") for k in range(2)]
    alone = [[place.dense(f(place.bsr(s), place.put(x))) for f in PRODUCTS.values()] for x in inputs]
    together: list[list[Any]] = [[], []]
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(k: int) -> None:
        try:
            barrier.wait(timeout=60)
            for _ in range(20):
                together[k].append([place.dense(f(A, place.put(inputs[k]))) for f in PRODUCTS.values()])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for k in range(2):
        assert len(together[k]) == 20
        for results in together[k]:
            for result, expected in zip(results, alone[k], strict=True):
                np.testing.assert_array_equal(result, expected)


@each_place
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "complex128"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_leave_their_operands_alone(place: Place, name: str, dtype: str) -> None:
    s = random_sample((3, 4), (3, 2), dtype, seed=22, duplicates=3)
    A = place.bsr(s)
    x = random_values(np.random.default_rng(23), (s.shape[1], 6), s.dtype, "wide")
    X = place.put(x)
    PRODUCTS[name](A, X)
    np.testing.assert_array_equal(place.dense(X), x)
    for array, before in ((A.data, s.data), (A.indices, s.indices), (A.indptr, s.indptr)):
        np.testing.assert_array_equal(place.dense(array), before)


@each_place
@pytest.mark.parametrize("dtype", INEXACT, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_spread_through_stored_blocks_only(place: Place, dtype: np.dtype[Any], bad: float) -> None:
    """Blocks at (0, 0) and (1, 1) of three by three: column block 2 and row block 2 store nothing."""
    data = np.ones((2, 2, 2), dtype)
    A = place.bsr(Sample(data, np.array([0, 1], np.int32), np.array([0, 1, 2, 2], np.int32), (6, 6)))
    for width in (None, 1, 3):
        x = np.ones((6, width) if width else 6, dtype)
        x[4] = bad  # nothing stored meets it
        y = place.dense(A @ place.put(x)).astype(np.complex128)
        assert np.isfinite(y).all()
        x[0] = bad
        y = place.dense(A @ place.put(x)).astype(np.complex128)
        assert not np.isfinite(y[:2]).any() and np.isfinite(y[2:]).all() and (y[4:] == 0).all()
    x = np.ones((3, 6), dtype)
    x[:, 4] = bad
    assert np.isfinite(place.dense(place.put(x) @ A).astype(np.complex128)).all()
    spoiled = data.copy()
    spoiled[1, 0, 0] = bad
    B = place.bsr(Sample(spoiled, np.array([0, 1], np.int32), np.array([0, 1, 2, 2], np.int32), (6, 6)))
    y = place.dense(B @ place.put(np.ones((6, 2), dtype))).astype(np.complex128)
    assert np.isfinite(y[[0, 1, 3, 4, 5]]).all() and not np.isfinite(y[2]).any()
    out = place.put(np.full((6, 2), bad, dtype))
    bg.matmul(A, place.put(np.ones((6, 2), dtype)), out=out, beta=0)
    assert np.isfinite(place.dense(out).astype(np.complex128)).all()


@each_place
@each_flavour
def test_repr_and_str_name_the_blocks(place: Place, flavour: type) -> None:
    A = place.bsr(random_sample((3, 3), (4, 5), density=1.0), flavour)
    kind = "array" if flavour is bg.bsr_array else "matrix"
    assert repr(A) == repr(random_sample((3, 3), (4, 5), density=1.0).scipy(flavour))
    assert kind in repr(A) and "blocksize=4x5" in repr(A)
    assert "Coords" in str(A) and ":\t:" in str(A)


def test_every_device_dtype_is_a_host_dtype() -> None:
    assert set(DEVICE_DTYPES) <= set(HERE.backend.dtypes)
