"""Batches, and matrices with rows on several processes, where functions take one matrix: messages name the way out."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop.communicator import OneRank
from bsrgemm.interop.mpi import partition

A = bg.bsr_array(np.diag(np.arange(1.0, 9)), blocksize=(2, 2))
BATCH = bg.bsr_batch([A, 2 * A])
b = np.ones((2, 8))
METHODS = (linalg.minres, linalg.gmres, linalg.fgmres, linalg.bicgstab, linalg.lobpcg, linalg.spsolve)
MAKERS = (linalg.ilu0, linalg.ic0, linalg.block_ssor, linalg.chebyshev, linalg.smoothed_aggregation)


@pytest.mark.parametrize("solve", METHODS)
def test_other_methods_say_that_cg_takes_a_batch(solve: Callable[..., Any]) -> None:
    message = r"A: wanted .*, got (bsr_batch|\(2, 8, 8\)); A\[k\] is one of its matrices, and cg and block_jacobi"
    with pytest.raises((TypeError, ValueError), match=message):
        solve(BATCH, b)


@pytest.mark.parametrize("make", MAKERS)
def test_other_preconditioners_say_that_block_jacobi_takes_a_batch(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"A: wanted a bsr_array or bsr_matrix, got bsr_batch; A\[k\] is one of"):
        make(BATCH)


@pytest.mark.parametrize(
    "call",
    [linalg.ilu0, linalg.ic0, linalg.block_ssor, lambda D: linalg.spsolve(D, b[0]), lambda D: linalg.lobpcg(D, b.T)],
)
def test_what_one_process_computes_names_its_part_of_the_matrix(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"A: wanted .*, got DistributedMatrix with rows .*; A\.interior is what"):
        call(partition(A, OneRank()))


def test_saving_names_scipy_only_for_its_own_matrices() -> None:
    with pytest.raises(TypeError, match=r"got csr_array; scipy\.sparse\.save_npz takes it"):
        bg.save_npz(io.BytesIO(), A.tocsr())
    with pytest.raises(TypeError, match=r"got bsr_batch$"):
        bg.save_npz(io.BytesIO(), BATCH)


def test_a_batch_says_where_it_is_and_what_it_takes() -> None:
    assert BATCH.device == "cpu"
    assert BATCH.nbytes == 2 * A.data.nbytes + A.indices.nbytes + A.indptr.nbytes
    copy = BATCH.get()
    assert copy.device == "cpu" and not np.shares_memory(copy.data, BATCH.data)
    np.testing.assert_array_equal(copy.toarray(), BATCH.toarray())
