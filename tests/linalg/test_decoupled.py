"""Multigrid for matrices with nodes that are not connected with others, such as those that `constrain` has fixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.linalg import aggregation

from .. import fake_cupy
from ..interop.ranks import run
from .problems import numbers, plate

pytestmark = pytest.mark.fake


def box(*sides: int) -> tuple[Any, Any]:
    """The Laplacian of a box of nodes, and the nodes on its surface."""
    lines = [sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)) for n in sides]
    found = lines[0]
    for line in lines[1:]:
        found = sp.kronsum(line, found)
    place = np.indices(sides[::-1]).reshape(len(sides), -1)
    ends = np.array(sides[::-1])[:, None] - 1
    return bg.bsr_array(found.tocsr(), blocksize=(1, 1)), np.flatnonzero(((place == 0) | (place == ends)).any(axis=0))


def solved(A: Any, b: Any, M: Any) -> int:
    steps: list[Any] = []
    x, info = linalg.cg(A, b, M=M, rtol=1e-8, callback=steps.append)
    assert info == 0 and np.linalg.norm(b - A @ x) <= 1.01e-8 * np.linalg.norm(b)
    return len(steps)


def test_a_box_that_is_held_all_around_is_coarsened() -> None:
    """5,048 of 27,000 nodes are fixed, more than the coarsest level may have."""
    A, surface = box(30, 30, 30)
    A, b = linalg.constrain(A, np.ones(A.shape[0]), surface, 1.0)
    M = linalg.smoothed_aggregation(A)
    assert M.levels[-1].shape[0] <= 500 and M.operator_complexity < 2
    assert solved(A, b, M) <= 15


@pytest.mark.parametrize("theta", [0.0, 0.05])
def test_nodes_without_a_neighbour_are_in_no_aggregate(theta: float) -> None:
    A, surface = box(9, 8)
    A, _ = linalg.constrain(A, np.ones(72), surface)
    indices, indptr, coupled = aggregation.strong_connections(A, theta)
    np.testing.assert_array_equal(np.flatnonzero(~coupled), surface)
    number, count = aggregation.aggregates(A._backend, indices, indptr, coupled)
    np.testing.assert_array_equal(np.flatnonzero(number == -1), surface)
    assert set(number[coupled].tolist()) == set(range(count))
    T, modes = aggregation.tentative(A, number, count, np.ones((72, 1)))
    dense = T.toarray()
    np.testing.assert_allclose(dense @ modes[:, 0], coupled.astype(float))
    np.testing.assert_allclose(dense.T @ dense, np.eye(count), atol=1e-14)


def test_a_coupled_block_is_one_with_any_number_beside_the_diagonal() -> None:
    """Blocks of zeros that are stored connect nothing; one component that is fixed leaves the others connected."""
    A, _ = plate(10)
    held, _ = linalg.constrain(A, np.ones(200), [44])
    assert aggregation.strong_connections(held, 0.0)[2].all()
    whole, _ = linalg.constrain(A, np.ones(200), [44, 45])
    assert np.flatnonzero(~aggregation.strong_connections(whole, 0.0)[2]).tolist() == [22]


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_refreshing_gives_the_bits_of_a_new_hierarchy(dtype: str) -> None:
    A, place = plate(16)
    left = np.flatnonzero(place[:, 0] < 3)
    fixed = (2 * left[:, None] + np.arange(2)).ravel()
    A, b = linalg.constrain(A.astype(dtype), numbers(512, dtype), fixed)
    other = A.copy()
    other.data *= 1.7
    modes = linalg.rigid_body_modes(place)
    M = linalg.smoothed_aggregation(A, modes, max_coarse=30)
    want = linalg.smoothed_aggregation(other, modes, max_coarse=30) @ b
    M.refresh(other)
    assert (M @ b).tobytes() == want.tobytes() and len(M.levels) > 2


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_leave_such_nodes_out_too(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose only neighbour is on another rank is connected. Rank 0 has fixed nodes alone."""
    from bsrgemm.interop.mpi import multigrid

    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 10)
    A, surface = box(20, 12)
    rows = [20, *[220 // (size - 1)] * (size - 1)]
    A, b = linalg.constrain(A, numbers(240), surface)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, rows=rows)
        M = linalg.smoothed_aggregation(D, max_coarse=10)
        x, info = linalg.cg(D, D.scatter(b), M=M, rtol=1e-9)
        before = M @ D.scatter(b)
        M.refresh(D)
        assert (M @ D.scatter(b)).tobytes() == before.tobytes()
        return D.gather(x), info, [level.shape[0] for level in M.levels]

    x, info, levels = run(size, program)[0]
    assert info == 0 and levels[1] < 180 / 2
    np.testing.assert_allclose(A @ x, b, atol=1e-7)


def test_the_code_runs_on_a_device() -> None:
    place = fake_cupy.backend()
    A, surface = box(14, 11)
    A, b = linalg.constrain(A, numbers(154), surface)
    want = linalg.smoothed_aggregation(A, max_coarse=10) @ b
    M = linalg.smoothed_aggregation(A.to_device(place.name), max_coarse=10)
    np.testing.assert_allclose(place.to_host(M @ place.from_host(b)), want, rtol=1e-12, atol=1e-13)


def test_a_matrix_without_connections_is_told_or_inverted() -> None:
    small = bg.bsr_array(np.kron(np.diag(np.arange(1.0, 31)), [[2.0, 1], [1, 2]]), blocksize=(2, 2))
    M = linalg.smoothed_aggregation(small, max_coarse=10)
    np.testing.assert_allclose(small @ (M @ np.ones(60)), 1)

    def program(comm: Any) -> None:
        D = mpi.partition(bg.eye(5000, blocksize=(1, 1)), comm)
        with pytest.raises(ValueError, match="no node of level 0 is connected with another one"):
            linalg.smoothed_aggregation(D)

    run(2, program)
