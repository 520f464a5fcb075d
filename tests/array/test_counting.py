"""Places and keys are counted in 64 bits, also where no test can have so many blocks that 32 would be too few.

While the operations run, their modules see a NumPy that has no narrow integers but for the functions that choose them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.sparse

import bsrgemm as bg
from bsrgemm._array import assign, base, construct, convert, extremes, reduce, select
from bsrgemm._backend import structure
from bsrgemm._backend.base import Blocks
from bsrgemm._backend.numpy_backend import HOST


class Wide:
    """NumPy, but integers of 32 bits are for the functions named here alone."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed

    def __getattr__(self, name: str) -> Any:
        if name in ("int8", "int16", "int32"):
            caller = sys._getframe(1).f_code.co_name
            assert caller in self._allowed, f"{caller} asks for np.{name}"
        return getattr(np, name)


@contextmanager
def counting_in_64_bits(*modules: ModuleType, allowed: tuple[str, ...] = ()) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "np", Wide(allowed)))
        yield


def matrix() -> Any:
    """Indices of 64 bits, out of order, one of them twice."""
    data = np.arange(5 * 6.0).reshape(5, 2, 3) + 1
    parts = (data, np.array([2, 0, 0, 1, 1]), np.array([0, 3, 3, 5]))
    return bg.bsr_array(parts, shape=(6, 9))


def test_structures_are_counted_in_64_bits() -> None:
    A, row = matrix(), np.array([0, 5, 3, 3])
    want = A.toarray()
    with counting_in_64_bits(structure, allowed=("index_dtype",)):
        blocks = A._blocks
        B = Blocks(blocks.data, blocks.indices.astype(np.int32), blocks.indptr.astype(np.int32))
        for x in (blocks, B):
            assert len(structure.sum_duplicates(HOST, x, 3).indices) == 3
            structure.check_values(HOST, x.indices, x.indptr, 3)
            structure.first_of_runs(HOST, x.indices)
            assert structure.first_of_runs(HOST, x.indices[:0]).dtype == np.int64
        found = bg.bsr_array(want, blocksize=(2, 3))
        assert (A + found).shape == A.shape
        A.copy().sum_duplicates()
        A.copy().sort_indices()
        A.copy().eliminate_zeros()
        bg.bsr_array((np.ones(4), (row, row)), shape=(6, 9), blocksize=(2, 3))
        A.tobsr((1, 1)).tobsr((2, 3))
        A.tobsr((6, 9))


def test_first_places_of_runs_are_told_by_booleans() -> None:
    """An index of integers in the place of booleans would choose other elements."""
    np.testing.assert_array_equal(structure.first_of_runs(HOST, np.array([3, 3, 4, 7, 7])), [0, 2, 3])


def test_the_array_counts_its_elements_in_64_bits() -> None:
    A = matrix()
    want = A.toarray()
    row, col = np.array([0, 5, 3], np.uint32), np.array([8, 0, 4], np.uint32)
    allowed = ("index_dtype", "_index_array", "_from_bsr_arrays", "_narrowed")
    modules = (assign, base, construct, convert, extremes, reduce, select, structure)
    with counting_in_64_bits(*modules, allowed=allowed):
        np.testing.assert_array_equal(A.diagonal(1), want.diagonal(1))
        A.trace()
        A.todia()
        A.tocsr(), A.tocoo(), A.tocsc()
        for axis in (None, 0, 1):
            np.testing.assert_array_equal(
                np.asarray(A.argmax(axis=axis)).reshape(-1), want.argmax(axis=axis).reshape(-1)
            )
            A.argmin(axis=axis), A.sum(axis=axis), A.max(axis=axis)
        B = A.copy()
        B.setdiag(3.0)
        assert B.diagonal()[0] == 3
        assert A[2:6, 3:].shape == (4, 6)
        bg.bsr_array((np.ones(3), (row, col)), shape=(6, 9), blocksize=(2, 3))
        bg.bsr_array((np.ones(3), (row, col)), shape=(6, 9))
        bg.bsr_array(scipy.sparse.coo_array(want))
        A.reshape(9, 6)
        repr(A), str(A)


def test_a_row_of_an_index_array_is_no_narrower_than_the_array() -> None:
    assert construct._index_array(np.zeros(1, np.uint32), "row").dtype == np.int64
    assert construct._index_array(np.zeros(1, np.int16), "row").dtype == np.int32
