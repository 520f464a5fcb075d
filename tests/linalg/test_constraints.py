"""Fixed unknowns: the solution of the constrained system, symmetry, pattern, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg

from .problems import laplacian, numbers, plate


def eliminated(A: Any, b: Any, dofs: Any, values: Any) -> Any:
    """The solution by elimination of the known unknowns from the dense system."""
    dense, x = A.toarray(), np.zeros(b.shape)
    free = np.setdiff1d(np.arange(len(dense)), dofs)
    x[dofs] = values
    x[free] = np.linalg.solve(dense[np.ix_(free, free)], b[free] - dense[np.ix_(free, dofs)] @ x[dofs])
    return x


@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("dofs", [[0], [1, 2, 7], [0, 1, 2, 3], list(range(11))])
def test_the_solution_is_that_of_elimination(columns: int | None, dofs: list[int]) -> None:
    A = laplacian(6, 2)
    b = numbers(12 if columns is None else (12, columns))
    values = numbers((len(dofs),) if columns is None else (len(dofs), columns), seed=1)
    C, f = linalg.constrain(A, b, dofs, values)
    x = np.linalg.solve(C.toarray(), f)
    np.testing.assert_allclose(x, eliminated(A, b, dofs, values), atol=1e-12)
    np.testing.assert_allclose(C.toarray(), C.toarray().T)
    np.testing.assert_array_equal(C.indices, A.indices)
    np.testing.assert_array_equal(C.indptr, A.indptr)
    fixed = np.zeros(12, bool)
    fixed[dofs] = True
    masked, by_mask = linalg.constrain(A, b, fixed, values)
    np.testing.assert_array_equal(masked.toarray(), C.toarray())
    np.testing.assert_array_equal(by_mask, f)


def test_operands_stay_and_one_value_serves_all() -> None:
    A, b = laplacian(6, 2), numbers((12, 3))
    before = A.toarray(), b.copy()
    C, f = linalg.constrain(A, b, [0, 5], 2.0)
    np.testing.assert_allclose(np.linalg.solve(C.toarray(), f)[[0, 5]], 2)
    np.testing.assert_array_equal(A.toarray(), before[0])
    np.testing.assert_array_equal(b, before[1])
    C, f = linalg.constrain(A, b, [0, 5], [1.0, 3.0])
    np.testing.assert_allclose(np.linalg.solve(C.toarray(), f)[[0, 5]], [[1, 1, 1], [3, 3, 3]])
    C, f = linalg.constrain(A, b, [])
    np.testing.assert_array_equal(C.toarray(), A.toarray())
    np.testing.assert_array_equal(f, b)


def test_diagonal_elements_are_kept_and_zeros_become_one() -> None:
    A = bg.bsr_array(np.array([[5.0, 1], [1, 0]]), blocksize=(2, 2))
    C, _ = linalg.constrain(A, np.ones(2), [0, 1])
    np.testing.assert_array_equal(C.toarray(), np.diag([5.0, 1]))


def test_a_plate_that_is_held_on_one_side_is_solved_by_multigrid() -> None:
    A, place = plate(16)
    left = np.flatnonzero(place[:, 0] == 0)
    dofs = np.concatenate([2 * left, 2 * left[:1] + 1])  # x along the side, y at one node
    C, f = linalg.constrain(A, numbers(A.shape[0]), dofs, 0.1)
    M = linalg.smoothed_aggregation(C, linalg.rigid_body_modes(place), max_coarse=50)
    x, info = linalg.cg(C, f, M=M, rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(x[dofs], 0.1, rtol=1e-8)


A, b = laplacian(6, 2), np.ones(12)
HOLED = bg.bsr_array(np.kron(np.eye(2, k=1), np.ones((2, 2))), blocksize=(2, 2))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: linalg.constrain(A.toarray(), b, [0]), TypeError, "A: wanted a bsr_array"),
        (lambda: linalg.constrain(A, b[:4], [0]), ValueError, r"b: wanted a dense array \(12,\) or \(12, k\)"),
        (lambda: linalg.constrain(A, "b", [0]), TypeError, "b: wanted a dense array"),
        (lambda: linalg.constrain(A, b, [12]), ValueError, "dofs: wanted indices from 0 to 11, got 12"),
        (lambda: linalg.constrain(A, b, [-1]), ValueError, "dofs: wanted indices from 0 to 11, got -1"),
        (lambda: linalg.constrain(A, b, [0.5]), TypeError, "dofs: wanted integers or booleans"),
        (lambda: linalg.constrain(A, b, np.ones(4, bool)), ValueError, "dofs: wanted 12 booleans"),
        (lambda: linalg.constrain(A, b, [0, 1], [1.0, 2, 3]), ValueError, "values: wanted one number, or 2, got shape"),
        (lambda: linalg.constrain(HOLED, np.ones(4), [0]), ValueError, "dofs: the diagonal block of a fixed unknown"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
