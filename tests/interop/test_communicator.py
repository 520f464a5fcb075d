"""What ranks tell each other: one process, ranks as threads, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from bsrgemm.interop.communicator import Communicator, OneRank, as_communicator, same, together

from .ranks import outcomes_of, run


def test_one_rank_reduces_gathers_and_sends_to_itself() -> None:
    comm = OneRank()
    assert (comm.rank, comm.size) == (0, 1)
    x = np.arange(3.0)
    for operation in ("sum", "max", "min"):
        np.testing.assert_array_equal(comm.allreduce(x, operation), x)
    (part,) = comm.allgather(x)
    part[0] = 9
    assert x[0] == 0
    y = np.zeros((3, 1))
    comm.exchange({0: x}, {0: y}).wait()
    np.testing.assert_array_equal(y[:, 0], x)
    assert comm.broadcast("text") == "text"
    comm.barrier()
    comm.refuse([], [])


def test_one_rank_refuses_other_ranks_and_views() -> None:
    comm, x = OneRank(), np.zeros((4, 4))
    with pytest.raises(ValueError, match="sends: wanted ranks from 0 to 0, got 1"):
        comm.exchange({1: x}, {})
    with pytest.raises(ValueError, match="receives: wanted a contiguous array for rank 0"):
        comm.exchange({0: x}, {0: x.T[1:]})
    with pytest.raises(ValueError, match="wanted the same ranks"):
        comm.exchange({0: x}, {})
    with pytest.raises(ValueError, match="operation: wanted 'sum', 'max' or 'min', got 'prod'"):
        comm.allreduce(x, "prod")


def test_none_and_communicators_are_taken_and_others_are_refused() -> None:
    assert isinstance(as_communicator(None), OneRank)
    comm = OneRank()
    assert as_communicator(comm) is comm
    assert isinstance(comm, Communicator)
    for wrong in (3, "COMM_WORLD", object()):
        with pytest.raises(TypeError, match=r"comm: wanted None, a communicator of mpi4py .* got"):
            as_communicator(wrong)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_error_of_one_rank_is_raised_by_all(size: int) -> None:
    def program(comm: Any) -> None:
        with together(comm):
            if comm.rank == size - 1:
                raise ValueError("x: wanted numbers")

    found = outcomes_of(size, program)
    assert all(isinstance(error, ValueError) and "x: wanted numbers" in str(error) for error in found)
    if size > 1:
        assert all(f"[on rank {size - 1}]" in str(error) for error in found)


def test_errors_of_all_ranks_and_of_unknown_kinds_are_raised() -> None:
    class Odd(Exception):
        pass

    def program(comm: Any) -> None:
        with together(comm):
            raise Odd("not known elsewhere")

    for error in outcomes_of(3, program):
        assert type(error) is RuntimeError and "[on all ranks]" in str(error)

    def nothing(comm: Any) -> int:
        with together(comm):
            pass
        return comm.rank

    assert run(3, nothing) == [0, 1, 2]


def test_ranks_with_other_values_are_named() -> None:
    for error in outcomes_of(3, lambda comm: same(comm, "panel", "float32" if comm.rank == 2 else "float64")):
        assert isinstance(error, ValueError)
        assert str(error) == "panel: wanted the same on all ranks, got float64 on rank 0 and float32 on rank 2"
    assert run(3, lambda comm: same(comm, "panel", "float64")) == [None] * 3


def test_nothing_of_mpi4py_is_imported_unless_asked_for() -> None:
    code = (
        "import sys, bsrgemm; assert 'bsrgemm.interop' not in sys.modules; import bsrgemm.interop.mpi as mpi; "
        "mpi.partition(bsrgemm.eye(2, blocksize=(2, 2))); assert not [m for m in sys.modules if 'mpi4py' in m]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
