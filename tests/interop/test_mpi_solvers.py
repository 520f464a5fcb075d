"""Solvers over ranks that are threads: solutions, iterations and errors are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.base import Backend
from bsrgemm.interop import mpi
from bsrgemm.interop.mpi import matrix, multigrid, sparse
from bsrgemm.linalg import smoothers

from .. import fake_cupy
from ..linalg.problems import hermitian, lopsided, numbers, plate
from .ranks import ThreadRank, _World, outcomes_of, run

pytestmark = pytest.mark.fake

PRECONDITIONERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda A: None,
    "block_jacobi": linalg.block_jacobi,
    "chebyshev": lambda A: linalg.chebyshev(A, 4),
}


def solved(A: Any, b: Any, M: Any, method: str = "cg") -> tuple[Any, int, int]:
    """x, info and the number of iterations."""
    steps = []
    x, info = getattr(linalg, method)(A, b, M=M, rtol=1e-10, callback=lambda _: steps.append(1))
    return x, info, len(steps)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_conjugate_gradients_take_the_iterations_of_one_rank(name: str, size: int) -> None:
    A, _ = plate(12)
    b = numbers((A.shape[0], 2))
    want, _, steps = solved(A, b, PRECONDITIONERS[name](A))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        x, info, count = solved(D, D.scatter(b), PRECONDITIONERS[name](D))
        return D.gather(x), info, count

    results = run(size, program)
    assert [(info, count) for _, info, count in results] == [(0, steps)] * size
    np.testing.assert_allclose(results[0][0], want, rtol=1e-7, atol=1e-9 * abs(want).max())


@pytest.mark.parametrize("size", [1, 3])
def test_norms_of_one_right_hand_side_are_summed_over_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of the backend knows the rows of one rank, so that it is not for spread systems."""
    A, _ = plate(12)
    b = numbers((A.shape[0],))
    want, _, steps = solved(A, b, None)

    def advance(*_: Any, **__: Any) -> None:
        raise AssertionError("a step of one rank")

    monkeypatch.setattr(Backend, "advance", advance)
    with pytest.raises(AssertionError, match="a step of one rank"):
        solved(A, b, None)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        x, info, count = solved(D, D.scatter(b), None)
        return D.gather(x), info, count

    results = run(size, program)
    assert [(info, count) for _, info, count in results] == [(0, steps)] * size
    np.testing.assert_allclose(results[0][0], want, rtol=1e-7, atol=1e-9 * abs(want).max())


@pytest.mark.parametrize("method", ["cg", "minres", "bicgstab", "gmres", "fgmres"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_all_krylov_methods_solve_spread_systems(method: str, dtype: str) -> None:
    """Also with a rank that has fewer rows than GMRES has vectors, and one without rows."""
    A = (hermitian if method in ("cg", "minres") else lopsided)(40, dtype)
    b = numbers((40, 2), dtype)

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, rows=[1, 0, 19])
        x, info, _ = solved(D, D.scatter(b), linalg.block_jacobi(D), method)
        return D.gather(x), info

    results = run(3, program)
    assert [info for _, info in results] == [0] * 3
    np.testing.assert_allclose(A @ results[0][0], b, atol=1e-8)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("cycle", ["V", "W"])
def test_multigrid_takes_about_the_iterations_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, size: int, cycle: str
) -> None:
    """Aggregates do not cross ranks, so the hierarchy differs a little: 10 % of the iterations, or one."""
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    A, place = plate(40)
    b, modes = numbers(A.shape[0]), linalg.rigid_body_modes(place)
    options: dict[str, Any] = {"max_coarse": 40, "cycle": cycle}
    _, _, steps = solved(A, b, linalg.smoothed_aggregation(A, modes, **options))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        M = linalg.smoothed_aggregation(D, D.scatter(modes), **options)
        x, info, count = solved(D, D.scatter(b), M)
        return D.gather(x), info, count, M.report(), len(M._levels)

    results = run(size, program)
    x, info, count, report, spread = results[0]
    assert info == 0 and abs(count - steps) <= max(1, 0.1 * steps) and spread >= 2
    np.testing.assert_allclose(A @ x, b, atol=1e-8)
    assert len({other[3] for other in results}) == 1
    assert f"{size} ranks" in report and "every rank" in report and f"{cycle}-cycle" in report


