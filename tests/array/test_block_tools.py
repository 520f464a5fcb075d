"""Diagonal blocks, their inverses, factors of block rows and columns, norms: in every backend against dense NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as spla
from hypothesis import assume, given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm.dtypes import BOOL, HALF_DTYPES, result_dtype

from ..strategies import (
    DTYPES,
    FLAVOURS,
    INTEGERS,
    Operand,
    Place,
    Sample,
    assert_values,
    each_place,
    eps,
    flavours,
    magnitude,
    operands,
    quietly,
    random_values,
    rounding,
    samples,
    spreads_for,
    wide,
)

pytestmark = pytest.mark.fake

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_flavour = pytest.mark.parametrize("flavour", FLAVOURS)
HERE = Place("cpu")
LONG_DOUBLES = ("g", "G")
sides = st.one_of(st.integers(1, 4), st.integers(1, 17))


def oriented(place: Place, a: Sample, flavour: type, turned: bool) -> tuple[Any, Sample]:
    """A matrix here, and what it holds; `turned`: as a transpose that is not built."""
    if not turned:
        return place.bsr(a, flavour), a
    T = place.bsr(a, flavour).T
    assert T._origin is not None
    return T, a.T


def unchanged(A: Any, before: Any) -> None:
    """A still has its arrays, or none if it had none."""
    assert (A._origin is None) == (before is None)
    if before is None:
        return
    assert A._origin.blocks.data is before


def sample_of(blocks: Any, rows: Any, cols: Any, grid: tuple[int, int], index: Any = np.int32) -> Sample:
    """Blocks at places, in the order given within each row."""
    blocks, rows, cols = np.asarray(blocks), np.asarray(rows, np.int64), np.asarray(cols, np.int64)
    order = np.argsort(rows, kind="stable")
    indptr = np.searchsorted(rows[order], np.arange(grid[0] + 1)).astype(index)
    R, C = blocks.shape[1:]
    return Sample(blocks[order], cols[order].astype(index), indptr, (grid[0] * R, grid[1] * C))


def invertible(
    rng: np.random.Generator, grid: tuple[int, int], R: int, dtype: np.dtype[Any], *, doubled: bool, index: Any
) -> Sample:
    """Well conditioned blocks on the whole diagonal, each in two parts if `doubled`, others between, unsorted."""
    n = min(grid)
    if dtype == BOOL or dtype.kind == "u":
        # a permutation, in two parts that do not meet
        diagonal = np.array([np.eye(R)[rng.permutation(R)] for _ in range(n)]).reshape(n, R, R).astype(dtype)
        part = diagonal * (rng.random((n, R, 1)) < 0.5)
    else:
        diagonal = random_values(rng, (n, R, R), dtype)
        diagonal = (diagonal.astype(wide(dtype)) + 4 * R * np.eye(R)).astype(dtype)
        part = random_values(rng, (n, R, R), dtype)
    others = [(i, j) for i in range(grid[0]) for j in range(grid[1]) if i != j and rng.random() < 0.4]
    places = [(i, i) for i in range(n)] * (1 + doubled) + others
    rest = random_values(rng, (len(others), R, R), dtype)
    split = (diagonal ^ part) if dtype == BOOL else (diagonal - part).astype(dtype)
    blocks = np.concatenate([*((part, split) if doubled else (diagonal,)), rest])
    order = rng.permutation(len(places))
    rows, cols = (np.array([p[k] for p in places], np.int64)[order] for k in (0, 1))
    return sample_of(blocks[order].astype(dtype), rows, cols, grid, index)


def diagonal_of(dense: np.ndarray[Any, Any], R: int) -> np.ndarray[Any, Any]:
    n = min(dense.shape) // R
    blocks = [dense[i * R : (i + 1) * R, i * R : (i + 1) * R] for i in range(n)]
    return np.array(blocks, dense.dtype).reshape(n, R, R)


# ------------------------------------------------------------------------------------------- diagonal
@each_place
@given(data=st.data())
def test_block_diagonal_is_that_of_the_dense_matrix(place: Place, data: st.DataObject) -> None:
    R = data.draw(sides)
    a = data.draw(samples(blocksize=(R, R), spreads=("small", "wide", "special")))
    turned = data.draw(st.booleans())
    A, a = oriented(place, a, data.draw(flavours), turned)
    kept = A._origin.blocks.data if turned else None
    with quietly():
        D = A.block_diagonal()
        bound = diagonal_of(np.broadcast_to(a.bound, a.shape), R)
    assert D.shape == (min(a.shape) // R, R, R) and D.dtype == a.dtype and D.flags.c_contiguous
    assert_values(place.dense(D), diagonal_of(a.dense, R).astype(wide(a.dtype)), bound)
    unchanged(A, kept)


@each_place
@each_dtype
def test_block_diagonal_adds_up_duplicates_and_is_zero_where_nothing_is_stored(
    place: Place, dtype: np.dtype[Any]
) -> None:
    blocks = np.array([[[1, 0], [1, 0]], [[1, 1], [0, 0]], [[1, 1], [1, 1]]]).astype(dtype)
    a = sample_of(blocks, [2, 2, 0], [2, 2, 1], (3, 4), np.int64)
    D = place.dense(place.bsr(a).block_diagonal())
    twice = 1 if dtype == BOOL else 2
    expected = np.array([np.zeros((2, 2)), np.zeros((2, 2)), [[twice, 1], [1, 0]]]).astype(dtype)
    assert D.dtype == dtype and D.tolist() == expected.tolist()


@each_place
def test_block_diagonal_is_a_copy(place: Place) -> None:
    A = place.bsr(sample_of(np.ones((2, 2, 2)), [0, 1], [0, 1], (2, 2)))
    D = A.block_diagonal()
    D[...] = 7
    assert place.dense(A.data).max() == 1


@each_place
@pytest.mark.parametrize("grid", [(0, 0), (0, 3), (3, 0), (2, 3)])
def test_matrices_without_blocks_have_tools_too(place: Place, grid: tuple[int, int]) -> None:
    a = sample_of(np.zeros((0, 2, 2)), [], [], grid)
    n = min(grid)
    for A, shape in ((place.bsr(a), a.shape), (place.bsr(a).T, a.shape[::-1])):
        assert A.block_diagonal().shape == (n, 2, 2)
        for k in range(3):
            rows, cols = (place.put(np.ones((side // 2, 2, 2)[: k + 1])) for side in shape)
            assert A.scale_block_rows(rows).shape == A.scale_block_cols(cols).shape == shape
        if n == 0:
            inverse = A.inverse_block_diagonal()
            assert inverse.shape == shape[::-1] and place.blocks(inverse).data.shape == (0, 2, 2)
        else:
            with pytest.raises(np.linalg.LinAlgError, match="diagonal block 0 is missing"):
                A.inverse_block_diagonal()


@each_place
@pytest.mark.parametrize("name", ["block_diagonal", "inverse_block_diagonal"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_diagonal_of_rectangular_blocks_is_refused(place: Place, name: str, turned: bool) -> None:
    a = sample_of(np.ones((1, 2, 3)), [0], [0], (3, 2))
    A, _ = oriented(place, a, bg.bsr_array, turned)
    wanted = r"\(3, 2\)" if turned else r"\(2, 3\)"
    with pytest.raises(ValueError, match=rf"^{name}: wanted square blocks, got blocksize={wanted}$"):
        getattr(A, name)()


# -------------------------------------------------------------------------------------------- inverse
@each_place
@given(data=st.data())
def test_inverse_block_diagonal_is_numpys(place: Place, data: st.DataObject) -> None:
    R = data.draw(sides)
    grid = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    dtype, flavour = data.draw(st.sampled_from(DTYPES)), data.draw(flavours)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    index = data.draw(st.sampled_from((np.int32, np.int64)))
    a = invertible(rng, grid, R, dtype, doubled=data.draw(st.booleans()), index=index)
    A, a = oriented(place, a, flavour, data.draw(st.booleans()))
    inverse = A.inverse_block_diagonal()
    result = place.blocks(inverse, flavour)
    delivered = np.dtype(np.float64) if dtype.kind in "biu" else dtype
    n = min(grid)
    assert result.shape == a.shape[::-1] and result.dtype == delivered and result.is_canonical
    assert result.indices.dtype == A.indices.dtype and result.indices.tolist() == list(range(n))
    assert result.indptr.tolist() == [min(i, n) for i in range(a.shape[1] // R + 1)]
    diagonal = diagonal_of(a.dense.astype(dtype).astype(np.complex128), R)
    expected = np.linalg.inv(diagonal)
    # condition numbers stay below 10; both ways of rounding the inner sums count
    bound = (100 * R * eps(np.dtype(np.float32) if dtype in HALF_DTYPES else delivered) + 2 * eps(delivered)) / R
    assert_values(result.data, expected if dtype.kind == "c" else expected.real, bound if R > 1 else 2 * bound)


@each_place
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_halves_are_inverted_in_float32_and_rounded_once(place: Place, dtype: np.dtype[Any]) -> None:
    block = np.array([[1, 0.33, 0.1], [0.7, 1, 0.5], [0.2, 0.9, 1]]).astype(dtype)
    result = place.blocks(place.bsr(sample_of(block[None], [0], [0], (1, 1))).inverse_block_diagonal())
    exact = np.linalg.inv(block.astype(np.float64))
    assert result.dtype == dtype
    assert (np.abs(result.data[0].astype(np.float64) - exact) <= 0.51 * eps(dtype) * np.abs(exact)).all()


@each_place
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != BOOL], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_the_first_diagonal_block_without_an_inverse_is_told(place: Place, dtype: np.dtype[Any], turned: bool) -> None:
    good, bad = np.array([[1, 2], [3, 1]]), np.array([[1, 2], [2, 4]])
    rows = [3, 1, 0, 0, 2, 4]
    blocks = np.array([bad, good, good, good, good, good]).astype(dtype)
    A, _ = oriented(place, sample_of(blocks, rows, [3, 1, 0, 2, 1, 4], (5, 5)), bg.bsr_array, turned)
    with pytest.raises(np.linalg.LinAlgError) as told:
        A.inverse_block_diagonal()
    assert str(told.value) == "inverse_block_diagonal: diagonal block 2 is missing: no block is stored there"
    A, _ = oriented(place, sample_of(blocks, rows, [3, 1, 0, 2, 2, 4], (5, 5)), bg.bsr_array, turned)
    with pytest.raises(np.linalg.LinAlgError) as told:
        A.inverse_block_diagonal()
    assert str(told.value) == "inverse_block_diagonal: diagonal block 3 is singular"


@each_place
def test_a_stored_block_of_zeros_is_singular_and_duplicates_may_make_one(place: Place) -> None:
    zeros = sample_of(np.zeros((1, 2, 2)), [0], [0], (1, 1))
    parts = sample_of(np.array([np.eye(2), -np.eye(2)]), [0, 0], [0, 0], (1, 1))
    for a in (zeros, parts):
        with pytest.raises(np.linalg.LinAlgError, match=r"diagonal block 0 is singular$"):
            place.bsr(a).inverse_block_diagonal()
    falses = sample_of(np.array([[[True, True], [True, True]]]), [0], [0], (1, 1))
    with pytest.raises(np.linalg.LinAlgError, match=r"diagonal block 0 is singular$"):
        place.bsr(falses).inverse_block_diagonal()


@each_place
@pytest.mark.parametrize(("dtype", "tiny"), [("float32", 1e-40), ("float64", 1e-310)])
def test_an_inverse_that_is_not_finite_is_told(place: Place, dtype: str, tiny: float) -> None:
    a = sample_of(np.array([[[2.0]], [[tiny]]], dtype), [0, 1], [0, 1], (2, 2))
    # a card may take a denormal for zero, and a pivot of zero for singular: both are told
    with pytest.raises(np.linalg.LinAlgError, match=rf"diagonal block 1 is singular( in {dtype}: its inverse is not)?"):
        place.bsr(a).inverse_block_diagonal()


@each_place
def test_nan_in_a_block_stays_in_its_inverse(place: Place) -> None:
    a = sample_of(np.array([[[np.nan, 1], [1, 2]], 2 * np.eye(2)]), [0, 1], [0, 1], (2, 2))
    inverse = place.blocks(place.bsr(a).inverse_block_diagonal()).data
    assert np.isnan(inverse[0]).any() and (inverse[1] == np.eye(2) / 2).all()


@pytest.mark.parametrize("char", LONG_DOUBLES)
def test_long_double_has_a_diagonal_and_no_inverse(char: str) -> None:
    A = bg.bsr_array(np.eye(4, dtype=char), blocksize=(2, 2))
    assert A.block_diagonal().dtype == np.dtype(char)
    with pytest.raises(TypeError, match=r"^inverse_block_diagonal: \w+ cannot be inverted; .*astype\('float64'\)$"):
        A.inverse_block_diagonal()


# -------------------------------------------------------------------------------------------- scaling
def spread_factor(D: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    """D of any form as a dense block-diagonal matrix."""
    if D.ndim < 3:
        values = D if D.ndim == 2 else np.broadcast_to(D[:, None], (len(D), length))
        out = np.zeros((values.size,) * 2, D.dtype)
        np.fill_diagonal(out, values.reshape(-1))
        return out
    out = np.zeros((len(D) * length,) * 2, D.dtype)
    for i, block in enumerate(D):
        out[i * length : (i + 1) * length, i * length : (i + 1) * length] = block
    return out


@st.composite
def scalings(draw: st.DrawFn) -> tuple[Sample, Operand, bool, bool]:
    """A matrix, D, whether it scales block rows, and whether the matrix is a transpose that is not built."""
    a_dtype, d_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    spreads = spreads_for(a_dtype, d_dtype)
    a = draw(samples(dtypes=(a_dtype,), spreads=spreads))
    rows, turned = draw(st.booleans()), draw(st.booleans())
    side = int(rows == turned)
    n, length = a.shape[side] // a.blocksize[side], a.blocksize[side]
    shape = (n, length, length)[: draw(st.integers(1, 3))]
    return a, draw(operands(shape, dtypes=(d_dtype,), spreads=spreads)), rows, turned


@each_place
@given(case=scalings(), flavour=flavours)
def test_scaling_is_a_product_with_a_block_diagonal_matrix(
    place: Place, case: tuple[Sample, Operand, bool, bool], flavour: type
) -> None:
    stored, factor, rows, turned = case
    A, a = oriented(place, stored, flavour, turned)
    kept = A._origin.blocks.data if turned else None
    with quietly():
        scaled = (A.scale_block_rows if rows else A.scale_block_cols)(place.operand(factor))
    assert (scaled._origin is not None) == turned
    unchanged(A, kept)
    dtype = result_dtype(a.dtype, factor.dtype)
    assert scaled.shape == a.shape and scaled.blocksize == a.blocksize and scaled.dtype == dtype
    result = place.blocks(scaled, flavour)
    if a.dtype.kind not in "biu" or dtype == a.dtype:  # otherwise duplicates were added up
        assert result.indices.tolist() == a.indices.tolist() and result.indptr.tolist() == a.indptr.tolist()
    assert result.indices.dtype == A.indices.dtype
    length = a.blocksize[0 if rows else 1]
    D = spread_factor(factor.values, length)
    dense, wide_D = a.dense.astype(wide(dtype)), D.astype(wide(dtype))
    with quietly():
        expected = wide_D @ dense if rows else dense @ wide_D
        size = (
            (magnitude(D) @ a.weight, magnitude(D) @ a.bound)
            if rows
            else (a.weight @ magnitude(D), a.bound @ magnitude(D))
        )
        actual = result.dense.astype(dtype) if dtype.kind in "biu" else result.dense
        assert_values(actual, expected, 4 * rounding(dtype, size[0], length + 8) + size[1] if eps(dtype) else 0.0)


@each_place
@each_flavour
def test_a_scaled_matrix_has_arrays_of_its_own(place: Place, flavour: type) -> None:
    A = place.bsr(sample_of(np.ones((2, 2, 2)), [0, 1], [1, 0], (2, 2)), flavour)
    for D in (np.ones(2), np.ones((2, 2)), np.tile(np.eye(2), (2, 1, 1))):
        for B in (A.scale_block_rows(place.put(D)), A.scale_block_cols(place.put(D))):
            B.data[...] = 7
            B.indices[...] = 0
            assert place.dense(A.data).max() == 1 and place.dense(A.indices).tolist() == [1, 0]


@each_place
def test_scaling_by_the_inverse_of_the_diagonal_leaves_the_identity_there(place: Place) -> None:
    rng = np.random.default_rng(3)
    a = invertible(rng, (4, 4), 3, np.dtype(np.float64), doubled=True, index=np.int32)
    A = place.bsr(a)
    inverse = A.inverse_block_diagonal().data
    for B in (A.scale_block_rows(inverse), A.scale_block_cols(inverse)):
        np.testing.assert_allclose(place.dense(B.block_diagonal()), np.tile(np.eye(3), (4, 1, 1)), atol=1e-14)


@each_place
def test_small_integers_wrap_before_they_meet_a_wider_factor(place: Place) -> None:
    a = sample_of(np.full((2, 1, 1), 100, np.int8), [0, 0], [0, 0], (1, 1))
    twice = sample_of(np.ones((2, 1, 1), np.bool_), [0, 0], [0, 0], (1, 1))
    for D in (np.full(1, 3, np.int32), np.full((1, 1, 1), 3, np.int32)):
        assert place.dense(place.bsr(a).scale_block_rows(place.put(D)).toarray()).tolist() == [[-168]]
        assert place.dense(place.bsr(twice).scale_block_cols(place.put(D)).toarray()).tolist() == [[3]]


def test_what_numpy_takes_for_an_array_is_a_factor_on_the_host() -> None:
    A = bg.bsr_array(np.ones((4, 4)), blocksize=(2, 2))
    expected = np.repeat([1.0, 2, 3, 4], 4).reshape(4, 4)
    for D in ([[1, 2], [3, 4]], np.matrix([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]], ">f8")):
        B = A.scale_block_rows(D)
        assert type(B.data) is np.ndarray and B.dtype == np.float64 and (B.toarray() == expected).all()
    assert A.scale_block_rows(np.ones(2, "g")).dtype == np.dtype("g")
    assert (A.scale_block_cols(np.ones((2, 2, 2), "G")).toarray() == 2).all()


@each_place
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("rows", (3,), r"D: wanted shape \(2,\), \(2, 4\) or \(2, 4, 4\) for 2 block rows of 4 rows, got \(3,\)"),
        ("cols", (2,), r"D: wanted shape \(3,\), \(3, 5\) or \(3, 5, 5\) for 3 block columns of 5 columns, got \(2,\)"),
        ("rows", (8,), r"got \(8,\)"),
        ("rows", (2, 5), r"got \(2, 5\)"),
        ("cols", (3, 4), r"got \(3, 4\)"),
        ("rows", (2, 4, 5), r"got \(2, 4, 5\)"),
        ("cols", (3, 4, 4), r"got \(3, 4, 4\)"),
        ("rows", (), r"got \(\)"),
        ("rows", (1, 2, 4, 4), r"got \(1, 2, 4, 4\)"),
    ],
)
def test_a_factor_of_another_shape_is_refused(
    place: Place, turned: bool, name: str, shape: tuple[int, ...], told: str
) -> None:
    block = (5, 4) if turned else (4, 5)
    grid = (3, 2) if turned else (2, 3)
    A, _ = oriented(place, sample_of(np.ones((1, *block)), [0], [0], grid), bg.bsr_array, turned)
    with pytest.raises(ValueError, match=told):
        getattr(A, f"scale_block_{name}")(place.put(np.ones(shape)))


@each_place
def test_a_factor_that_is_none_is_refused(place: Place) -> None:
    A = place.bsr(sample_of(np.ones((2, 2, 2)), [0, 1], [1, 0], (2, 2)))
    for D in (A, A.tocsr()):
        with pytest.raises(
            TypeError, match=rf"^D: wanted a dense array on '{place.backend.name}', got {type(D).__name__}$"
        ):
            A.scale_block_rows(D)
    with pytest.raises(TypeError, match=r"^D: wanted a dense array on|^D: does not support dtype object"):
        A.scale_block_cols(object())
    with pytest.raises((TypeError, ValueError), match=r"^D: wanted "):
        A.scale_block_cols(2.0)


def test_a_factor_of_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^D: does not support dtype <U1; wanted one of bool, int8"):
        bg.bsr_array(np.eye(2)).scale_block_rows(["a", "b"])


def test_a_factor_that_lives_elsewhere_is_refused() -> None:
    fake = Place("cuda")
    a = sample_of(np.ones((1, 2, 2)), [0], [0], (1, 1))
    for place, D in ((HERE, fake.put(np.ones(1))), (fake, np.ones(1)), (fake, [1.0]), (fake, np.float64(1))):
        with pytest.raises(
            TypeError, match=r"^D: a (\w+ )?\w+ cannot meet a matrix on '\w+': nothing is moved silently"
        ):
            place.bsr(a).scale_block_rows(D)


def test_indices_that_a_user_made_wrong_are_told_on_the_host() -> None:
    a = sample_of(np.ones((2, 2, 2)), [0, 1], [1, 0], (2, 2))
    for call in (
        lambda A: A.block_diagonal(),
        lambda A: A.inverse_block_diagonal(),
        lambda A: A.scale_block_rows(np.ones(2)),
        lambda A: A.scale_block_cols(np.ones((2, 2, 2))),
        lambda A: bg.norm(A),
        lambda A: bg.norm(A, 1, axis=0),
    ):
        A = HERE.bsr(a)
        A.indices[0] = 9
        with pytest.raises(ValueError, match="column index values must be < 2"):
            call(A)


# ---------------------------------------------------------------------------------------------- norms
MATRIX_ORDERS = (None, "fro", "f", 1, -1, np.inf, -np.inf)
LINE_ORDERS = (None, 0, 1, 2, 3, 0.5, np.float32(1.5), np.inf, -np.inf)


def expected_norm(dense: np.ndarray[Any, Any], ord: Any, axis: Any) -> Any:
    """What NumPy makes of the dense values, in float64 for roots; integers are summed in 64 bits."""
    lines = axis if isinstance(axis, int) else None
    size = magnitude(dense)
    if lines is None and ord in (None, "fro", "f"):
        return np.sqrt((size**2).sum())
    sums = (
        np.abs(dense.astype(np.uint64 if dense.dtype.kind == "u" else np.int64)) if dense.dtype.kind in "biu" else size
    )
    if lines is None:
        row, col = axis or (0, 1)
        sums = sums.sum(axis=row if ord in (1, -1) else col)
        return sums.max() if ord > 0 else sums.min()
    if ord == 0:
        return (dense != 0).sum(axis=lines)
    if ord == 1:
        return sums.sum(axis=lines)
    if ord is not None and math.isinf(ord):
        own = np.abs(dense)
        return own.max(axis=lines) if ord > 0 else own.min(axis=lines)
    p = 2.0 if ord is None else float(ord)
    return (size**p).sum(axis=lines) ** (1 / p)


def norm_dtype(dtype: np.dtype[Any], ord: Any, axis: Any) -> np.dtype[Any]:
    """scipy's: integers add up in 64 bits, roots are float64, extremes of lines are as they were."""
    real = np.zeros((), dtype).real.dtype if dtype.kind == "c" else dtype
    lines = isinstance(axis, int)
    if lines and ord == 0:
        return np.dtype(np.int64)
    if real.kind not in "biu" or (lines and ord is not None and math.isinf(ord)):
        return real
    if ord == 1 or (not lines and ord in (-1, np.inf, -np.inf)):
        return np.dtype(np.uint64 if real.kind == "u" else np.int64)
    return np.dtype(np.float64)


