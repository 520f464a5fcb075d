"""A transpose is not built until its arrays are asked for; no one can tell, but by the time and memory it takes."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bsrgemm as bg
from bsrgemm._products import host as products_host
from bsrgemm._products.call import ProductCall
from bsrgemm._products.engine import ENGINES
from bsrgemm._products.transposed import transposed_copy

from ..strategies import (
    FLAVOURS,
    Place,
    Sample,
    assert_values,
    check_product,
    each_place,
    flavours,
    operands,
    products,
    samples,
)

each_flavour = pytest.mark.parametrize("flavour", FLAVOURS)


def sample(dtype: Any = np.float64) -> Sample:
    """6 x 6 in blocks of 2 x 3: rows unsorted, a block twice, a block of zeros, block row 1 empty."""
    data = (np.arange(30).reshape(5, 2, 3) % 7 + 1).astype(dtype)
    data[3] = 0
    return Sample(data, np.array([1, 0, 1, 1, 0], np.int32), np.array([0, 3, 3, 5], np.int32), (6, 6))


def is_built(T: Any) -> bool:
    return "data" in T.__dict__


# ------------------------------------------------------------------------------------------- what it answers
@each_place
@given(a=samples(spreads=("small", "wide", "special")), flavour=flavours)
def test_a_transpose_describes_itself_without_being_built(place: Place, a: Sample, flavour: type) -> None:
    A = place.bsr(a, flavour)
    T = A.T
    assert type(T) is type(A)
    assert T.shape == a.shape[::-1] and T.blocksize == a.blocksize[::-1] and T.dtype == a.dtype
    assert T.nnz == A.nnz and T.density == A.density and T.device == A.device and T.has_sorted_indices
    assert repr(T) == repr(place.bsr(a.T, flavour))
    assert not is_built(T)
    built = place.blocks(T, flavour)
    assert is_built(T)
    np.testing.assert_array_equal(built.indices, a.T.indices)
    np.testing.assert_array_equal(built.indptr, a.T.indptr)
    np.testing.assert_array_equal(built.data.view(np.uint8), a.T.data.view(np.uint8))
    assert A.T.has_canonical_format == (len(np.unique(a.keys)) == len(a.keys))


@each_place
@given(case=products(first=False), flavour=flavours)
def test_products_of_a_transpose_are_right_from_both_sides(
    place: Place, case: tuple[Sample, Any], flavour: type
) -> None:
    a, x = case
    A = place.bsr(a, flavour)
    X = place.operand(x).T
    T = A.T
    check_product(place, T @ X, a.T, x.values.T)
    check_product(place, bg.matmul(T, X), a.T, x.values.T)
    check_product(place, (place.operand(x) @ A).T, a.T, x.values.T)
    check_product(place, bg.matmul(place.operand(x), T.T).T, a.T, x.values.T)
    assert not is_built(T)


@each_place
@given(data=st.data(), a=samples(), flavour=flavours)
def test_a_transpose_on_the_right_reads_the_matrix_itself(
    place: Place, data: st.DataObject, a: Sample, flavour: type
) -> None:
    x = data.draw(operands((3, a.shape[1]), dtypes=(a.dtype,), spreads=("small",)))
    T = place.bsr(a, flavour).T
    check_product(place, (place.operand(x) @ T).T, a, x.values.T)
    assert not is_built(T)


@each_place
@each_flavour
@pytest.mark.parametrize("dtype", ["float32", "complex64", "int8", "bfloat16"])
def test_the_conjugate_transpose_is_built_late_for_real_dtypes(place: Place, flavour: type, dtype: str) -> None:
    s = sample(dtype)
    if dtype == "complex64":
        s = replace(s, data=s.data * np.complex64(1 + 2j))
    A = place.bsr(s, flavour)
    for H in (A.H, A.getH()) if flavour is bg.bsr_matrix else (A.H,):
        assert not is_built(H)
        assert_values(place.blocks(H, flavour).dense, s.dense.conj().T)


# ---------------------------------------------------------------------------------------- what it does not do
@each_place
def test_products_neither_transpose_nor_copy_the_blocks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is handed the matrix itself, and whether its transpose is meant."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the blocks are transposed")

    seen = []
    engine = ENGINES.of(place.backend)
    multiply = engine.multiply_dense

    def spy(call: ProductCall) -> None:
        seen.append((call.matrix, call.transposed))
        if place.name != "cuda":  # its kernels may still need a copy
            multiply(call)

    monkeypatch.setattr(type(place.backend), "transpose", refuse)
    monkeypatch.setattr(engine, "multiply_dense", spy)
    monkeypatch.setattr(engine, "quick", lambda *args: None)
    A = place.bsr(sample())
    arrays = A.data, A.indices, A.indptr
    X = place.put(np.ones((6, 4)))
    T = A.T
    for product, transposed in (
        (lambda: A.T @ X, True),
        (lambda: T @ X, True),
        (lambda: A.T @ X[:, 0], True),
        (lambda: X.T @ A, True),
        (lambda: bg.matmul(X.T, A), True),
        (lambda: X.T @ A.T, False),
        (lambda: A.T.T @ X, False),
        (lambda: A @ X, False),
    ):
        product()
        used, flag = seen.pop()
        assert flag is transposed and not seen
        assert used.data is arrays[0] and used.indices is arrays[1] and used.indptr is arrays[2]
    A.T @ X
    assert seen.pop()[0] is A  # what it remembers serves the next transpose too


@each_place
def test_the_transpose_of_a_transpose_has_the_first_arrays(place: Place) -> None:
    A = place.bsr(sample())
    back = A.T.T
    assert back is not A and type(back) is type(A) and back.shape == A.shape
    assert back.data is A.data and back.indices is A.indices and back.indptr is A.indptr
    assert not back.has_canonical_format
    assert A.T.transpose(copy=True).data is not A.data
    A.sum_duplicates()
    assert A.T.T.has_canonical_format and A.T.has_canonical_format


@pytest.mark.parametrize(("block", "width"), [(1, 4), (3, 1), (3, 5), (16, 64), (64, 200)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int16"])
def test_a_transposed_product_on_the_host_needs_little_memory(
    block: int, width: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_host, "_LOOP_BYTES", 1 << 14)
    n = 960
    rng = np.random.default_rng(0)
    i, j = np.nonzero(rng.random((n // block, n // block)) < 0.3)
    A = bg.bsr_array((rng.integers(-3, 4, (len(i), block, block)).astype(dtype), (i, j)), shape=(n, n))
    X = rng.integers(-3, 4, (n, width)).astype(dtype)
    expected = A.toarray().T.astype(np.float64) @ X
    tracemalloc.start()
    try:
        result = A.T @ X
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(result, expected.astype(dtype))
    sums = 4 * n * width if dtype == "float16" else 0  # X and the result in float32
    panel = 4 * n * width + 4 * n * block + 3 * A.indices.nbytes
    assert peak <= result.nbytes + 2 * sums + panel + (1 << 17)
    if block > 1 and width < 10:
        assert peak < A.data.nbytes


def test_transposes_that_are_gone_leave_nothing_behind() -> None:
    A = bg.bsr_array(np.eye(4), blocksize=(2, 2))
    for _ in range(100):
        A.T @ np.ones(4)
    gc.collect()
    assert len(A._transposes) == 0


# ----------------------------------------------------------------------------- what happens to the first matrix
def _assign(A: Any, name: str, value: Any) -> None:
    setattr(A, name, value)


def _scale(A: Any) -> None:
    A *= 2


def _divide(A: Any) -> None:
    A /= 2


def _clear(A: Any) -> None:
    A[:2, :] = 0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "A *= 2": _scale,
    "A /= 2": _divide,
    "A[:2] = 0": _clear,
    "setdiag": lambda A: A.setdiag(9.0),
    "sort_indices": lambda A: A.sort_indices(),
    "sum_duplicates": lambda A: A.sum_duplicates(),
    "eliminate_zeros": lambda A: A.eliminate_zeros(),
    "abs": abs,
    "resize to less": lambda A: A.resize(2, 3),
    "resize to more": lambda A: A.resize(8, 9),
    "prune": lambda A: A.prune(),
    "check_format": lambda A: A.check_format(),
    "A.data = ...": lambda A: _assign(A, "data", A.data * 0),
    "A.indices = ...": lambda A: _assign(A, "indices", A.indices * 0),
    "A.indptr = ...": lambda A: _assign(A, "indptr", A.indptr * 0),
    "A.dtype = ...": lambda A: _assign(A, "dtype", np.int64),
    "A.T.T *= 2": lambda A: _scale(A.T.T),
    "A.T.T[:2] = 0": lambda A: _clear(A.T.T),
}


@each_place
@each_flavour
@pytest.mark.parametrize("s", [sample(), sample().merged()], ids=["duplicates", "canonical"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_by_methods_do_not_reach_a_transpose_taken_before(
    place: Place, flavour: type, change: str, s: Sample
) -> None:
    for look in (lambda T: T.toarray(), lambda T: T @ place.put(np.eye(6)), lambda T: T.T.toarray().T):
        A = place.bsr(s, flavour)
        T, again = A.T, A.T
        CHANGES[change](A)
        for _ in range(2):
            assert_values(place.dense(look(T)), s.dense.T)
        assert again.shape == (6, 6) and again.blocksize == (3, 2) and again.dtype == s.dtype
        assert_values(place.dense(place.put(np.eye(6)) @ again), s.dense.T)
        assert T.data is not again.data


def test_a_new_shape_of_a_matrix_does_not_reach_a_transpose_taken_before() -> None:
    A = bg.bsr_matrix(np.arange(12.0).reshape(3, 4))
    T = A.T
    A.shape = (2, 6)
    assert_values(np.asarray(T.toarray()), np.arange(12.0).reshape(3, 4).T)


@each_place
@each_flavour
@pytest.mark.parametrize(
    "change", [name for name in CHANGES if name not in ("A.T.T *= 2", "A.T.T[:2] = 0", "A.indptr = ...")]
)
def test_changes_of_a_transpose_do_not_reach_the_first_matrix(place: Place, flavour: type, change: str) -> None:
    s = sample()
    square = Sample(s.data[:, :, :2].copy(), s.indices, s.indptr, (6, 4))  # blocks 2 x 2: every change fits T too
    A, B = place.bsr(square, flavour), place.bsr(square.T, flavour)
    T = A.T
    if change == "resize to more":
        T.resize(6, 8)
        B.resize(6, 8)
    elif change == "resize to less":
        T.resize(2, 2)
        B.resize(2, 2)
    else:
        CHANGES[change](T)
        CHANGES[change](B)
    assert_values(place.dense(A.toarray()), square.dense)
    assert T.shape == B.shape and T.dtype == B.dtype and T.nnz == B.nnz
    assert_values(place.dense(T.toarray()), place.dense(B.toarray()))
    X = place.put(np.eye(T.shape[1], dtype=T.dtype))
    assert_values(place.dense(T @ X), place.dense(B @ X))
    assert_values(place.dense(A.toarray()), square.dense)


@each_place
def test_an_array_assigned_to_a_transpose_counts_in_its_products(place: Place) -> None:
    s = sample()
    T = place.bsr(s).T
    T.data = place.put(2 * s.T.data)
    assert_values(place.dense(T @ place.put(np.eye(6))), 2 * s.dense.T)
    assert_values(place.blocks(T).dense, 2 * s.dense.T)
    T = place.bsr(s).T
    T.indices = place.put(np.zeros(5, np.int32))
    assert_values(place.dense(T @ place.put(np.eye(6)))[:, 2:], np.zeros((6, 4)))
    assert not T.has_canonical_format


@each_place
def test_what_is_written_into_the_data_shows_until_the_transpose_is_built(place: Place) -> None:
    s = sample()
    A = place.bsr(s)
    late, built, copied = A.T, A.T, A.transpose(copy=True)
    assert built.data is not None and is_built(copied)
    A.data[...] = 0
    assert_values(place.dense(late @ place.put(np.eye(6))), np.zeros((6, 6)))
    assert_values(place.dense(late.toarray()), np.zeros((6, 6)))
    assert_values(place.dense(built.toarray()), s.dense.T)
    assert_values(place.dense(copied.toarray()), s.dense.T)


@each_place
@pytest.mark.parametrize("block", [(1, 1), (1, 3), (2, 1), (2, 3)], ids=str)
def test_the_arrays_of_a_transpose_are_its_own(place: Place, block: tuple[int, int]) -> None:
    A = bg.bsr_array(place.put(np.ones((6, 6))), blocksize=block)
    T = A.T
    for name in ("data", "indices", "indptr"):
        assert not place.xp.may_share_memory(getattr(T, name), getattr(A, name))


@each_place
@each_flavour
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda T: T.copy(), lambda T: pickle.loads(pickle.dumps(T))]
)
def test_copies_and_pickles_of_a_transpose_are_whole(place: Place, flavour: type, duplicate: Any) -> None:
    s = sample()
    A = place.bsr(s, flavour)
    T = A.T
    D = duplicate(T)
    assert type(D) is type(T) and is_built(D)
    A.data[...] = 0
    assert_values(place.blocks(D, flavour).dense, s.dense.T)
    assert_values(place.dense(pickle.loads(pickle.dumps(A)).toarray()), np.zeros((6, 6)))


@each_place
@given(a=samples(grid=(0, 3)), b=samples(grid=(3, 0)))
def test_transposes_without_elements_multiply(place: Place, a: Sample, b: Sample) -> None:
    for s in (a, b):
        A = place.bsr(s)
        for width in (0, 1, 3):
            X = place.put(np.ones((s.shape[0], width), s.dtype))
            assert_values(place.dense(A.T @ X), np.zeros((s.shape[1], width), s.dtype))
        assert_values(place.dense(place.put(np.ones(s.shape[0], s.dtype)) @ A), np.zeros(s.shape[1], s.dtype))


# --------------------------------------------------------------------------- a copy for kernels that need one
@each_place
def test_a_transposed_copy_is_kept_and_its_values_are_fresh(place: Place) -> None:
    s = sample()
    A = place.bsr(s)
    first = transposed_copy(A)
    assert_values(place.blocks(first).dense, s.dense.T)
    data = first.data
    A.data[...] = place.put(3 * s.data)
    assert transposed_copy(A) is first and first.data is data
    assert_values(place.blocks(first).dense, 3 * s.dense.T)
    A.sum_duplicates()
    assert transposed_copy(A) is not first
    assert_values(place.blocks(transposed_copy(A)).dense, 3 * s.dense.T)
