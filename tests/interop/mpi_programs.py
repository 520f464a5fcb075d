"""What the ranks of MPI run in `test_mpi_processes`: ``mpiexec -n 2 python -m tests.interop.mpi_programs NAME``.

Rank 0 prints a line at the end; a check that fails ends all ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import MpiCommunicator, as_communicator, together
from bsrgemm.interop.mpi import multigrid

from ..linalg.problems import numbers, plate

WORLD = MPI.COMM_WORLD


def raises(kind: type[Exception], words: str, call: Any) -> None:
    """The call raises such an error on this rank."""
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error: {words}")


def communicator() -> None:
    """The methods of a communicator of mpi4py."""
    comm = as_communicator(WORLD)
    rank, size = comm.rank, comm.size
    assert isinstance(comm, MpiCommunicator) and as_communicator(WORLD) is comm and not comm.cuda_aware
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in ("float64", "float16", "complex64", "int8", "bfloat16"):
        kind = bg.dtypes.BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
        for length in (0, 1, 5, 100_000):
            target = np.zeros((length, 2), kind)
            comm.exchange({after: np.full((length, 2), rank + 1, kind)}, {before: target}).wait()
            assert (target == kind.type(before + 1)).all()
    parts = comm.allgather(np.arange(3.0 * rank).reshape(rank, 3))
    assert [part.shape for part in parts] == [(r, 3) for r in range(size)]
    values = np.array([0.1, 1e16, -1e16][rank % 3])
    in_order = [np.array([0.1, 1e16, -1e16][r % 3]) for r in range(size)]
    want = in_order[0]
    for value in in_order[1:]:
        want = want + value
    assert comm.allreduce(values) == want
    assert comm.allreduce(np.array([rank]), "max")[0] == size - 1 and comm.allreduce(np.array([rank]), "min")[0] == 0
    assert comm.broadcast(("text", rank), size - 1) == ("text", size - 1)
    raises(TypeError, "wanted an intracommunicator", lambda: as_communicator(_intercommunicator()))
    raises(ValueError, "COMM_NULL", lambda: as_communicator(MPI.COMM_NULL))

    def fails() -> None:
        with together(comm):
            if rank == 1:
                raise ValueError("x: wrong")

    raises(ValueError, "x: wrong [on rank 1]", fails)


def _intercommunicator() -> Any:
    mine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    return mine.Create_intercomm(0, WORLD, (WORLD.rank + 1) % 2)


def equality() -> None:
    """Products, CG with every preconditioner, multigrid over ranks: as on one rank, and with the same bits again."""
    A, place = plate(24)
    n = A.shape[0]
    x, X, b, modes = numbers(n), numbers((n, 3)), numbers(n, seed=5), linalg.rigid_body_modes(place)
    multigrid.GATHERED_ROWS = 40
    D = mpi.partition(A if WORLD.rank == 0 else None, WORLD)

    def checked(found: Any, want: Any, tolerance: float) -> None:
        if WORLD.rank == 0:
            np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance * abs(want).max())

    parts = [D.scatter(v if WORLD.rank == 0 else None) for v in (x, X, b, modes)]
    checked(D.gather(D @ parts[0]), A @ x, 1e-13)
    checked(D.gather(D @ parts[1]), A @ X, 1e-13)
    checked(D.gather(D.T @ parts[1]), A.T @ X, 1e-13)
    assert abs(D.vdot(parts[0], parts[2]) - x @ b) < 1e-10
    makers: list[Any] = [
        lambda A, modes: None,
        lambda A, modes: linalg.block_jacobi(A),
        lambda A, modes: linalg.chebyshev(A),
        lambda A, modes: linalg.smoothed_aggregation(A, modes, max_coarse=40),
    ]
    counts = []
    for make in makers:
        steps: list[list[int]] = [[], []]
        want, _ = linalg.cg(A, b, M=make(A, modes), rtol=1e-10, callback=lambda _, s=steps: s[0].append(1))
        M = make(D, parts[3])
        y, info = linalg.cg(D, parts[2], M=M, rtol=1e-10, callback=lambda _, s=steps: s[1].append(1))
        again, _ = linalg.cg(D, parts[2], M=M, rtol=1e-10)
        assert info == 0 and again.tobytes() == y.tobytes()
        checked(D.gather(y), want, 1e-7)
        counts.append((len(steps[0]), len(steps[1])))
    assert all(one == several for one, several in counts[:3]), counts
    assert abs(counts[3][0] - counts[3][1]) <= 2, counts
    before = M @ parts[2]
    M.refresh(mpi.partition(2 * A if WORLD.rank == 0 else None, WORLD))
    half = M @ parts[2]
    M.refresh(D)
    assert (M @ parts[2]).tobytes() == before.tobytes()
    np.testing.assert_allclose(2 * half, before, rtol=1e-9, atol=1e-12 * abs(before).max())


def bad_input() -> None:
    """All ranks raise what one of them finds, and go on."""
    A, _ = plate(6)
    B = A.astype(np.float32)
    raises(
        ValueError, "panel: wanted the same on all ranks", lambda: mpi.from_local(B if WORLD.rank == 1 else A, WORLD)
    )
    D = mpi.partition(A, WORLD)
    wrong = np.ones(3) if WORLD.rank == 1 else np.ones(len(D.rows))
    raises(ValueError, "[on rank 1]", lambda: linalg.cg(D, wrong))
    if WORLD.rank == 1:
        raises(ValueError, "x: wanted the part of rank 1", lambda: D @ wrong)
    elif 1 in D._halo.receives:
        raises(RuntimeError, "from rank 1, which has sent 0", lambda: D @ wrong)
    else:
        D @ wrong  # needs nothing of rank 1
    y = D @ np.ones(len(D.rows))
    assert D.gather(y) is None or WORLD.rank == 0


def dies(how: str) -> None:
    """Rank 1 fails in the middle while the others wait for it."""
    A, _ = plate(12)
    D = mpi.partition(A, WORLD)
    b = np.ones(len(D.rows))
    calls = []

    def fail(_: Any) -> None:
        calls.append(1)
        if WORLD.rank == 1 and len(calls) == 5:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("this rank has failed")

    linalg.cg(D, b, rtol=1e-12, callback=fail)
    time.sleep(60)


PROGRAMS = {
    "communicator": communicator,
    "equality": equality,
    "bad_input": bad_input,
    "raise": lambda: dies("raise"),
    "kill": lambda: dies("kill"),
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        PROGRAMS[name]()
        WORLD.Barrier()
    if WORLD.rank == 0:
        print(f"{WORLD.size} ranks: {', '.join(sys.argv[1:])} passed")