SCIPY = tuple(int(n) for n in scipy.__version__.split(".")[:2])


def as_number_or_vector(place: Place, x: Any, axis: Any) -> np.ndarray[Any, Any]:
    return place.dense(x) if isinstance(axis, int) else place.number(x)


@each_place
@given(data=st.data())
def test_norms_are_those_of_the_dense_matrix(place: Place, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from((None, 0, 1, -1, -2, (0, 1), (1, 0), (-1, 0))))
    lines = isinstance(axis, int)
    ord = data.draw(st.sampled_from(LINE_ORDERS if lines else MATRIX_ORDERS))
    a = data.draw(samples(spreads=("small", "wide", "special")))
    turned = data.draw(st.booleans())
    A, a = oriented(place, a, data.draw(flavours), turned)
    kept = A._origin.blocks.data if turned else None
    if lines:
        plain: Any = axis % 2
        assume(a.shape[plain] or ord is None or not math.isinf(ord))
    else:
        plain = None if axis is None else tuple(k % 2 for k in axis)
        assume(min(a.shape) or ord in (None, "fro", "f"))
    if ord in (0, 0.5):  # where a rounding of duplicates near zero may change anything
        assume(not a.bound.any())
    with quietly():
        result = bg.norm(A, ord, axis)
        expected = expected_norm(a.dense, ord, plain)
    unchanged(A, kept)
    assert result.dtype == norm_dtype(a.dtype, ord, axis)
    inner = eps(np.dtype(np.float32) if a.dtype in HALF_DTYPES else result.dtype)
    powers = 16 if lines and ord not in (None, 0, 1, 2) else 1
    tolerance = powers * (max(a.shape) + 16) * inner + 2 * eps(result.dtype)
    with quietly():
        # no norm changes by more than the sum of the changes of elements
        bound = tolerance * np.abs(expected) + a.bound[np.isfinite(a.bound)].sum() + 1e-37
        assert_values(as_number_or_vector(place, result, axis), expected, bound)


