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
WAY_OUT = (
    r"cg and block_jacobi take a batch, A\[k\] is one of its matrices, and A\.tobsr\(\) has all of them on its diagonal"
)
MAKERS = (linalg.ilu0, linalg.ic0, linalg.block_ssor, linalg.chebyshev, linalg.smoothed_aggregation)


@pytest.mark.parametrize("solve", METHODS)
def test_other_methods_say_that_cg_takes_a_batch(solve: Callable[..., Any]) -> None:
    for right in (b, b[0], np.ones((2, 8, 3)), None):
        with pytest.raises(TypeError, match=rf"^A: wanted .*, got bsr_batch; {WAY_OUT}$"):
            solve(BATCH, right)


@pytest.mark.parametrize("solve", [linalg.cg, *METHODS[:4]])
def test_a_batch_is_no_preconditioner_of_one_matrix(solve: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^M: wanted .*, got bsr_batch; .*, M\[k\] is one of its matrices"):
        solve(A, b[0], M=linalg.block_jacobi(BATCH))


def test_the_ways_out_of_a_batch_lead_there() -> None:
    want = np.stack([np.linalg.solve(x.toarray(), y) for x, y in zip((A, 2 * A), b, strict=True)])
    np.testing.assert_allclose(linalg.cg(BATCH, b, rtol=1e-10)[0], want)
    np.testing.assert_allclose(linalg.gmres(BATCH[1], b[1], rtol=1e-10)[0], want[1])
    np.testing.assert_allclose(linalg.gmres(BATCH.tobsr(), b.ravel(), rtol=1e-10)[0], want.ravel())


def test_right_hand_sides_of_batches_may_be_lists() -> None:
    x0 = np.full((2, 8), 0.5)
    want, _ = linalg.cg(BATCH, b, x0)
    for found, info in (linalg.cg(BATCH, b.tolist(), x0.tolist()), linalg.cg(BATCH, tuple(map(tuple, b)), x0)):
        np.testing.assert_array_equal(found, want)
        assert not info.any()
    with pytest.raises(ValueError, match=r"^b: wanted shape \(2, 8\) or \(2, 8, k\), got \(1, 1\)"):
        linalg.cg(BATCH, [[1.0]])
    with pytest.raises(ValueError, match=r"^b: wanted numbers in rows of one length, got a list of others"):
        linalg.cg(BATCH, [[1.0], [1.0, 2.0]])
    np.testing.assert_array_equal(linalg.ilu0(A) @ ([1.0] * 8), linalg.ilu0(A) @ np.ones(8))


@pytest.mark.parametrize("make", MAKERS)
def test_other_preconditioners_say_that_block_jacobi_takes_a_batch(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"A: wanted a bsr_array or bsr_matrix, got bsr_batch; " + WAY_OUT):
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


def test_vectors_and_positions_may_be_lists() -> None:
    M, N = (linalg.smoothed_aggregation(A, x, max_coarse=2) for x in ([[1.0]] * 8, np.ones((8, 1))))
    np.testing.assert_array_equal(M @ b[0], N @ b[0])
    places = [[0, 0], [1, 0], [0, 1]]
    np.testing.assert_array_equal(linalg.rigid_body_modes(places), linalg.rigid_body_modes(np.array(places)))
    with pytest.raises(ValueError, match=r"^coordinates: wanted numbers in rows of one length, got a list of others"):
        linalg.rigid_body_modes([[0], [1, 2]])
