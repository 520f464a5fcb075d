"""On the CPU, values written to `indices` and `indptr` in place show in every operation, whatever was known before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg

X = np.random.default_rng(5).normal(size=(8, 3))


def other() -> Any:
    return bg.bsr_array(np.kron(np.eye(4)[::-1], np.ones((2, 2))), blocksize=(2, 2))


def in_place(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda A: (change(A), A)[1]


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "toarray": lambda A: A,
    "copy": lambda A: A.copy(),
    "A @ x": lambda A: A @ X[:, 0],
    "A @ X": lambda A: A @ X,
    "A.T @ X": lambda A: A.T @ X,
    "X @ A": lambda A: X.T @ A,
    "A @ A": lambda A: A @ A,
    "A.T": lambda A: A.T,
    "A.T.copy()": lambda A: A.T.copy(),
    "A + B": lambda A: A + other(),
    "A - B": lambda A: A - other(),
    "A.multiply(B)": lambda A: A.multiply(other()),
    "A.maximum(B)": lambda A: A.maximum(other()),
    "A != B": lambda A: other() != A,
    "abs": abs,
    "sqrt": lambda A: A.sqrt(),
    "round": lambda A: round(A / 3, 1),
    "A *= 2": in_place(lambda A: A.__imul__(2)),
    "A /= 2": in_place(lambda A: A.__itruediv__(2)),
    "A > 9": lambda A: A > 9,
    "power": lambda A: A.power(2),
    "astype": lambda A: A.astype(np.int64),
    "sum": lambda A: A.sum(),
    "sum(0)": lambda A: A.sum(axis=0),
    "sum(1)": lambda A: A.sum(axis=1),
    "max": lambda A: A.max(),
    "max(0)": lambda A: A.max(axis=0),
    "argmax": lambda A: A.argmax(axis=1),
    "diagonal": lambda A: A.diagonal(),
    "count_nonzero": lambda A: A.count_nonzero(),
    "nonzero": lambda A: np.stack(A.nonzero()),
    "norm": bg.norm,
    "tocsr": lambda A: A.tocsr(),
    "tocoo": lambda A: A.tocoo(),
    "tobsr": lambda A: A.tobsr((4, 4)),
    "bsr_array": lambda A: bg.bsr_array(A, blocksize=(1, 1)),
    "a slice": lambda A: A[:4],
    "an index array": lambda A: A[[6, 7, 0, 1]],
    "columns in another order": lambda A: A[:, [6, 7, 0, 1]],
    "vstack": lambda A: bg.vstack([A, A]),
    "kron": lambda A: bg.kron(A, np.ones((1, 2))),
    "sum_duplicates": in_place(lambda A: A.sum_duplicates()),
    "sort_indices": in_place(lambda A: A.sort_indices()),
    "setdiag": in_place(lambda A: A.setdiag(7)),
    "eliminate_zeros": in_place(lambda A: A.eliminate_zeros()),
    "assemble": lambda A: A.assemble(np.ones((2, 2, 2)), [0, 2], [0, 3]),
    "assignment": in_place(lambda A: A.__setitem__((slice(0, 2), slice(0, 2)), 5.0)),
}

WRITES: dict[str, Callable[[Any], Any]] = {
    "duplicates": lambda A: A.indices.__setitem__(1, 0),
    "another order": lambda A: A.indices.__setitem__(slice(0, 3), [3, 0, 1]),
    "another column": lambda A: A.indices.__setitem__(1, 2),
    "another row": lambda A: A.indptr.__setitem__(1, 2),
}


def matrix() -> Any:
    """A matrix of which everything is known, with a product and a transpose behind it."""
    stored = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0]])
    values = np.random.default_rng(6).integers(1, 9, (8, 8)).astype(float)
    A = bg.bsr_array(values * np.kron(stored, np.ones((2, 2))), blocksize=(2, 2))
    A.sum_duplicates()
    assert A.has_sorted_indices and A.has_canonical_format
    A @ X, A + A, A.T @ X
    return A


def dense(result: Any) -> Any:
    return result.toarray() if hasattr(result, "toarray") else np.asarray(result)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_sees_what_was_written(operation: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
    A = matrix()
    write(A)
    fresh = bg.bsr_array((A.data.copy(), A.indices.copy(), A.indptr.copy()), shape=A.shape)
    np.testing.assert_allclose(dense(operation(A)), dense(operation(fresh)))


def test_flags_are_kept_as_scipy_keeps_them() -> None:
    """`sum_duplicates` trusts the flag, which was true when it was found; setting it to False makes it look again."""
    A = matrix()
    WRITES["duplicates"](A)
    assert A.has_canonical_format
    A.sum_duplicates()
    assert len(A.indices) == 9
    A.has_canonical_format = False
    A.sum_duplicates()
    assert len(A.indices) == 8 and A.has_canonical_format


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_row_pointers_whose_differences_overflow_are_refused(index: Any) -> None:
    indptr = np.array([0, np.iinfo(index).max, -2, 1], index)
    with pytest.raises(ValueError, match="indptr"):
        bg.bsr_array((np.ones((1, 1, 1)), np.zeros(1, index), indptr), shape=(3, 1))