@each_place
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in HALF_DTYPES], ids=str)
@each_flavour
def test_norms_have_the_values_and_types_of_scipy(place: Place, dtype: np.dtype[Any], flavour: type) -> None:
    rng = np.random.default_rng(5)
    a = sample_of(random_values(rng, (6, 2, 3), dtype), [0, 0, 1, 2, 2, 2], [1, 0, 2, 2, 0, 1], (4, 3))
    A, S = place.bsr(a, flavour), a.scipy(flavour)
    host = flavour((a.data, a.indices, a.indptr), shape=a.shape)  # tested with a SciPy that adds up as we do
    for axis in (None, (1, 0), 0, 1):
        for ord in LINE_ORDERS if isinstance(axis, int) else MATRIX_ORDERS:
            ours, theirs = bg.norm(A, ord, axis), spla.norm(S, ord, axis)
            # A NumPy number promotes there, and SciPy 1.18 adds up in float64 and leaves some vectors as matrices.
            wanted = bg.norm(host, ord, axis).dtype if SCIPY >= (1, 18) else theirs.dtype
            assert ours.dtype == wanted or isinstance(ord, np.float32)
            assert not place.is_host or type(ours) is type(theirs) or SCIPY >= (1, 18)
            expected = np.asarray(theirs).reshape(-1) if isinstance(axis, int) else theirs
            np.testing.assert_allclose(as_number_or_vector(place, ours, axis), expected, rtol=1e-5)


