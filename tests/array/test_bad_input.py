"""Bad input ends in an error that names the argument, odd but good input in the right answer, on any backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

from ..strategies import PLACES, Place, assert_values, each_place, quietly
from .refused import Refused, built, elements, matrix, ones, read_only, sample
from .refused.constructors import CONSTRUCTORS
from .refused.methods import METHODS
from .refused.products import MATMUL, OPERANDS

pytestmark = pytest.mark.fake

# ------------------------------------------------------------------------------------ what must be refused
TABLE = CONSTRUCTORS + OPERANDS + MATMUL + METHODS


def tables() -> list[Any]:
    """Every case in every backend where it makes sense."""
    return [
        pytest.param(case, param.values[0], id=f"{param.id}-{case.id}", marks=param.marks)
        for param in PLACES
        for case in TABLE
        if param.values[0].name in case.backends  # type: ignore[union-attr]
    ]


@pytest.mark.parametrize("case, place", tables())
def test_bad_input_is_refused_by_name(case: Refused, place: Place) -> None:
    with quietly(), pytest.raises(case.error) as refused:
        case.attempt(place)
    assert case.text in str(refused.value), f"the message does not name {case.text!r}: {refused.value}"


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.id for case in TABLE]
    assert len(names) == len(set(names))


@each_place
def test_a_refused_product_leaves_out_as_it_was(place: Place) -> None:
    out = ones(place, 4)
    for options in ({"alpha": 1j}, {"beta": 1j}, {"out_dtype": "complex64"}):
        with pytest.raises((ValueError, TypeError)):
            bg.matmul(matrix(place), ones(place, 6), out=out, **options)
    assert_values(place.dense(out), np.ones(4))


@each_place
def test_a_refused_assignment_leaves_the_matrix_as_it_was(place: Place) -> None:
    A = matrix(place)
    with pytest.raises(ValueError, match="value"):
        A[:2, :] = 5.0
    assert_values(place.blocks(A).dense, sample().dense)


# ------------------------------------------------------------------------- what must give the right answer
@each_place
def test_arrays_with_any_strides_make_the_same_matrix(place: Place) -> None:
    s = sample()
    data = place.put(np.repeat(np.repeat(s.data[:, ::-1], 2, axis=2), 2, axis=0))[::2, ::-1, ::2]
    indices = place.put(np.repeat(s.indices, 3))[::3]
    indptr = place.put(s.indptr[::-1].copy())[::-1]
    assert not data.flags.c_contiguous and not indices.flags.c_contiguous
    A = bg.bsr_array((data, indices, indptr), shape=s.shape)
    assert_values(place.blocks(A).dense, s.dense)
    x = np.arange(6.0)
    assert_values(place.dense(A @ place.put(x)), s.dense @ x)
    assert_values(place.dense(A.toarray()), s.dense)
    assert_values(place.foreign(A.tocsr(), "csr").toarray(), s.dense)
    assert_values(place.blocks(A.T).dense, s.dense.T)
    assert_values(place.blocks(A + A).dense, 2 * s.dense)
    assert_values(place.blocks(A @ A.T).dense, s.dense @ s.dense.T)


@each_place
def test_arrays_replaced_by_strided_ones_are_read_right(place: Place) -> None:
    s = sample()
    A = place.bsr(s)
    A.data = place.put(np.repeat(s.data, 2, axis=2))[:, :, ::2]
    A.indices = place.put(np.repeat(s.indices, 2))[::2]
    x = np.arange(12.0).reshape(6, 2)
    assert_values(place.dense(A @ place.put(x)), s.dense @ x)
    assert_values(place.dense(A.toarray()), s.dense)
    assert_values(place.blocks(A.T).dense, s.dense.T)
    assert_values(place.foreign(A.tocsr(), "csr").toarray(), s.dense)
    assert_values(place.foreign(A.tocoo(), "coo").toarray(), s.dense)


@each_place
def test_b_and_out_may_have_any_strides(place: Place) -> None:
    s = sample()
    x = np.arange(12.0).reshape(6, 2)
    X = place.put(np.repeat(x[::-1], 2, axis=1))[::-1, ::2]
    whole = place.put(np.full((8, 6), -1.0))
    out = whole[::-2, 1::3]
    assert bg.matmul(place.bsr(s), X, out=out) is out
    expected = np.full((8, 6), -1.0)
    expected[::-2, 1::3] = s.dense @ x
    assert_values(place.dense(whole), expected)


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4", ">c16", ">u2"])
def test_big_endian_arrays_are_read_right_on_the_host(dtype: str) -> None:
    s = sample()
    big = np.dtype(dtype)
    index = np.dtype(">i4")
    place = Place("cpu")
    A = bg.bsr_array((s.data.astype(big), s.indices.astype(index), s.indptr.astype(index)), shape=s.shape)
    blocks = place.blocks(A)
    assert blocks.dtype == big.newbyteorder("=") and blocks.dtype.isnative and blocks.indices.dtype.isnative
    assert_values(blocks.dense, s.dense.astype(blocks.dtype))
    x = np.arange(6).astype(big)
    y = A @ x
    assert y.dtype.isnative and y.dtype == blocks.dtype
    assert_values(y, s.dense.astype(blocks.dtype) @ x.astype(blocks.dtype))
    assert_values(place.dense(place.bsr(s) @ np.arange(6).astype(big)), s.dense @ np.arange(6))
    assert_values(place.blocks(bg.bsr_array(s.dense.astype(big), blocksize=(2, 3))).dense, s.dense)
    assert_values(place.dense(A + s.dense.astype(big)), 2 * s.dense)


@each_place
@pytest.mark.parametrize("index", ["i1", "u1", "i2", "u2", "u4", "u8", "i4", "i8"])
def test_any_integer_dtype_serves_as_index(place: Place, index: str) -> None:
    s = sample()
    A = built(place, indices=s.indices.astype(index), indptr=s.indptr.astype(index))
    assert_values(place.blocks(A).dense, s.dense)
    B = elements(place, s.data, s.block_rows.astype(index), s.indices.astype(index), shape=s.shape)
    assert_values(place.blocks(B).dense, s.dense)
    C = elements(place, [3.0], np.array([3], index), np.array([5], index), shape=s.shape)
    assert float(place.number(C.sum())) == 3.0


@each_place
@pytest.mark.parametrize("wide", [np.int64, np.int32])
def test_index_arrays_of_two_widths_become_one(place: Place, wide: Any) -> None:
    s = sample()
    other = np.int32 if wide is np.int64 else np.int64
    A = built(place, indices=s.indices.astype(wide), indptr=s.indptr.astype(other))
    assert place.blocks(A).indices.dtype == np.int64
    assert_values(place.dense(A @ ones(place, 6)), s.dense.sum(axis=1))
    assert place.blocks(built(place, bg.bsr_matrix, indices=s.indices.astype(wide))).indices.dtype == np.int32


def test_read_only_arrays_serve_as_operands_on_the_host() -> None:
    s = sample()
    place = Place("cpu")
    arrays = tuple(read_only(x.copy()) for x in (s.data, s.indices, s.indptr))
    A = bg.bsr_array(arrays, shape=s.shape)
    X = read_only(np.arange(12.0).reshape(6, 2))
    assert_values(A @ X, s.dense @ X)
    assert_values(A @ X[:, 0], s.dense @ X[:, 0])
    assert_values(X.T @ A.T, X.T @ s.dense.T)
    assert_values(A.toarray(), s.dense)
    assert_values(place.blocks(A.T).dense, s.dense.T)
    assert_values(place.blocks(A + A).dense, 2 * s.dense)
    assert_values(place.blocks(A @ A.T).dense, s.dense @ s.dense.T)
    assert_values(A.tocsr().toarray(), s.dense)
    assert_values(A.sum(axis=0), s.dense.sum(axis=0))
    assert_values(A[:2].toarray(), s.dense[:2])
    assert_values(A.max(axis=1).toarray(), s.dense.max(axis=1))
    assert_values(bg.bsr_array(read_only(s.dense.copy()), blocksize=(2, 3)).toarray(), s.dense)


@each_place
@pytest.mark.parametrize("flavour", [bg.bsr_array, bg.bsr_matrix])
@pytest.mark.parametrize("blocksize", [(1, 1), (2, 3)])
@pytest.mark.parametrize("shape", [(0, 0), (0, 6), (4, 0), (4, 6)])
def test_a_matrix_without_elements_can_do_everything(
    place: Place, shape: tuple[int, int], blocksize: tuple[int, int], flavour: type
) -> None:
    M, N = shape
    A = flavour(shape, blocksize=blocksize, device=place.backend.name)
    zero = np.zeros(shape)
    matrix = flavour is bg.bsr_matrix
    assert A.nnz == 0 and A.dtype == np.float64 and A.density == 0
    assert_values(place.dense(A.toarray()), zero)
    for result, expected in (
        (A.T, zero.T),
        (A + A, zero),
        (A - A, zero),
        (A.multiply(A), zero),
        (A * 2, zero),
        (A @ A.T, zero @ zero.T),
        (A.T @ A, zero.T @ zero),
        (A.copy(), zero),
        (abs(A), zero),
        (A.power(2), zero),
        (A.astype("float32"), zero),
        (A.tobsr((1, 1)), zero),
        (A[:0], zero[:0]),
        (A[:, :0], zero[:, :0]),
        (A.sin(), zero),
        (flavour(place.put(zero)), zero),
        (flavour(place.put(zero), blocksize=blocksize), zero),
    ):
        assert_values(place.blocks(result, flavour).dense, expected)
    for width in (0, 3):
        assert_values(place.dense(A @ ones(place, N, width)), np.zeros((M, width)))
        assert_values(place.dense(ones(place, width, M) @ A), np.zeros((width, N)))
    assert_values(place.dense(A @ ones(place, N)), np.zeros(M))
    out = ones(place, M, 2)
    bg.matmul(A, ones(place, N, 2), out=out, beta=3)
    assert_values(place.dense(out), np.full((M, 2), 3.0))
    bg.matmul(A, ones(place, N, 2), out=out)
    assert_values(place.dense(out), np.zeros((M, 2)))
    assert float(place.number(A.sum())) == 0
    assert_values(place.dense(A.sum(axis=0), matrix=matrix).reshape(-1), np.zeros(N))
    assert_values(place.dense(A.sum(axis=1), matrix=matrix).reshape(-1), np.zeros(M))
    for format in ("csr", "coo", "csc"):
        S = place.foreign(A.asformat(format), format, flavour)
        assert S.nnz == 0 and S.shape == shape
    assert A.count_nonzero() == 0 and [len(x) for x in A.nonzero()] == [0, 0]
    assert_values(place.dense(A.diagonal()), np.zeros(min(shape)))
    A.sum_duplicates()
    A.sort_indices()
    A.eliminate_zeros()
    A.prune()
    A.check_format()
    place.blocks(A, flavour)


@each_place
def test_elements_without_entries_make_an_empty_matrix(place: Place) -> None:
    nothing = np.zeros(0)
    for values in (nothing, np.zeros((0, 2, 3))):
        A = elements(place, values, nothing.astype(int), nothing.astype(int), shape=(4, 6))
        assert A.nnz == 0 and A.shape == (4, 6)
        place.blocks(A)


@each_place
def test_an_unequal_shape_is_simply_not_equal(place: Place) -> None:
    A = matrix(place)
    assert (A == A.T) is False and (A != A.T) is True


@each_place
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_a_negative_alpha_wraps_unsigned_results(place: Place, dtype: str) -> None:
    A = matrix(place, dtype)
    y = bg.matmul(A, ones(place, 6, dtype=dtype), alpha=-1)
    expected = -(sample(dtype).dense @ np.ones(6, dtype))
    assert_values(place.dense(y), expected)
    out = ones(place, 4, dtype=dtype)
    bg.matmul(A, ones(place, 6, dtype=dtype), out=out, alpha=0, beta=-2)
    assert_values(place.dense(out), -np.full(4, 2, dtype))


@each_place
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_an_alpha_beyond_the_dtype_is_refused_or_wraps(place: Place, dtype: str) -> None:
    A = matrix(place, dtype)
    try:
        y = bg.matmul(A, ones(place, 6, dtype=dtype), alpha=2**70 + 3)
    except (TypeError, ValueError) as refused:
        assert "alpha" in str(refused)
    else:
        assert_values(place.dense(y), 3 * (sample(dtype).dense @ np.ones(6, dtype)))


@each_place
def test_an_out_of_another_dtype_that_holds_the_product_is_filled(place: Place) -> None:
    s = sample()
    for dtype in (np.float32, np.complex64, np.float16):
        out = ones(place, 4, dtype=dtype)
        assert bg.matmul(place.bsr(s), ones(place, 6), out=out) is out
        assert_values(place.dense(out), s.dense.sum(axis=1))
