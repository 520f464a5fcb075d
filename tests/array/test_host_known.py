"""What is known of a matrix without a look at its indices, and what goes with it to copies and transposes.

On the GPU a look waits for the device, so a result that forgets what is known costs a wait.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm._backend import structure

from .test_host_properties import each_device, numpy_of, on

pytestmark = pytest.mark.fake

DENSE = np.kron(np.array([[1.0, 0, 2], [0, 3, 0], [4, 0, 5]]), np.array([[1.0, 2], [3, 5]]))


def canonical(device: str) -> Any:
    A = on(bg.bsr_array(DENSE, blocksize=(2, 2)), device)
    assert A._known_canonical
    return A


def with_duplicates(device: str) -> Any:
    """A matrix that is known to be sorted and to have duplicates."""
    A = on(bg.bsr_array((np.ones((4, 2, 2)), [0, 0, 1, 2], [0, 3, 4, 4]), shape=(6, 6)), device)
    assert A.has_sorted_indices and not A.has_canonical_format
    return A


#: Results that are canonical if the matrix is, of which nothing is checked.
CANONICAL: dict[str, Callable[[Any], Any]] = {
    "copy": lambda A: A.copy(),
    "negative": operator.neg,
    "absolute": abs,
    "rounded": round,
    "times": lambda A: A * 2,
    "quotient": lambda A: A / 3,
    "power": lambda A: A.power(2),
    "sine": lambda A: A.sin(),
    "cast": lambda A: A.astype(np.float32),
    "real": lambda A: A.real,
    "imaginary": lambda A: A.imag,
    "conjugate": lambda A: (A * 1j).conjugate(),
    "transpose, copied": lambda A: A.transpose(copy=True),
    "transpose, copied later": lambda A: A.T.copy(),
    "transpose of a transpose": lambda A: A.T.T,
    "transpose of a transpose of another": lambda A: A.T.T.T.T,
    "rows": lambda A: A[2:],
    "columns": lambda A: A[:, :4],
    "index": lambda A: A[[2, 3, 0, 1]],
    "blocks": lambda A: A.select_blocks(rows=[1, 0]),
    "block columns": lambda A: A.select_blocks(cols=[1, 0]),
    "moved": lambda A: A.to_device("cpu"),
    "got": lambda A: A.get(),
    "pickled": lambda A: pickle.loads(pickle.dumps(A)),
    "constructed": lambda A: bg.bsr_array(A),
    "constructed with a copy": lambda A: bg.bsr_array(A, copy=True),
    "stacked": lambda A: bg.vstack([A, A]),
    "stacked sideways": lambda A: bg.hstack([A, A]),
    "on the diagonal": lambda A: bg.block_diag([A, A]),
    "with another format": lambda A: bg.vstack([A, A.tocsr(), A.toarray()]),
}
#: Results that are canonical whatever the matrix is.
ALWAYS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda A: A + A,
    "difference": lambda A: A - A * 2,
    "product": lambda A: A.multiply(A),
    "union": lambda A: A._blockwise(A, np.logical_or if A._backend.name == "cpu" else A._backend.xp.logical_or),
    "in other blocks": lambda A: A.tobsr((1, 1)),
    "in larger blocks": lambda A: A.tobsr((3, 3)),
    "Kronecker product": lambda A: bg.kron(A, A),
    "Kronecker product with an array": lambda A: bg.kron(A, A.toarray()),
    "from an array": lambda A: A._from_full(A.toarray(), (2, 2)),
    "of another format": lambda A: A._coerce(A.tocsr()),
    "of another format by columns": lambda A: A._coerce_columns(A.tocsr()),
    "of a dense array": lambda A: bg.bsr_array(A.toarray()),
    "with a threshold": lambda A: bg.from_dense(A.toarray(), (2, 2), 1),
    "cast in a stack": lambda A: bg.vstack([A, A], dtype=np.float32),
    "inverse": lambda A: (A + bg.eye(6, blocksize=(2, 2)).to_device(A._backend.name)).inverse_block_diagonal(),
    "comparison with NaN": lambda A: operator.lt(A, np.nan),
}


@each_device
@pytest.mark.parametrize("name", [*CANONICAL, *ALWAYS])
def test_results_of_a_matrix_without_duplicates_are_known_to_have_none(name: str, device: str) -> None:
    B = {**CANONICAL, **ALWAYS}[name](canonical(device))
    assert B._known_canonical
    assert B.has_sorted_indices and B.has_canonical_format


@pytest.mark.parametrize("name", [*CANONICAL, *ALWAYS])
def test_the_indices_of_a_matrix_that_is_known_to_be_canonical_are_not_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = canonical("cuda")
    call = {**CANONICAL, **ALWAYS}[name]

    def looked(*args: Any, **kwargs: Any) -> bool:
        raise AssertionError("this waits for the device")

    monkeypatch.setattr(structure, "is_sorted", looked)
    monkeypatch.setattr(structure, "has_duplicates", looked)
    B = call(A)
    assert B.has_sorted_indices and B.has_canonical_format and numpy_of(B).shape == B.shape


@each_device
@pytest.mark.parametrize("name", ALWAYS)
def test_results_that_add_up_duplicates_are_known_to_have_none(name: str, device: str) -> None:
    assert ALWAYS[name](with_duplicates(device))._known_canonical


@each_device
@pytest.mark.parametrize("name", ["negative", "times", "copy", "real", "moved", "got", "pickled"])
def test_a_copy_knows_that_there_are_duplicates(name: str, device: str) -> None:
    A = with_duplicates(device)
    B = CANONICAL[name](A)
    assert B._has_canonical_format is False and B._has_sorted_indices is True


@each_device
@pytest.mark.parametrize(
    "name", [n for n in CANONICAL if n.startswith(("transpose of", "rows", "columns", "index", "block", "stacked"))]
)
def test_a_part_may_have_no_duplicates_and_is_known_to_be_sorted(name: str, device: str) -> None:
    B = CANONICAL[name](with_duplicates(device))
    assert B._has_canonical_format is None and not B._known_canonical
    assert B._has_sorted_indices is True


@each_device
def test_nothing_is_known_of_arrays_that_are_given(device: str) -> None:
    parts = np.ones((3, 1, 1)), [2, 0, 1], [0, 2, 3]
    A = bg.bsr_array(parts, shape=(2, 3), device=device)
    for B in (A, A.copy(), A.T.T, A[:1], A.select_blocks(rows=[0]), bg.vstack([A, A]), bg.hstack([A, A])):
        assert B._has_canonical_format is None and B._has_sorted_indices is None and not B._known_canonical
    assert not A.has_sorted_indices and A._has_sorted_indices is False
    for B in (A[:1], A.select_blocks(rows=[0]), bg.vstack([A, A]), bg.hstack([A, A])):
        assert B._has_canonical_format is None and B._has_sorted_indices is None and not B._known_canonical
    assert A.copy()._has_sorted_indices is False
    assert A.T._has_sorted_indices is True and A.T.copy()._has_sorted_indices is True
    in_order = on(bg.bsr_array((np.ones((2, 1, 1)), [1, 1], [0, 2]), shape=(1, 3)), device)
    assert in_order.has_sorted_indices
    for other in (on(bg.eye(3), device), in_order):
        some = bg.vstack([A, other])
        assert not some._known_canonical and some._has_sorted_indices is None


@each_device
def test_matrices_by_a_rule_are_known_to_be_canonical(device: str) -> None:
    for A in (
        bg.eye(4, device=device),
        bg.eye(4, 6, k=1, blocksize=(2, 2), device=device),
        bg.diags([[1.0, 2.0], [3.0]], [0, 1], device=device),
        bg.random(4, 4, blocksize=(2, 2), density=0.5, seed=1, device=device),
        bg.random(4, 4, blocksize=(2, 2), density=0, seed=1, device=device),
        bg.bsr_array((4, 4), device=device),
        bg.bsr_array(np.eye(4), device=device) if device == "cpu" else bg.eye(4, device=device),
        bg.bsr_array(sp.eye_array(4, format="csr"), device=device),
        bg.bsr_array(sp.eye_array(4, format="coo"), device=device),
        bg.bsr_array(([1.0, 2.0], ([0, 1], [1, 0])), device=device),
    ):
        assert A._known_canonical and A.has_sorted_indices


def test_names_of_the_matrix_class_keep_what_is_known() -> None:
    A = bg.bsr_matrix(DENSE, blocksize=(2, 2), maxprint=7)
    assert A.getcol(3)._known_canonical
    B = bg.bsr_matrix((np.ones((2, 1, 1)), [0, 0], [0, 2]), shape=(1, 1))
    assert B.getcol(0)._has_canonical_format is None and not B.getcol(0)._known_canonical
    A.set_shape((4, 9))
    assert A._known_canonical and A.getmaxprint() == 7


@each_device
def test_the_number_of_printed_elements_goes_where_the_matrix_goes(device: str) -> None:
    A = bg.bsr_array(DENSE, blocksize=(2, 2), maxprint=6)
    B = A.to_device(device)
    assert (A.maxprint, B.maxprint, B.get().maxprint if device == "cuda" else 6) == (6, 6, 6)
    assert A.T.maxprint == A.copy().maxprint == bg.bsr_array(DENSE).maxprint == 50
    assert pickle.loads(pickle.dumps(B)).maxprint == 6
    assert len(str(B).splitlines()) == 2 + 1 + 6 + 1 and len(str(B.T).splitlines()) == 2 + 1 + 20


# ------------------------------------------------------------------------------------------- what is learned
@each_device
def test_an_answer_about_the_order_is_kept(device: str) -> None:
    for parts, is_sorted, is_canonical in (
        (([0, 1, 2], [0, 3]), True, True),
        (([0, 0, 2], [0, 3]), True, False),
        (([2, 0, 1], [0, 3]), False, False),
    ):
        for first in ("has_sorted_indices", "has_canonical_format"):
            A = on(bg.bsr_array((np.ones((3, 1, 1)), *parts), shape=(1, 3)), device)
            getattr(A, first)
            assert A.has_sorted_indices is is_sorted and A.has_canonical_format is is_canonical
            assert A._has_sorted_indices is is_sorted and A._has_canonical_format is is_canonical
            A.sort_indices()
            assert A._has_sorted_indices is True
            A.sum_duplicates()
            assert A.has_sorted_indices and A.has_canonical_format and A._known_canonical
            want = np.bincount(parts[0], minlength=3).astype(float)
            np.testing.assert_array_equal(numpy_of(A), want[None])


def test_a_sum_learns_that_a_matrix_is_canonical_unless_it_is_said_not_to_be() -> None:
    def made() -> Any:
        return bg.bsr_array((np.ones((2, 1, 1)), [0, 1], [0, 2]), shape=(1, 2))

    A = made()
    A + A
    assert A._known_canonical
    A = made()
    A.has_canonical_format = False
    A + A
    assert not A.has_canonical_format
    A = made()
    A.has_sorted_indices = False
    A + A
    assert A._has_canonical_format is None and A._has_sorted_indices is False
    duplicates = bg.bsr_array((np.ones((2, 1, 1)), [0, 0], [0, 2]), shape=(1, 2))
    duplicates + duplicates
    assert duplicates._has_canonical_format is None


def test_a_diagonal_leaves_a_matrix_that_is_known_to_be_canonical() -> None:
    for device in ("cpu", "cuda"):
        for value in (np.ones((2, 2)), np.array([[0.0, 1], [0, 0]])):
            A = on(bg.bsr_array(value, blocksize=(1, 1)), device)
            A = bg.bsr_array((A.data, A.indices, A.indptr), shape=(2, 2))
            A.setdiag(3)
            assert A._has_canonical_format is True and A._has_sorted_indices is True


# ------------------------------------------------------------------------------------ transposes without arrays
@each_device
@pytest.mark.parametrize("changed", ["data", "indices", "indptr", "shape"])
def test_a_transpose_keeps_the_arrays_that_the_matrix_had(changed: str, device: str) -> None:
    A = canonical(device)
    T = A.T
    x = A._backend.from_host(np.eye(6)[:, :3].copy())
    if changed == "data":
        A.data = A.data * 2
    elif changed == "indices":
        A.indices = A._backend.from_host(np.array([1, 2, 0, 1, 2], np.int32))
    elif changed == "indptr":
        A.indptr = A._backend.from_host(np.array([0, 1, 2, 5], np.int32))
    else:
        A.resize(6, 8)
    assert T.shape == (6, 6) and T.nnz == 20 and T.blocksize == (2, 2) and T.dtype == np.float64
    np.testing.assert_array_equal(numpy_of(T @ x), DENSE.T[:, :3])
    assert T._origin is not None  # the product read the arrays of the matrix
    assert bg.norm(T, 1) == abs(DENSE.T).sum(axis=0).max()
    back = T.T
    assert back._known_canonical
    np.testing.assert_array_equal(numpy_of(back), DENSE)
    back *= 2
    np.testing.assert_array_equal(numpy_of(T), DENSE.T)
    np.testing.assert_array_equal(numpy_of(back), 2 * DENSE)


@each_device
def test_what_a_transpose_knows_once_it_has_arrays(device: str) -> None:
    for A in (canonical(device), with_duplicates(device)):
        known = A._known_canonical
        T = A.T
        assert T._has_sorted_indices is True and T._origin is not None
        T.data  # noqa: B018 (builds the arrays)
        assert T._origin is None and T._known_canonical is known
        assert T.has_canonical_format is known
        A.data = A.data * 1
        late = A.T
        A.data = A.data * 1
        assert late.T._known_canonical is known and late.T._has_sorted_indices is A._has_sorted_indices
        assert A.T.has_canonical_format is known
    A = canonical(device)
    T = A.T
    A *= 2
    assert T._origin is None and not A._transposes


def test_a_transpose_checks_the_indices_that_it_reads() -> None:
    A = bg.bsr_array(np.ones((4, 6)), blocksize=(2, 2))
    for wrong in (3, -1):
        T = A.T
        A.indices[1] = wrong
        with pytest.raises(ValueError, match="column index values must be"):
            T.data  # noqa: B018 (builds the arrays)
        A.indices[1] = 1


@each_device
def test_the_bytes_of_a_transpose_are_those_of_its_arrays(device: str) -> None:
    A = on(bg.bsr_array(np.ones((2, 12)), blocksize=(1, 2)), device)
    T = A.T
    assert T.nbytes == 24 * 8 + 12 * 4 + 7 * 4 and A.nbytes == 24 * 8 + 12 * 4 + 3 * 4
    T.data  # noqa: B018 (builds the arrays)
    assert T.nbytes == 24 * 8 + 12 * 4 + 7 * 4


@each_device
def test_transposes_are_built_before_values_change(device: str) -> None:
    for change in (
        lambda A: operator.imul(A, 2),
        lambda A: operator.itruediv(A, 2),
        lambda A: A.__setitem__((slice(0, 2), slice(0, 2)), 7.0),
        lambda A: A.assemble(A._backend.from_host(np.ones((1, 2, 2))), [0], [0]),
    ):
        A = canonical(device)
        T, again = A.T, A.T.T.T
        change(A)
        np.testing.assert_array_equal(numpy_of(T), DENSE.T)
        np.testing.assert_array_equal(numpy_of(again), DENSE.T)
        later = A.T
        np.testing.assert_array_equal(numpy_of(later), numpy_of(A).T)
        change(A)
        np.testing.assert_array_equal(numpy_of(later.T @ A._backend.from_host(np.eye(6))), numpy_of(later).T)


def test_the_shape_of_the_matrix_class_says_what_it_is() -> None:
    assert bg.bsr_matrix.shape.__doc__ == "Rows and columns."