@each_place
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_norms_of_halves_are_summed_in_float32_and_rounded_once(place: Place, dtype: np.dtype[Any]) -> None:
    A = place.bsr(sample_of(np.full((1, 1, 4096), 0.125).astype(dtype), [0], [0], (1, 1)))
    assert float(bg.norm(A)) == 8.0 and float(bg.norm(A, np.inf)) == 512.0
    assert bg.norm(A).dtype == bg.norm(A, 1).dtype == bg.norm(A, 2, axis=1).dtype == dtype
    assert place.dense(bg.norm(A, axis=1)).astype(float).tolist() == [8.0]
    large = place.bsr(sample_of(np.full((1, 2, 2), 1000).astype(dtype), [0], [0], (1, 1)))
    assert float(bg.norm(large)) == float(np.asarray(2000.0).astype(dtype))  # the squares do not overflow


@each_place
def test_norms_count_duplicates_summed_and_leave_the_matrix_as_it_is(place: Place) -> None:
    a = sample_of(np.array([[[3.0]], [[4.0]], [[-7.0]]]), [0, 0, 0], [1, 1, 0], (1, 2))
    A = place.bsr(a)
    assert float(bg.norm(A, 1)) == 7 and float(bg.norm(A, np.inf)) == 14 and len(A.indices) == 3
    assert float(bg.norm(A)) == pytest.approx(math.sqrt(98))
    assert place.dense(bg.norm(A, np.inf, axis=0)).tolist() == [7, 7]
    assert place.dense(bg.norm(A, 0, axis=1)).tolist() == [2]


