"""A preconditioner keeps numbers of its own until it is refreshed: what is written into its matrix changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import OneRank

from .problems import laplacian, numbers, plate

pyamg = pytest.importorskip("pyamg")


def _of_pyamg(A: Any) -> Any:
    return linalg.from_pyamg(pyamg.smoothed_aggregation_solver(A.tocsr(), max_coarse=20))


ONE = OneRank()


def spread(A: Any) -> Any:
    return mpi.partition(A, ONE)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "block_jacobi": linalg.block_jacobi,
    "chebyshev": linalg.chebyshev,
    "block_ssor": lambda A: linalg.block_ssor(A, 1.2),
    "ilu0": linalg.ilu0,
    "ic0": lambda A: linalg.ic0(A, order="natural"),
    "smoothed_aggregation": lambda A: linalg.smoothed_aggregation(A, max_coarse=20),
    "jacobi and W": lambda A: linalg.smoothed_aggregation(A, max_coarse=20, smoother="jacobi", cycle="W"),
    "a hierarchy of one level": linalg.smoothed_aggregation,
    "from_pyamg": _of_pyamg,
    "ranks, block_jacobi": lambda A: linalg.block_jacobi(spread(A)),
}
WRITES: dict[str, Callable[[Any], None]] = {
    "in place": lambda A: A.data.__imul__(1.5),
    "zeroed": lambda A: A.data.fill(0),
    "another array": lambda A: setattr(A, "data", 3 * A.data),
}


def system(name: str) -> Any:
    return laplacian(128) if name == "from_pyamg" else plate(8)[0]


def other_numbers(A: Any) -> Any:
    factors = np.random.default_rng(3).uniform(0.7, 1.4, A._block_shape[0])
    return A.scale_block_rows(factors).scale_block_cols(factors)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", MAKERS)
def test_writes_into_the_matrix_change_nothing_until_a_refresh(name: str, write: str) -> None:
    A, make = system(name), MAKERS[name]
    original, other, r = A.copy(), other_numbers(A), numbers(A.shape[0])
    M = make(A)
    before, turned = M @ r, M.rmatvec(r)
    WRITES[write](A)
    np.testing.assert_array_equal(M @ r, before)
    np.testing.assert_array_equal(M.rmatvec(r), turned)
    assert linalg.cg(original, r, M=M)[1] == 0
    A.data = other.data.copy()
    M.refresh(spread(A) if name.startswith("ranks") else A)
    if name != "from_pyamg":  # its prolongators stay those of the first numbers
        np.testing.assert_allclose(M @ r, make(other) @ r, rtol=1e-10, atol=1e-12)
    after = M @ r
    assert not np.allclose(after, before)
    A.data *= 2
    np.testing.assert_array_equal(M @ r, after)
    assert linalg.cg(other, r, M=M)[1] == 0


@pytest.mark.parametrize("make", [linalg.chebyshev, lambda D: linalg.smoothed_aggregation(D, max_coarse=20)])
def test_those_over_ranks_have_numbers_of_their_own(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bsrgemm.interop.mpi import multigrid

    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    A = plate(12)[0]
    D, E, r = spread(A), spread(other_numbers(A)), numbers(A.shape[0])
    M = make(D)
    before = M @ r
    D.interior.data *= 4
    np.testing.assert_array_equal(M @ r, before)
    M.refresh(E)
    np.testing.assert_array_equal(M @ r, make(E) @ r)
    with pytest.raises(TypeError, match="A: wanted a DistributedMatrix, got "):
        M.refresh(A)
    with pytest.raises(TypeError, match="A: wanted a bsr_array or bsr_matrix, got DistributedMatrix"):
        linalg.chebyshev(A).refresh(D)


def test_that_of_a_batch_has_numbers_of_its_own() -> None:
    A = bg.bsr_batch([laplacian(6, 2), 2 * laplacian(6, 2)])
    M: Any = linalg.block_jacobi(A)
    before = M.toarray()
    A.data[...] *= 4
    np.testing.assert_array_equal(M.toarray(), before)
    M.refresh(A)
    np.testing.assert_array_equal(M.toarray(), before / 4)
    for other, error, words in (
        (A[0], TypeError, "A: wanted a bsr_batch of float64 on 'cpu', got .*bsr_array"),
        (A.astype("float32"), TypeError, "A: wanted a bsr_batch of float64 on 'cpu', got float32 on 'cpu'"),
        (bg.bsr_batch([laplacian(6, 2)]), ValueError, r"A: wanted shape \(2, 12, 12\) in blocks of \(2, 2\), got \(1,"),
    ):
        with pytest.raises(error, match=words + ".*; block_jacobi"):
            M.refresh(other)


@pytest.mark.parametrize("name", MAKERS)
def test_matrices_that_do_not_fit_are_refused_and_change_nothing(name: str) -> None:
    A, make = system(name), MAKERS[name]
    take = spread if name.startswith("ranks") else lambda A: A
    M, r = make(A), numbers(A.shape[0])
    before = M @ r
    n, spoiled = A.shape[0], A.copy()
    spoiled.data[...] = np.nan
    for other, error in (
        (A[: n // 2, : n // 2], ValueError),
        (A.tobsr((4, 4)), ValueError),
        (A.astype("float32"), TypeError),
        (spoiled, ValueError),
    ):
        with pytest.raises(error, match="A: wanted "):
            M.refresh(take(other))
        np.testing.assert_array_equal(M @ r, before)
    if "jacobi" not in name.split("_")[-1] and name != "chebyshev":
        with pytest.raises(ValueError, match=r"A: wanted the blocks of the matrix .*, got other.*; .*A. makes a"):
            M.refresh(A @ A)


def test_a_preconditioner_of_a_user_says_how_to_refresh_it() -> None:
    A = laplacian(8)

    class Scaled(linalg.Preconditioner):
        def __init__(self) -> None:
            self._made_of(A)

        def _apply(self, r: Any) -> Any:
            return r / 2

    with pytest.raises(NotImplementedError, match="refresh: Scaled has no numbers of a matrix; define _set_up"):
        Scaled().refresh(A)
    with pytest.raises(ValueError, match=r"A: wanted shape \(8, 8\) in blocks of .*; Scaled\(A\) makes another one"):
        Scaled().refresh(laplacian(9))


def test_the_index_arrays_are_shared() -> None:
    A = plate(8)[0]
    M = linalg.smoothed_aggregation(A, max_coarse=20)
    assert M.levels[0].indices is A.indices and not np.shares_memory(M.levels[0].data, A.data)
