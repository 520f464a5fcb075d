"""What the ranks of MPI run in `test_mpi_processes`: ``mpiexec -n 2 python -m tests.interop.mpi_programs NAME``.

With ``--device cuda`` before the names, arrays are on the current GPU, which all ranks share. Rank 0 prints a line at
the end; a check that fails ends all ranks.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.registry import by_name, host
from bsrgemm.interop import mpi
from bsrgemm.interop.communicator import MpiCommunicator, as_communicator, together
from bsrgemm.interop.mpi import multigrid

from ..linalg.problems import numbers, plate

WORLD = MPI.COMM_WORLD
#: Where arrays are: the backend that the command line names.
PLACE = host()


def placed(x: Any) -> Any:
    """An array of the host where the programs work."""
    return PLACE.from_host(x)


def on_host(x: Any) -> Any:
    return PLACE.to_host(x)


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
            target = placed(np.zeros((length, 2), kind))
            comm.exchange({after: placed(np.full((length, 2), rank + 1, kind))}, {before: target}).wait()
            assert (on_host(target) == kind.type(before + 1)).all()
    parts = comm.allgather(placed(np.arange(3.0 * rank).reshape(rank, 3)))
    assert [part.shape for part in parts] == [(r, 3) for r in range(size)]
    assert all((on_host(part) == np.arange(3.0 * r).reshape(r, 3)).all() for r, part in enumerate(parts))
    for last in (14, 15, 16, 1000):  # up to 15 numbers travel with their length
        parts = comm.allgather(placed(np.arange(float(last if rank == size - 1 else 15))))
        assert [len(part) for part in parts] == [15] * (size - 1) + [last]
        assert all((on_host(part) == np.arange(len(part))).all() for part in parts)
    assert [part.shape for part in comm.allgather(placed(np.zeros((2, 0))))] == [(2, 0)] * size
    values = placed(np.array([0.1, 1e16, -1e16][rank % 3]))
    in_order = [np.array([0.1, 1e16, -1e16][r % 3]) for r in range(size)]
    want = in_order[0]
    for value in in_order[1:]:
        want = want + value
    assert on_host(comm.allreduce(values)) == want
    mine = placed(np.array([rank]))
    assert int(comm.allreduce(mine, "max")[0]) == size - 1 and int(comm.allreduce(mine, "min")[0]) == 0
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
    x, X, b, modes = (
        placed(v) for v in (numbers(n), numbers((n, 3)), numbers(n, seed=5), linalg.rigid_body_modes(place))
    )
    A = A.to_device(PLACE.name)
    multigrid.GATHERED_ROWS = 40
    D = mpi.partition(A if WORLD.rank == 0 else None, WORLD, device=PLACE.name)

    def checked(found: Any, want: Any, tolerance: float) -> None:
        if WORLD.rank == 0:
            want = on_host(want)
            np.testing.assert_allclose(on_host(found), want, rtol=tolerance, atol=tolerance * abs(want).max())

    parts = [D.scatter(v if WORLD.rank == 0 else None) for v in (x, X, b, modes)]
    checked(D.gather(D @ parts[0]), A @ x, 1e-13)
    checked(D.gather(D @ parts[1]), A @ X, 1e-13)
    checked(D.gather(D.T @ parts[1]), A.T @ X, 1e-13)
    assert abs(float(D.vdot(parts[0], parts[2])) - float(x @ b)) < 1e-10
    assert abs(float(D.norm(parts[2])) - float((b @ b) ** 0.5)) < 1e-12 * n
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
    M.refresh(mpi.partition(2 * A if WORLD.rank == 0 else None, WORLD, device=PLACE.name))
    half = M @ parts[2]
    M.refresh(D)
    assert (M @ parts[2]).tobytes() == before.tobytes()
    before = on_host(before)
    np.testing.assert_allclose(2 * on_host(half), before, rtol=1e-9, atol=1e-12 * abs(before).max())


#: Communicators that `freed` makes. MPICH has room for about 2,000 at a time.
FREED = 2200
#: What queries see in `attention_ring`: name and options of the call.
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "mask": {"mask": (320, 100)},
}


def attention_ring() -> None:
    """Attention over ranks and its gradients, beside attention of one process on the host in float64."""
    comm = as_communicator(WORLD)
    tokens, heads = 320, (4, 2)
    for dtype, tolerance in (("float64", 1e-12), ("float32", 3e-5), (bg.dtypes.BFLOAT16, 2e-2)):
        shapes = [(1, h, tokens, 64) for h in (heads[0], heads[1], heads[1], heads[0])]
        whole = [numbers(shape, seed=i).astype(dtype) for i, shape in enumerate(shapes)]
        for name, rule in RULES.items():
            options, here = dict(rule), dict(rule)
            if "mask" in rule:
                mask = bg.BlockMask.window(rule["mask"][0], left=rule["mask"][1], right=0, block=64, device="cpu")
                options["mask"], here["mask"] = mask, mask.to_device(PLACE.name)
            q, k, v, dout = (x.astype(np.float64) for x in whole)
            out, lse = bg.attention(q, k, v, return_lse=True, **options)
            want = [out, lse, *bg.attention_backward(dout, q, k, v, out, lse, **options)]
            multiple = 64 if "mask" in rule else 1
            parts = [placed(mpi.zigzag_split(x, comm.rank, comm.size, axis=2, multiple=multiple)) for x in whole]
            found = list(mpi.ring_attention(*parts[:3], comm=comm, return_lse=True, multiple=multiple, **here))
            found += mpi.ring_attention_backward(parts[3], *parts[:3], *found, comm=comm, multiple=multiple, **here)
            for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, want, strict=True):
                mine = mpi.zigzag_split(y, comm.rank, comm.size, axis=2, multiple=multiple)
                assert x.shape == mine.shape  # a rank may have no tokens
                error = abs(on_host(x).astype(np.float64) - mine).max(initial=0) / abs(y).max()
                assert error <= tolerance, (name, np.dtype(dtype).name, what, error)


def bad_input() -> None:
    """All ranks raise what one of them finds, and go on."""
    A, _ = plate(6)
    B = A.astype(np.float32)
    raises(
        ValueError, "panel: wanted the same on all ranks", lambda: mpi.from_local(B if WORLD.rank == 1 else A, WORLD)
    )
    D = mpi.partition(A, WORLD, device=PLACE.name)
    wrong = placed(np.ones(3) if WORLD.rank == 1 else np.ones(len(D.rows)))
    raises(ValueError, "[on rank 1]", lambda: linalg.cg(D, wrong))
    if WORLD.rank == 1:
        raises(ValueError, "x: wanted the part of rank 1", lambda: D @ wrong)
    elif 1 in D._halo.receives:
        raises(RuntimeError, "from rank 1, which has sent 0", lambda: D @ wrong)
    else:
        D @ wrong  # needs nothing of rank 1
    # Rank 1 sends too many bytes and gets too few: all that wait for it raise, and the next product is right.
    for other in (np.ones(len(D.rows), np.complex128), np.ones((len(D.rows), 3))):
        if WORLD.rank == 1 or 1 in D._halo.receives:
            raises(
                RuntimeError,
                "was given an array of another dtype",
                lambda x=other: D @ placed(x if WORLD.rank == 1 else np.ones(len(D.rows))),
            )
        else:
            D @ placed(np.ones(len(D.rows)))
    y = D @ placed(np.ones(len(D.rows)))
    want = A @ np.ones(A.shape[0])
    np.testing.assert_allclose(on_host(y), want[D.rows.start : D.rows.stop], rtol=1e-13, atol=1e-10)
    assert D.gather(y) is None or WORLD.rank == 0
    for kind, u in ((np.float32, placed(np.ones(len(D.rows), np.float32))), (None, placed(np.ones(1)))):
        mine = u if WORLD.rank == 1 else placed(np.ones(len(D.rows)))
        error = ValueError if kind or WORLD.rank == 1 else RuntimeError
        raises(error, "u", lambda x=mine: D.vdot(x, x))
    raises(TypeError, "a communicator cannot be pickled", lambda: pickle.dumps(D))


def freed() -> None:
    """A communicator is freed with that of the user, so that no number of them is too large."""
    A, _ = plate(4)
    for _ in range(FREED):
        comm = WORLD.Dup()
        as_communicator(comm)
        comm.Free()
    comm = WORLD.Dup()
    old = mpi.partition(A, comm)
    comm.Free()
    raises(ValueError, "comm: the communicator was freed", lambda: old @ np.ones(len(old.rows)))
    own = MpiCommunicator(WORLD)
    D = mpi.partition(A, own)
    D @ np.ones(len(D.rows))
    own.free()
    own.free()
    raises(ValueError, "comm: the communicator was freed", lambda: mpi.partition(A, own))


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
    "attention_ring": attention_ring,
    "bad_input": bad_input,
    "freed": freed,
    "raise": lambda: dies("raise"),
    "kill": lambda: dies("kill"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the programs that the command line names, one after the other."""
    global PLACE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("names", nargs="+", choices=sorted(PROGRAMS))
    options = parser.parse_args(argv)
    PLACE = by_name(options.device)
    for name in options.names:
        PROGRAMS[name]()
        WORLD.Barrier()
    if WORLD.rank == 0:
        print(f"{WORLD.size} ranks: {', '.join(options.names)} passed")


if __name__ == "__main__":
    main()
