"""Matrices of scipy whose index arrays were broken in place are refused before compiled code reads them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg


def source(format: str) -> sp.sparray:
    return sp.coo_array(np.arange(1.0, 49).reshape(6, 8)).asformat(format)


@pytest.mark.parametrize("blocksize", [None, (2, 2), (3, 4)])
@pytest.mark.parametrize("value", [-1, 10**6])
@pytest.mark.parametrize(
    ("format", "what"), [("csr", "column"), ("csc", "row"), ("bsr", "column"), ("coo", "row"), ("coo", "column")]
)
def test_an_index_out_of_range_is_refused(
    format: str, what: str, value: int, blocksize: tuple[int, int] | None
) -> None:
    S = source(format)
    indices = S.indices if format != "coo" else S.row if what == "row" else S.col
    indices[3] = value
    with pytest.raises(ValueError, match=rf"({what}|ind).*{'-1' if value < 0 else '(10{6}|must be < )'}"):
        bg.bsr_array(S, blocksize=blocksize)


def _assign(A: bg.bsr_array, S: sp.sparray) -> None:
    A[:] = S


#: what takes a foreign matrix of this shape
OPERATIONS = {
    "A @ S": ((6, 8), lambda A, S: A @ S),
    "A + S": ((8, 6), lambda A, S: A + S),
    "A / S": ((8, 6), lambda A, S: A / S),
    "A != S": ((8, 6), lambda A, S: A != S),
    "A > S": ((8, 6), lambda A, S: A > S),
    "A.maximum(S)": ((8, 6), lambda A, S: A.maximum(S)),
    "A.multiply(S)": ((8, 6), lambda A, S: A.multiply(S)),
    "A.multiply(row)": ((1, 6), lambda A, S: A.multiply(S)),
    "A.multiply(column)": ((8, 1), lambda A, S: A.multiply(S)),
    "A.multiply(one)": ((1, 1), lambda A, S: A.multiply(S)),
    "A[:] = S": ((8, 6), _assign),
    "A.setdiag(S)": ((1, 6), lambda A, S: A.setdiag(S)),
    "hstack": ((8, 6), lambda A, S: bg.hstack([A, S])),
    "kron": ((2, 2), lambda A, S: bg.kron(A, S)),
}


@pytest.mark.parametrize("value", [-(10**8), 10**8])
@pytest.mark.parametrize("format", ["csr", "csc", "coo", "bsr"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operand_with_an_index_out_of_range_is_refused(operation: str, format: str, value: int) -> None:
    shape, call = OPERATIONS[operation]
    A = bg.bsr_array(np.arange(1.0, 49).reshape(8, 6), blocksize=(2, 2))
    before = A.toarray()
    S = sp.coo_array(np.ones(shape)).asformat(format)
    (S.col if format == "coo" else S.indices)[0] = value
    with pytest.raises(ValueError, match="ind"):
        call(A, S)
    np.testing.assert_array_equal(A.toarray(), before)


@pytest.mark.parametrize("format", ["csr", "coo"])
def test_a_vector_with_an_index_out_of_range_is_refused(format: str) -> None:
    A = bg.bsr_array(np.eye(6), blocksize=(2, 2))
    S = sp.coo_array(np.arange(1.0, 7)).asformat(format)
    A.setdiag(S)
    np.testing.assert_array_equal(A.diagonal(), np.arange(1.0, 7))
    (S.col if format == "coo" else S.indices)[0] = 10**8
    with pytest.raises(ValueError, match="ind"):
        A.setdiag(S)


@pytest.mark.parametrize("format", ["csr", "csc"])
def test_arrays_that_do_not_fit_each_other_are_refused(format: str) -> None:
    for name in ("data", "indptr"):
        S = source(format)
        setattr(S, name, getattr(S, name)[:3])
        with pytest.raises(ValueError, match="wanted an indptr of"):
            bg.bsr_array(S, blocksize=(2, 2))


@pytest.mark.parametrize("place", [0, 2, -1])
@pytest.mark.parametrize("format", ["csr", "csc", "bsr"])
def test_row_bounds_out_of_range_are_refused(format: str, place: int) -> None:
    S = source(format)
    S.indptr[place] = 10**6
    with pytest.raises(ValueError, match="indptr"):
        bg.bsr_array(S, blocksize=(2, 2))


@pytest.mark.parametrize("format", ["csr", "csc", "bsr", "coo", "dia", "lil", "dok"])
def test_a_sound_matrix_of_every_format_is_taken(format: str) -> None:
    A = bg.bsr_array(source(format), blocksize=(2, 2))
    np.testing.assert_array_equal(A.toarray(), source(format).toarray())
