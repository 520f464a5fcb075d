"""Every kind of wrong value of an option is refused by the option's name, not one of them alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import bsrgemm as bg
from bsrgemm import linalg

from .problems import hermitian, numbers

A, B = hermitian(8), np.ones(8)
METHODS = {name: getattr(linalg, name) for name in ("cg", "minres", "bicgstab", "gmres", "fgmres")}
SOLVERS: dict[str, Callable[..., Any]] = {
    **{name: lambda solve=solve, **how: solve(A, B, **how) for name, solve in METHODS.items()},
    "cg of a batch": lambda **how: linalg.cg(bg.bsr_batch([A, A]), np.stack([B, B]), **how),
}
NO_NUMBERS: tuple[Any, ...] = (True, False, "1", [1], 1j)
NOT_WHOLE, NOT_FINITE = (*NO_NUMBERS, 2.5, np.float64(2)), (*NO_NUMBERS, np.nan, np.inf, -np.inf)
#: By option: how it is given, values that are refused, and values that are taken.
OPTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    **{f"{name}, rtol": (solve, (*NOT_FINITE, None, -1), (0.5, 1, np.float32(0.5))) for name, solve in SOLVERS.items()},
    **{f"{name}, atol": (solve, (*NOT_FINITE, None, -1), (0, 0.5)) for name, solve in SOLVERS.items()},
    **{f"{name}, maxiter": (solve, (*NOT_WHOLE, -1), (None, 99, np.int32(99))) for name, solve in SOLVERS.items()},
    **{f"{name}, restart": (SOLVERS[name], (*NOT_WHOLE, 0, -1), (None, 8, np.int8(8))) for name in ("gmres", "fgmres")},
    "minres, shift": (SOLVERS["minres"], (*NOT_FINITE, None), (0, 0.25)),
    "ssor, omega": (lambda **how: linalg.block_ssor(A, **how), (*NOT_FINITE, None, 0, 2, -1, 3), (1, 1.5)),
    "chebyshev, degree": (lambda **how: linalg.chebyshev(A, **how), (*NOT_WHOLE, None, 0, -1), (1, np.int64(3))),
    **{
        f"multigrid, {name}": (
            lambda **how: linalg.smoothed_aggregation(A, **how), (*NOT_WHOLE, None, 0, -1), (1, np.int64(9)),
        )
        for name in ("max_coarse", "degree")
    },
    "multigrid, max_levels": (
        lambda **how: linalg.smoothed_aggregation(A, **how), (*NOT_WHOLE, None, 0, -1), (5, np.int64(9)),
    ),
    "multigrid, theta": (lambda **how: linalg.smoothed_aggregation(A, **how), (*NOT_FINITE, None, -0.1, 1), (0, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_every_wrong_kind_are_refused(name: str) -> None:
    call, wrong, right = OPTIONS[name]
    option = name.split(", ")[1]
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{option}: wanted .*, got {re.escape(repr(value))}"):
            call(**{option: value})
    for value in right:
        call(**{option: value})


@pytest.mark.parametrize("method", METHODS)
def test_right_hand_sides_of_every_wrong_kind_are_refused(method: str) -> None:
    for b in (np.float64(1), np.int8(1), scipy.sparse.csr_array(np.ones((8, 1))), A):
        with pytest.raises(TypeError, match=f"^b: wanted a dense array, got {type(b).__name__}"):
            METHODS[method](A, b)
    for b in (1.0, None, set(B.tolist()), "b", bg.bsr_batch([A])):
        with pytest.raises(TypeError, match=f"^b: wanted a NumPy or CuPy array, got {type(b).__name__}"):
            METHODS[method](A, b)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tuples_of_matrices_are_batches_as_lists_are(count: int) -> None:
    for kind in (tuple, list):
        assert bg.bsr_batch(kind([A] * count)).shape == (count, 8, 8)


def test_other_tuples_are_no_batches() -> None:
    parts = A.data[None], A.indices, A.indptr
    for wrong in ((), parts[:1], parts[:2], (*parts, A.indptr), (*parts[:2], None, None), (A, *parts[1:]), 3, None):
        with pytest.raises(
            TypeError, match=r"^arg1: wanted \(data, indices, indptr\) or a sequence of bsr_array, got "
        ):
            bg.bsr_batch(wrong)


def test_what_is_no_matrix_in_a_batch_is_named_with_its_place() -> None:
    theirs = scipy.sparse.bsr_array(A.toarray(), blocksize=(2, 2))
    for wrong, got in (
        ([], "an empty list"),
        ([A, A.toarray()], r"a list with ndarray in arg1\[1\]"),
        ((theirs, A), r"a tuple with scipy bsr_array in arg1\[0\]"),
        (theirs, "scipy bsr_array"),
    ):
        with pytest.raises(TypeError, match=f"^arg1: wanted .* sequence of bsr_array, got {got}; a batch has one"):
            bg.bsr_batch(wrong)


def test_a_class_of_scipy_with_a_name_of_ours_is_told_from_ours() -> None:
    theirs = scipy.sparse.bsr_array(A.toarray(), blocksize=(2, 2))
    for call in (linalg.block_jacobi, linalg.smoothed_aggregation, lambda S: linalg.spsolve(S, B)):
        with pytest.raises(TypeError, match=r"got scipy bsr_array; bsrgemm.bsr_array\(A\) makes one"):
            call(theirs)


def test_unknowns_that_are_no_indices_are_refused_with_their_dtype_and_shape() -> None:
    for dofs, got in (([0.5], r"float64 of shape \(1,\)"), ([[0, 1]], r"int64 of shape \(1, 2\)")):
        with pytest.raises(TypeError, match=f"^dofs: wanted integers or booleans in one dimension, got {got}"):
            linalg.constrain(A, B, dofs, 0.0)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float32", "float64"])
def test_a_cast_of_a_batch_keeps_imaginary_parts_where_there_is_room(dtype: str) -> None:
    batch = bg.bsr_batch([hermitian(8, np.complex128), hermitian(8, np.complex128)])
    batch = batch.with_data(numbers(batch.data.shape, np.complex128))
    for data in (batch.data, batch.data.astype("complex64")):
        found = batch.with_data(data).astype(dtype).data
        want = data if dtype.startswith("c") else data.real
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, want.astype(dtype))


def test_singular_blocks_of_coarse_levels_of_pyamg_are_taken_and_those_of_the_finest_are_not() -> None:
    """As levels of pyamg are; the second has an unknown that no other one is connected with, and that is 0."""
    fine, coarse = hermitian(8), np.diag([2.0, 2.0, 2.0, 0.0])
    P = scipy.sparse.bsr_array(np.kron(np.eye(4), np.ones((2, 1))), blocksize=(2, 2))
    Q = scipy.sparse.bsr_array(np.kron(np.eye(2), np.ones((2, 1))), blocksize=(2, 2))
    levels = [
        SimpleNamespace(A=scipy.sparse.bsr_array(fine.toarray(), blocksize=(2, 2)), P=P, R=P.T),
        SimpleNamespace(A=scipy.sparse.bsr_array(coarse, blocksize=(2, 2)), P=Q, R=Q.T),
        SimpleNamespace(A=scipy.sparse.bsr_array(2 * np.eye(2), blocksize=(2, 2))),
    ]
    M = linalg.from_pyamg(SimpleNamespace(levels=levels))
    assert np.isfinite(M @ B).all()
    singular = np.array(fine.toarray())
    singular[3], singular[:, 3] = 0, 0
    levels[0].A = scipy.sparse.bsr_array(singular, blocksize=(2, 2))
    with pytest.raises(ValueError, match="A: diagonal block 1 is singular"):
        linalg.from_pyamg(SimpleNamespace(levels=levels))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-1, 1), (1, 1), (2, 1), (np.nan, 1), (0.1, np.nan), (0.1, np.inf), ("0", 1), (0.1, None)]
)
def test_bounds_of_eigenvalues_are_numbers_in_order(low: Any, high: Any) -> None:
    with pytest.raises(ValueError, match=r"^low, high: wanted 0 < low < high, both finite, got "):
        linalg.chebyshev(A, low=low, high=high)
