"""On the CPU, `out` may lie between the elements of an operand, and must not share an element with it."""

from __future__ import annotations

import numpy as np
import pytest

import bsrgemm as bg

A = bg.bsr_array(np.kron(np.array([[1.0, 0], [2, 3]]), np.array([[1.0, 2], [3, 5]])), blocksize=(2, 2))


@pytest.mark.parametrize("columns", [1, 3])
def test_out_may_be_columns_beside_those_of_the_operand(columns: int) -> None:
    """As in a Krylov method, which keeps all its vectors in one array."""
    V = np.arange(8.0 * columns).reshape(4, 2 * columns)
    want = A.toarray() @ V[:, :columns]
    bg.matmul(A, V[:, :columns], out=V[:, columns:])
    np.testing.assert_array_equal(V[:, columns:], want)
    line = np.arange(8.0)
    want = A.toarray() @ line[::2]
    bg.matmul(A, line[::2], out=line[1::2])
    np.testing.assert_array_equal(line[1::2], want)


def test_out_must_not_share_an_element_with_an_operand() -> None:
    V = np.ones((4, 4))
    for x, out in ((V[:, :2], V[:, 1:3]), (V[:, ::2], V[:, 2:]), (V[:, 0], V[:, 0]), (V[::-1], V)):
        with pytest.raises(ValueError, match="out: overlaps B"):
            bg.matmul(A, x, out=out)
    B = bg.bsr_array(A, copy=True)
    with pytest.raises(ValueError, match=r"out: overlaps A\.data"):
        bg.matmul(B, np.ones((4, 1)), out=B.data.reshape(-1)[:4].reshape(4, 1))