@pytest.mark.parametrize("options", [{}, {"cycle": "W"}, {"smoother": "jacobi", "degree": 3, "theta": 0.1}])
def test_levels_that_are_small_from_the_start_are_gathered(options: dict[str, Any]) -> None:
    """A cycle is the one of one process then, with all its options."""
    A, _ = plate(16)
    b = numbers(A.shape[0])
    M = linalg.smoothed_aggregation(A, max_coarse=20, **options)
    assert len(M.levels) > 2

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        N = linalg.smoothed_aggregation(D, max_coarse=20, **options)
        first = D.gather(N @ D.scatter(b)), [level.shape for level in N.levels]
        N.refresh(mpi.partition(other_numbers(A), comm))
        return *first, D.gather(N @ D.scatter(b))

    found, shapes, refreshed = run(2, program)[0]
    assert shapes == [level.shape for level in M.levels]
    np.testing.assert_array_equal(found, M @ b)
    M.refresh(other_numbers(A))
    np.testing.assert_array_equal(refreshed, M @ b)


def other_numbers(A: Any, seed: int = 1) -> Any:
    """A matrix with the pattern of A, definite if A is."""
    factors = np.sqrt(1 + 0.5 * np.random.default_rng(seed).random(A.shape[0] // A.blocksize[0]))
    return A.scale_block_rows(factors).scale_block_cols(factors).astype(A.dtype)


@pytest.mark.parametrize("rows", [[1600], [600, 1000], [0, 900, 700]])
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_refreshing_gives_the_bits_of_a_new_hierarchy(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], dtype: str
) -> None:
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    A, place = plate(40)
    A, modes = A.astype(dtype), linalg.rigid_body_modes(place).astype(dtype)
    B, b = other_numbers(A), numbers((A.shape[0], 2), dtype)

    def program(comm: Any) -> Any:
        D, E = (mpi.partition(X, comm, rows=rows) for X in (A, B))
        options: Any = {"near_nullspace": D.scatter(modes), "max_coarse": 40}
        M, fresh = linalg.smoothed_aggregation(D, **options), linalg.smoothed_aggregation(E, **options)
        assert len(M._levels) >= 2
        r = D.scatter(b)
        before = M @ r
        found = []
        for X in (E, D, E):
            sent = comm.sent
            M.refresh(X)
            found.append((M @ r, comm.sent - sent))
        sent = comm.sent
        linalg.smoothed_aggregation(E, **options)
        np.testing.assert_array_equal(found[0][0], fresh @ r)
        np.testing.assert_array_equal(found[1][0], before)
        np.testing.assert_array_equal(found[2][0], fresh @ r)
        assert not len(D.rows) or not np.array_equal(before, found[0][0])
        assert M.levels[0] is not E and [x.shape for x in M.levels] == [x.shape for x in fresh.levels]
        return found[2][1], comm.sent - sent

    for refreshed, new in run(len(rows), program):
        assert refreshed < new or not new, "lists and patterns are not sent again"


def test_refreshing_makes_no_plan_and_no_list_of_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    A, _ = plate(20)
    B = other_numbers(A)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a pattern is looked for again")

    def program(comm: Any) -> None:
        M, E = linalg.smoothed_aggregation(mpi.partition(A, comm), max_coarse=40), mpi.partition(B, comm)
        comm.barrier()
        if comm.rank == 0:
            for where, name in (
                (sparse, "plan"), (sparse, "Sum"), (sparse, "_RowExchange"), (matrix.Halo, "of"), (multigrid, "Sum"),
                (multigrid.aggregation, "aggregates"), (linalg.multigrid, "plan"),
            ):  # fmt: skip
                monkeypatch.setattr(where, name, refuse)
        comm.barrier()
        M.refresh(E)

    run(2, program)


def test_blocks_that_were_zero_may_get_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the numbers of a prolongator cancel at first, its blocks are kept."""
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    A, _ = plate(20)
    B = A.copy()
    row = np.repeat(np.arange(A.shape[0] // 2), np.diff(A.indptr))
    B.data[(row % 40 < 20) != (A.indices % 40 < 20)] = 0
    b = numbers(A.shape[0])

    def program(comm: Any) -> Any:
        D, E = mpi.partition(A, comm), mpi.partition(B, comm)
        M = linalg.smoothed_aggregation(E, max_coarse=40)
        M.refresh(D)
        return solved(D, D.scatter(b), M)[1:], solved(D, D.scatter(b), linalg.smoothed_aggregation(D, max_coarse=40))[2]

    (info, count), fresh = run(2, program)[0]
    assert info == 0 and count <= fresh + 5


def test_the_spectrum_is_found_from_the_same_vector_on_any_number_of_ranks() -> None:
    A, _ = plate(8)
    want = smoothers.spectrum(A, smoothers.inverse_blocks(A))

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        return smoothers.spectrum(D, D.inverse_blocks())

    for size in (1, 2, 3):
        np.testing.assert_allclose(run(size, program), np.broadcast_to(want, (size, 2)), rtol=1e-9)


def test_ranks_without_rows_take_part_in_multigrid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 20)
    A, _ = plate(16)
    b = numbers(A.shape[0])

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, rows=[0, 100, 156])
        x, info, _ = solved(D, D.scatter(b), linalg.smoothed_aggregation(D, max_coarse=20))
        return D.gather(x), info

    x, info = run(3, program)[0]
    assert info == 0
    np.testing.assert_allclose(A @ x, b, atol=1e-8)


def test_a_preconditioner_in_float32_serves_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    A, _ = plate(20)
    b = numbers(A.shape[0])

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        M = linalg.smoothed_aggregation(D.astype(np.float32), max_coarse=40)
        return solved(D, D.scatter(b), M)[1], M.dtype

    assert run(2, program)[0] == (0, np.float32)


def test_solvers_run_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    device = fake_cupy.backend()
    A, _ = plate(6)
    b = numbers(A.shape[0])

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm, device=device.name)
        y = D.scatter(device.from_host(b))
        found = []
        for make in (*PRECONDITIONERS.values(), lambda D: linalg.smoothed_aggregation(D, max_coarse=40)):
            x, info = linalg.cg(D, y, M=make(D), rtol=1e-10)
            assert info == 0
            found.append(D.gather(x))
        M = linalg.smoothed_aggregation(mpi.partition(other_numbers(A), comm, device=device.name), max_coarse=40)
        M.refresh(D)  # the last of the preconditioners before, bit by bit
        found.append(D.gather(linalg.cg(D, y, M=M, rtol=1e-10)[0]))
        return [device.to_host(x) for x in found] if comm.rank == 0 else None

    results = run(2, program)[0]
    for x in results:
        np.testing.assert_allclose(A @ x, b, atol=1e-8)
    np.testing.assert_array_equal(results[-1], results[-2])


def test_solutions_repeat_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multigrid, "GATHERED_ROWS", 40)
    A, _ = plate(16)
    b = numbers(A.shape[0])

    def program(comm: Any) -> bytes:
        D = mpi.partition(A, comm)
        found: bytes = solved(D, D.scatter(b), linalg.smoothed_aggregation(D, max_coarse=40))[0].tobytes()
        return found

    first = run(3, program)
    assert all(run(3, program) == first for _ in range(2))


def test_rows_of_a_rank_may_be_solved_by_what_one_process_has() -> None:
    """Incomplete factors of the blocks within a rank need no messages."""
    A, _ = plate(12)
    b = numbers(A.shape[0])

    def program(comm: Any) -> Any:
        D = mpi.partition(A, comm)
        return solved(D, D.scatter(b), linalg.ilu0(D.interior))[1:]

    (info, count), _ = run(2, program)
    assert info == 0 and count < solved(A, b, linalg.block_jacobi(A))[2]


# ---------------------------------------------------------------------------------------- bad input
def refused(size: int, program: Any, kind: type[Exception], *words: str) -> None:
    for error in outcomes_of(size, program):
        assert isinstance(error, kind), error
        assert all(word in str(error) for word in words), error


def test_what_one_rank_passes_wrongly_is_refused_by_all() -> None:
    A = hermitian(12)

    def cg(comm: Any, b: Any, **options: Any) -> Any:
        D = mpi.partition(A, comm)
        return linalg.cg(D, b if comm.rank == 1 else np.ones(6), **options)

    refused(2, lambda comm: cg(comm, np.ones(5)), ValueError, "A: wanted shape (5, 5)", "[on rank 1]")
    refused(2, lambda comm: cg(comm, "b"), TypeError, "b: wanted a NumPy or CuPy array", "[on rank 1]")
    refused(2, lambda comm: cg(comm, np.full(6, np.nan)), ValueError, "b: wanted finite numbers")
    refused(2, lambda comm: cg(comm, np.ones((6, 2))), ValueError, "wanted the same on all ranks", "columns (2,)")
    refused(2, lambda comm: cg(comm, np.ones(6), x0=np.ones(5 + comm.rank)), ValueError, "x0: wanted an array")
    refused(2, lambda comm: cg(comm, np.ones(6), maxiter=1 + comm.rank), ValueError, "maxiter: wanted the same")


def test_diagonal_blocks_that_are_missing_are_told_by_all() -> None:
    A = bg.bsr_array(np.diag([1.0, 1, 1, 1, 0, 1]), blocksize=(1, 1))
    for make in (linalg.block_jacobi, linalg.chebyshev):
        refused(
            2,
            lambda comm, make=make: make(mpi.partition(A, comm, rows=[2, 4])),
            ValueError,
            "diagonal block 2",
            "counted from block row 2",
            "[on rank 1]",
        )


def test_near_nullspaces_that_differ_are_refused_by_all() -> None:
    A, _ = plate(8)

    def program(comm: Any, shape: Any) -> Any:
        D = mpi.partition(A, comm)
        return linalg.smoothed_aggregation(D, np.ones((len(D.rows), 1) if comm.rank == 0 else shape(len(D.rows))))

    refused(2, lambda comm: program(comm, lambda n: (n + 1, 1)), ValueError, "near_nullspace: wanted shape", "rank 1")
    refused(2, lambda comm: program(comm, lambda n: (n, 2)), ValueError, "near_nullspace: wanted the same", "2 vectors")


def test_a_matrix_that_a_hierarchy_was_not_made_for_is_refused_by_all() -> None:
    A, _ = plate(12)
    n = A.shape[0] // 2
    cut = A.toarray()
    cut[:n, n:] = cut[n:, :n] = 0  # blocks in columns of the other rank
    few, moved = (bg.bsr_array(x, blocksize=(2, 2)) for x in (cut, np.roll(A.toarray(), (2, 2), (0, 1))))
    other = _World(2)
    wanted: list[tuple[Any, type[Exception], str]] = [
        (lambda comm: A, TypeError, "A: wanted a DistributedMatrix, got "),
        (lambda comm: mpi.partition(A.astype("float32"), comm), TypeError, "A: wanted float64 on 'cpu', got float32"),
        (lambda comm: mpi.partition(A, comm, rows=[n - 1, 1]), ValueError, "A: wanted rows range(0, "),
        (lambda comm: mpi.partition(few, comm, rows=[n // 2, n // 2]), ValueError, "A: wanted the blocks of"),
        (lambda comm: mpi.partition(moved, comm, rows=[n // 2, n // 2]), ValueError, "A: wanted the blocks of"),
        (lambda comm: mpi.partition(A, ThreadRank(other, comm.rank)), ValueError, "A: wanted a matrix with the comm"),
    ]

    def program(comm: Any, make: Any) -> Any:
        D = mpi.partition(A, comm, rows=[n // 2, n // 2])
        M = linalg.smoothed_aggregation(D, max_coarse=40)
        M.refresh(make(comm))

    for make, kind, words in wanted:
        refused(2, lambda comm, make=make: program(comm, make), kind, words)
    on_one = lambda comm: (mpi.partition(A, comm, rows=[n // 2, n // 2]), A)[comm.rank]  # noqa: E731
    refused(2, lambda comm: program(comm, on_one), TypeError, "A: wanted a DistributedMatrix", "[on rank 1]")


def test_a_preconditioner_of_another_communicator_is_refused_by_all() -> None:
    A = hermitian(12)
    other = _World(2)

    def program(comm: Any) -> Any:
        D, E = mpi.partition(A, comm), mpi.partition(A, ThreadRank(other, comm.rank))
        return linalg.cg(D, D.scatter(np.ones(12)), M=linalg.block_jacobi(E))

    refused(2, program, ValueError, "M: wanted one that was made with the communicator of A")


def test_functions_for_one_process_refuse_a_spread_matrix() -> None:
    D = mpi.partition(hermitian(12))
    for function in (linalg.ilu0, linalg.ic0, linalg.block_ssor):
        with pytest.raises(TypeError, match="A: wanted a bsr_array or bsr_matrix, got DistributedMatrix"):
            function(D)
    with pytest.raises(TypeError):
        np.ones(12) @ D
