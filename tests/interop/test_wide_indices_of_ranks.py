"""Ranks with index arrays of 64 bits: nothing is counted in 32; and operands that only one rank has otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import communicator, mpi
from bsrgemm.interop.communicator import OneRank
from bsrgemm.interop.mpi import matrix, multigrid, panels, sparse

from ..array.test_counting import counting_in_64_bits
from ..linalg.problems import hermitian
from ..linalg.test_wide_indices import widening
from .ranks import outcomes_of, run

pytestmark = pytest.mark.fake


@pytest.fixture(params=["cuda", "cpu"])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return widening(request.param, monkeypatch)


def test_ranks_count_in_64_bits(wide: Any) -> None:
    A = wide(hermitian(24))
    inside, outside, columns = matrix._split(A, 3, 9)
    for part in (inside, outside):
        assert part.indices.dtype == part.indptr.dtype == np.int64
    assert columns.dtype == np.int64
    D = panels._distributed(A, np.array([0, 12], np.int32), None, OneRank(), None)
    assert D.row_starts.dtype == D.column_starts.dtype == np.int64
    assert D.panel().indices.dtype == np.int64
    assert panels._row_starts(np.array([0, 2**31 - 2, 2**31 - 1], np.int32), 2, None).tolist() == [0, 1, 2]
    assert panels._row_starts(np.array([0, 2**31, 2**32]), 2, None).tolist() == [0, 1, 2]


def test_lengths_that_ranks_tell_each_other_have_64_bits() -> None:
    A = hermitian(48)

    def program(comm: Any) -> list[Any]:
        told: list[Any] = []
        gather, exchange = comm.allgather, comm.exchange

        def noting(array: Any) -> Any:
            told.append(array.dtype)
            return gather(array)

        comm.allgather = noting
        found = sparse.exchanged(comm, [np.arange(k, dtype=np.int32) for k in (1, 2)])
        assert [x.tolist() for x in found] == [list(range(comm.rank + 1))] * 2
        D = panels.from_local(panels.partition(A, comm).panel(), comm)
        assert D._halo.index.dtype == np.int64

        def watching(sends: Any, receives: Any) -> Any:
            told.extend(x.dtype for x in (*sends.values(), *receives.values()))
            return exchange(sends, receives)

        comm.exchange = watching
        rows = sparse._RowExchange(D._halo, D.panel(), back=False)
        assert [x.dtype for x in rows._ends] == [np.int64] * 2
        assert told[-4:-2] == [np.int64] * 2  # lengths first, then block columns
        return told[:1]

    assert run(2, program) == [[np.int64]] * 2


def test_products_of_wide_panels(wide: Any) -> None:
    A = wide(hermitian(24))
    D = panels._distributed(A, np.array([0, 12]), None, OneRank(), None)
    found = sparse.Product()(D, D.panel())
    turned = sparse.TransposedProduct()(D, D.panel())
    whole = sparse.Gathering()(D.panel(), OneRank())
    dense = hermitian(24).toarray()
    for one, want in ((found, dense @ dense), (turned, dense.conj().T @ dense), (whole, dense)):
        np.testing.assert_allclose(one.get().toarray(), want)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_hierarchy_refuses_blocks_that_it_was_not_made_of(place: str) -> None:
    """The same number of blocks, one of them elsewhere, on rank 1 alone."""
    dense = 4 * np.eye(24) - np.eye(24, k=1) - np.eye(24, k=-1)
    other = dense.copy()
    if place == "inside":
        other[20, 21], other[20, 23] = 0, -1
    else:
        other[12, 11], other[14, 11] = 0, -1

    def program(comm: Any) -> None:
        first, second = (mpi.partition(bg.bsr_array(x, blocksize=(1, 1)), comm, rows=[12, 12]) for x in (dense, other))
        linalg.smoothed_aggregation(first).refresh(second)

    for error in outcomes_of(2, program):
        assert isinstance(error, ValueError)
        assert str(error).startswith("A: wanted the blocks of the matrix of the hierarchy, got other ind")
        assert str(error).endswith("[on rank 1]")


@pytest.mark.parametrize("size", [1, 2])
def test_modes_that_depend_on_each_other_leave_singular_blocks_also_when_refreshing(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 4)
    n = 180
    A = bg.bsr_array(2.5 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1), blocksize=(1, 1))

    def program(comm: Any) -> None:
        D, twice = mpi.partition(A, comm), mpi.partition(2 * A, comm)
        M = linalg.smoothed_aggregation(D, np.tile([1.0, 2.0], (len(D.rows), 1)), max_coarse=4)
        assert len(M._levels) >= 2
        b = np.ones(len(D.rows))
        before = M @ b
        M.refresh(twice)
        np.testing.assert_allclose(M @ b, before / 2)
        assert linalg.cg(twice, b, M=M)[1] == 0

    run(size, program)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 2, "size": 2}, "rank: wanted 0 to 1, got 2"),
        ({"rank": -1, "size": 2}, "rank: wanted an integer from 0 on, got -1"),
        ({"rank": 0, "size": 0}, "size: wanted an integer from 1 on, got 0"),
        ({"rank": 0, "size": 2, "multiple": 0}, "multiple: wanted an integer from 1 on, got 0"),
    ],
)
def test_splits_refuse_ranks_that_are_not_there(given: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mpi.zigzag_split(np.zeros((8, 1)), **given)
    multiple = given.get("multiple", 1)
    if multiple < 1:
        with pytest.raises(ValueError, match=words):
            mpi.zigzag_join([np.zeros((8, 1))], multiple=multiple)


def test_numbers_of_rows_and_ghosts_are_told_in_64_bits() -> None:
    A = hermitian(48)

    def program(comm: Any) -> None:
        panel = mpi.partition(A, comm).panel()
        told: list[Any] = []
        gather, exchange = comm.allgather, comm.exchange

        def gathering(array: Any) -> Any:
            told.append(array.dtype)
            return gather(array)

        def exchanging(sends: Any, receives: Any) -> Any:
            told.extend(x.dtype for x in (*sends.values(), *receives.values()))
            return exchange(sends, receives)

        comm.allgather, comm.exchange = gathering, exchanging
        mpi.from_local(panel, comm)
        assert {dtype for dtype in told if dtype.kind == "i"} == {np.dtype(np.int64)}

    run(2, program)


def test_a_node_that_is_coupled_with_another_rank_alone_is_in_an_aggregate() -> None:
    """One number of the block that couples them is enough."""
    dense = 4 * np.eye(4)
    dense[0, 2] = dense[2, 0] = -1
    A = bg.bsr_array(dense, blocksize=(2, 2))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, rows=[1, 1])
        T, modes = multigrid._tentative(D, np.eye(2), 0.0)
        return T.shape, modes.shape

    assert run(2, program) == [((2, 2), (2, 2))] * 2

    def on_one(comm: Any) -> Any:
        D = mpi.partition(A, comm, rows=[0, 2])
        return multigrid._tentative(D, np.ones((len(D.rows), 2)), 0.0)[0]

    nothing = run(2, on_one)[0]
    assert nothing.shape == (0, 0) and nothing.indptr.tolist() == [0]


def test_bytes_that_are_gathered_by_mpi_are_counted_in_64_bits() -> None:
    class Loop:
        """One rank of MPI, which gives itself what it sends."""

        @staticmethod
        def Allgather(sent: Any, received: Any) -> None:
            received[0][:] = sent[0]

        @staticmethod
        def Allgatherv(sent: Any, received: Any) -> None:
            bytes_, (count,), (start,), _ = received
            assert (count, start) == (sent[0].nbytes, 0)
            bytes_[...] = sent[0]

    comm = object.__new__(communicator.MpiCommunicator)
    comm._mpi, comm._MPI, comm.rank, comm.size = Loop(), SimpleNamespace(BYTE=None), 0, 1
    small = (np.arange(6.0).reshape(3, 2, 1), np.ones((2, 3), np.int32), np.ones(4, np.float16), np.ones((0, 2)))
    for x in (*small, np.arange(60.0).reshape(3, 20, 1), np.ones((20, 3), np.int32), np.ones(61, np.float16)):
        with counting_in_64_bits(communicator):
            (found,) = comm.allgather(x)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, x)