@each_place
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_sums_and_roots_of_integers_do_not_wrap(place: Place, dtype: np.dtype[Any]) -> None:
    worst = np.iinfo(dtype).min if dtype.kind == "i" and dtype.itemsize < 8 else np.iinfo(dtype).max // 4
    A = place.bsr(sample_of(np.full((1, 1, 2), worst, dtype), [0], [0], (1, 1)))
    assert int(bg.norm(A, np.inf)) == 2 * abs(int(worst))
    assert float(bg.norm(A)) == pytest.approx(math.sqrt(2) * abs(int(worst)))
    assert float(bg.norm(A, 2, axis=1)[0]) == pytest.approx(math.sqrt(2) * abs(int(worst)))


@each_place
def test_norms_of_a_wide_matrix_never_make_it_dense(place: Place) -> None:
    n = 100_000
    a = sample_of(np.array([[[3.0, 0]], [[0, 4.0]]]), [0, n - 1], [n - 1, 0], (n, n))  # 160 GB if it were dense
    A = place.bsr(a)
    assert [float(bg.norm(A, ord)) for ord in (None, 1, np.inf, -1, -np.inf)] == [5, 4, 4, 0, 0]
    assert float(bg.norm(A, axis=0).max()) == 4 and float(bg.norm(A, np.inf, axis=1).sum()) == 7
    assert float(bg.norm(A.T, 1)) == 4


@each_place
def test_empty_matrices_have_norms_where_scipy_has(place: Place) -> None:
    for grid in ((0, 0), (0, 3), (3, 0)):
        a = sample_of(np.zeros((0, 2, 2)), [], [], grid)
        A, S = place.bsr(a), sp.csr_array(a.shape)
        for axis in (None, 0, 1):
            for ord in LINE_ORDERS if isinstance(axis, int) else MATRIX_ORDERS:
                try:
                    theirs = spla.norm(S, ord, axis)
                except ValueError:
                    with pytest.raises(ValueError, match=r"^A: .* (of|in) shape"):
                        bg.norm(A, ord, axis)
                else:
                    ours = as_number_or_vector(place, bg.norm(A, ord, axis), axis)
                    assert ours.tolist() == np.asarray(theirs).tolist()


@pytest.mark.parametrize("char", LONG_DOUBLES)
def test_norms_of_long_doubles_are_long(char: str) -> None:
    A = bg.bsr_array(np.array([[3, 4]], char), blocksize=(1, 2))
    for ord in MATRIX_ORDERS:
        assert type(bg.norm(A, ord)) is np.longdouble
    assert bg.norm(A) == 5 and bg.norm(A, axis=1).dtype == np.dtype("g")


@pytest.mark.parametrize(
    ("ord", "axis", "error", "told"),
    [
        (2, None, NotImplementedError, r"^ord: 2 of a matrix needs its singular values; scipy.sparse.linalg.svds\(A"),
        (-2, (0, 1), NotImplementedError, r"^ord: -2 of a matrix needs"),
        ("max", None, ValueError, r"^ord: wanted None, 'fro', 1, -1, inf or -inf for a matrix, got 'max'$"),
        (0, None, ValueError, r"for a matrix, got 0$"),
        (3, None, ValueError, r"for a matrix, got 3$"),
        (np.nan, None, ValueError, r"for a matrix, got nan$"),
        ([1], None, ValueError, r"for a matrix, got \[1\]$"),
        ("fro", 0, ValueError, r"^ord: wanted None, 0, a number > 0, inf or -inf for rows or columns, got 'fro'$"),
        (-1, 1, ValueError, r"for rows or columns, got -1$"),
        (np.nan, 1, ValueError, r"for rows or columns, got nan$"),
        (1j, 1, ValueError, r"for rows or columns, got 1j$"),
        (1, 2, ValueError, r"^axis: wanted None, one axis or two, each -2 .. 1, got 2$"),
        (1, -3, ValueError, r"got -3$"),
        (1, (0, 2), ValueError, r"got \(0, 2\)$"),
        (1, (), ValueError, r"got \(\)$"),
        (1, (0, 1, 0), ValueError, r"got \(0, 1, 0\)$"),
        (1, (0, -2), ValueError, r"^axis: the same axis twice in \(0, -2\)$"),
        (1, 1.0, TypeError, r"^axis: wanted None, an integer or a tuple of integers, got 1.0$"),
        (1, "x", TypeError, r"got 'x'$"),
        (1, (0, None), TypeError, r"got \(0, None\)$"),
        (1, True, TypeError, r"got True$"),
    ],
)
def test_norms_that_do_not_exist_are_refused(ord: Any, axis: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        bg.norm(bg.bsr_array(np.eye(4), blocksize=(2, 2)), ord, axis)


@pytest.mark.parametrize(
    ("A", "got"),
    [
        (np.eye(2), "ndarray; bsrgemm.bsr_array(A) makes one"),
        ([[1.0]], "list; bsrgemm.bsr_array(A) makes one"),
        (sp.bsr_array(np.eye(2)), "scipy bsr_array; bsrgemm.bsr_array(A) makes one"),
        (sp.csr_matrix(np.eye(2)), "csr_matrix; bsrgemm.bsr_array(A) makes one"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
def test_only_our_matrices_have_this_norm(A: Any, got: str) -> None:
    with pytest.raises(TypeError) as caught:
        bg.norm(A)
    assert str(caught.value) == f"A: wanted a bsr_array or bsr_matrix, got {got}"


# ------------------------------------------------------------------------------------------ together
def test_block_jacobi_saves_iterations_of_cg() -> None:
    rng = np.random.default_rng(0)
    n, R = 40, 3
    springs = rng.uniform(0.1, 10, n + 1)
    stiff = np.diag(springs[:-1] + springs[1:]) - np.diag(springs[1:-1], 1) - np.diag(springs[1:-1], -1)
    local = np.array([[4.0, 1, 0], [1, 3, 1], [0, 1, 30]])
    jump = scipy.linalg.block_diag(*(s * np.eye(R) for s in rng.uniform(1, 100, n)))
    A = bg.bsr_array(jump @ np.kron(stiff, local) @ jump, blocksize=(R, R))
    counts = []
    for M in (None, A.inverse_block_diagonal()):
        steps: list[Any] = []
        x, failed = spla.cg(A, np.ones(n * R), rtol=1e-8, maxiter=5000, M=M, callback=steps.append)
        assert failed == 0 and np.linalg.norm(A @ x - 1) < 1e-6
        counts.append(len(steps))
    assert counts[1] < counts[0] / 2
