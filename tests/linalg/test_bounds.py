"""Where a comparison changes its answer: tolerances, iterations, levels, and the numbers that a rule is made of."""

from __future__ import annotations

import inspect
import math
import sys
import types
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.base import Blocks
from bsrgemm._batch import _block_diagonal
from bsrgemm.linalg import aggregation, krylov, multigrid, operators, smoothers, steps, systems
from bsrgemm.linalg.graphs import iterations_left

from .. import fake_cupy
from .problems import hermitian, laplacian, lopsided, numbers

pytestmark = pytest.mark.fake


# ------------------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_tolerances_are_finite_numbers_from_0_on(name: str) -> None:
    others = {"rtol": 1e-3, "atol": 1e-3, "maxiter": None}
    for right in (0, 0.0, 1, 2.5, 1e300, np.float32(0.5), np.int64(3)):
        operators.check_limits(**{**others, name: right})
    for wrong in (-1e-300, math.inf, math.nan, True, False, "1", 1j, None):
        with pytest.raises(ValueError, match=f"^{name}: wanted a finite number from 0 on, got "):
            operators.check_limits(**{**others, name: wrong})


def test_the_number_of_iterations_is_an_integer_from_0_on() -> None:
    for right in (None, 0, 1, 10**20, np.int32(0), np.uint8(7)):
        operators.check_limits(0, 0, right)
    for wrong in (-1, np.int64(-1), True, False, 1.0, "3"):
        with pytest.raises(ValueError, match=r"^maxiter: wanted an integer from 0 on, or None, got "):
            operators.check_limits(0, 0, wrong)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_are_too_small_below_the_root_of_the_smallest_number(dtype: str) -> None:
    least = math.sqrt(np.finfo(dtype).tiny)
    below = float(np.nextafter(least, 0))
    b = np.array([[1, 0]], dtype)

    def counts(chosen: Any) -> Any:
        return chosen.sum(axis=0)

    systems.check_norms(np.array([least, 0]), b, 0.0, counts)  # zeros have no norm
    systems.check_norms(np.array([below, 0]), b, least, counts)  # nothing is to be done for so small a norm
    systems.check_norms(np.array([below, below]), 0 * b, 0.0, counts)
    for atol in (0.0, below):
        with pytest.raises(ValueError, match=f"b: its squares underflow in {dtype}; scale b up, and x down"):
            systems.check_norms(np.array([below, 0]), b, atol, counts)
        with pytest.raises(ValueError, match="underflow"):
            systems.check_norms(np.array([1.0, below]), b[:, ::-1], atol, counts)
    with pytest.raises(ValueError, match=f"b: its squares overflow in {dtype}; scale b down, and x up"):
        systems.check_norms(np.array([1.0, math.inf]), b, 0.0, counts)
    for wrong in (math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match="b: wanted finite numbers, got NaN or infinity"):
            systems.check_norms(np.array([1.0, math.inf]), b + wrong, 0.0, counts)


def test_what_keeps_conjugate_gradients_from_going_on_is_told_by_column() -> None:
    table = [
        # the norm, what is enough, p A p, r M r, and the place in BREAKDOWNS
        (2.0, 1.0, 1.0, 1.0, 0),
        (2.0, 1.0, 0.0, 1.0, 3),
        (2.0, 1.0, -1.0, 1.0, 3),
        (2.0, 1.0, 1.0, 0.0, 2),
        (2.0, 1.0, -1.0, -1.0, 2),
        (1.0, 1.0, -1.0, -1.0, 0),  # solved
        (0.5, 1.0, 0.0, 0.0, 0),
        (math.nan, 1.0, 1.0, 1.0, 1),
        (math.inf, 1.0, -1.0, -1.0, 1),
    ]
    size, enough, by_matrix, by_preconditioner, want = (np.array(x) for x in zip(*table, strict=True))
    found = operators.failures((size, by_matrix, by_preconditioner), enough)
    np.testing.assert_array_equal(found, want)

    def first(*rows: int) -> str | None:
        chosen = list(rows)
        return operators.breakdown((size[chosen], by_matrix[chosen], by_preconditioner[chosen]), enough[chosen])

    assert first(0, 5) is None
    assert first(1, 0, 3) == "M is not positive definite"
    assert first(0, 1) == "A is not positive definite"
    assert first(1, 3, 7) == operators.NOT_FINITE
    assert operators.breakdown((np.float64(2), np.float64(0), np.float64(1)), np.float64(1)) == operators.BREAKDOWNS[3]


def test_recurrences_stall_exactly_at_their_bounds() -> None:
    unit = 2.0**-30
    most = 64 * unit  # of the first residual
    assert operators.stalled([2 / most, *[2.0] * 6], unit)
    assert not operators.stalled([2 / most * (1 - 1e-9), *[2.0] * 6], unit)
    assert not operators.stalled([2 / most, *[1.0] * 6], unit)  # solved
    assert operators.stalled([2.0] * 6, 1 / 64) and not operators.stalled([2.0] * 5, 1 / 64)
    start = 1e12
    assert not operators.stalled([start, 10.0, *[9.9] * 4, 9.0], unit)
    assert operators.stalled([start, 10.0, *[9.9] * 4, 9.0 * (1 + 1e-12)], unit)
    assert not operators.stalled([start, 11.0, *[9.9] * 4, 9.9], unit)


def test_the_worst_of_no_columns_is_solved() -> None:
    assert operators.worst_ratio(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize("kind", ["matrix", "batch"])
def test_a_solver_starts_again_three_times(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the true residual stays above what is wanted."""
    A, b = laplacian(30, 1, "float32"), numbers(30, "float32")
    made: list[int] = []
    if kind == "matrix":
        restart = steps.Conjugate.restart
        monkeypatch.setattr(steps.Conjugate, "restart", lambda self, r: (made.append(1), restart(self, r))[1])
        with pytest.warns(linalg.SolverWarning, match="not converged"):
            linalg.cg(A, b, rtol=1e-9, maxiter=10_000)
        assert len(made) == 1 + 3
        return
    residual = systems.BatchSystem.residual
    monkeypatch.setattr(systems.BatchSystem, "residual", lambda self: (made.append(1), residual(self))[1])
    with pytest.warns(linalg.SolverWarning, match="1 of 1 systems are not solved"):
        linalg.cg(bg.bsr_batch([A]), b[None], rtol=1e-9, maxiter=10_000)
    assert len(made) == 1 + 3 + 1  # the last one tells


@pytest.mark.parametrize("maxiter", [0, 1, 7])
@pytest.mark.parametrize("method", ["cg", "minres", "bicgstab"])
def test_so_many_iterations_are_made_and_no_more(method: str, maxiter: int) -> None:
    A, b = laplacian(60), numbers(60)
    calls: list[Any] = []
    with pytest.warns(linalg.SolverWarning, match=f"{method}: not converged after {maxiter} iterations"):
        _, info = getattr(linalg, method)(A, b, rtol=1e-12, maxiter=maxiter, callback=calls.append)
    assert len(calls) == maxiter and info == max(1, maxiter)


def test_ten_iterations_for_each_row_are_the_most_by_default() -> None:
    A, b = hermitian(6), numbers(6)
    s = systems.System("cg", A, b, None, 1e-5, 0.5, None, None)
    assert s.maxiter == 60 and s.rows == 6
    np.testing.assert_allclose(s.enough, max(1e-5 * np.linalg.norm(b), 0.5))
    assert systems.System("cg", A, b, None, 0.5, 1e-9, 3, None).maxiter == 3
    np.testing.assert_allclose(systems.System("cg", A, b, None, 0.5, 1e-9, 3, None).enough, 0.5 * np.linalg.norm(b))
    batch = bg.bsr_batch([A, A])
    assert systems.BatchSystem("cg", batch, np.ones((2, 6)), None, 1e-5, 0.0, None, None).maxiter == 60


@pytest.mark.parametrize("restart", [None, 1, 3, 500])
def test_gmres_makes_so_many_iterations_between_restarts(restart: int | None) -> None:
    n = 40
    A, b = lopsided(n), numbers(n)
    told: list[float] = []
    whole: list[Any] = []
    most = {None: 20, 1: 1, 3: 3, 500: n}[restart]
    with np.errstate(all="ignore"):
        for kind, calls in (("pr_norm", told), ("x", whole)):
            solved = restart == 500
            if solved:
                _, info = linalg.gmres(
                    A, b, rtol=1e-13, restart=restart, maxiter=1, callback=calls.append, callback_type=kind
                )
                continue
            with pytest.warns(linalg.SolverWarning, match=f"not converged after {2 * most} iterations"):
                _, info = linalg.gmres(
                    A, b, rtol=1e-15, restart=restart, maxiter=2, callback=calls.append, callback_type=kind
                )
            assert info == 2 * most
    assert len(whole) == (1 if restart == 500 else 2)
    assert len(told) <= n if restart == 500 else len(told) == 2 * most


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gmres_keeps_the_results_of_a_narrower_preconditioner(dtype: str) -> None:
    """One that is as wide as the system is applied once more, to the sum of the basis."""
    A, b = lopsided(20), numbers(20)
    M = linalg.ilu0(A.astype(dtype))
    calls: list[int] = []
    apply = M._apply
    M._apply = lambda r: (calls.append(1), apply(r))[1]  # type: ignore[method-assign]
    told: list[float] = []
    assert linalg.gmres(A, b, M=M, rtol=1e-3, callback=told.append)[1] == 0
    assert len(calls) == len(told) + (dtype == "float64")


def test_hermitian_matrices_differ_by_less_than_the_cube_root_of_the_rounding_unit() -> None:
    b = np.ones(2)
    s = systems.System("minres", np.eye(2), b, None, 1e-5, 0.0, None, None)
    bound = np.cbrt(np.finfo(np.float64).eps)
    for factor, right in ((0.9, True), (1.1, False)):
        # |F b|^2 is that of F b, and b F F b has the skew part with the other sign
        skew = math.sqrt(factor * bound / 2)
        F = np.array([[1.0, skew], [-skew, 1.0]])
        size, other = np.linalg.norm(F @ b) ** 2, b @ F @ F @ b
        assert (abs(size - other) <= bound * size) is np.bool_(right)
        if right:
            krylov._check_hermitian(s, lambda x, F=F: F @ x, "A")
        else:
            with pytest.raises(ValueError, match="A: wanted a Hermitian matrix"):
                krylov._check_hermitian(s, lambda x, F=F: F @ x, "A")


def test_bounds_of_solved_columns_are_rounded_down() -> None:
    A, b = hermitian(6), numbers((6, 3))
    s = systems.System("cg", A, b, None, 1e-5, 0.0, None, None)
    step = steps.Conjugate(s)
    step.watch([3.0, 1.0, np.nextafter(1.0, 0)], [1.0, 1.0, 1.0])
    assert (step._enough < 1).all() and (np.nextafter(step._enough, 2) == 1).all()
    x = np.full((6, 3), 7.0)
    np.testing.assert_array_equal(step._unsolved(x)[0], [7, 7, 0])
    step.numbers[0] = step._enough
    assert not step._unsolved(x).any()


@pytest.mark.parametrize(
    ("left", "want"),
    [
        ([8.0], math.inf),
        ([8.0, 4.0], 2.0),
        ([64.0, 32, 16, 8, 4, 2], 1.0),
        ([1e9, 16, 8, 4, 2, 2], 4 / 3),
        ([4.0, 1.0], 0.0),
        ([math.inf, 4.0], math.inf),
        ([8.0, math.nan, 4.0], math.inf),
        ([4.0, 4.0], math.inf),
    ],
)
def test_iterations_are_expected_by_the_last_four(left: list[float], want: float) -> None:
    assert iterations_left(left) == pytest.approx(want)


# ------------------------------------------------------------------------------------------------- defaults
def test_defaults_are_those_of_the_reference() -> None:
    def defaults(function: Any) -> dict[str, Any]:
        found = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in found if p.default is not p.empty}

    assert defaults(linalg.chebyshev) == {"degree": 3, "low": 0.05, "high": 1.1}
    multi = {"smoother": "chebyshev", "degree": 2, "cycle": "V"}
    own = {"near_nullspace": None, "theta": 0.0, "max_coarse": 500, "max_levels": 20}
    assert defaults(linalg.smoothed_aggregation) == {**own, **multi}
    assert defaults(linalg.from_pyamg) == {"device": None, **multi}
    assert defaults(linalg.block_ssor) == {"omega": 1.0, "order": "colours"}
    assert defaults(linalg.spsolve_triangular) == {"lower": True, "unit_diagonal": False}
    assert defaults(linalg.constrain) == {"values": 0}
    assert defaults(linalg.fgmres) == defaults(linalg.gmres)
    assert defaults(smoothers.spectrum) == {"steps": 20}
    assert defaults(aggregation.hashed) == {"first": 0}
    for make in (linalg.chebyshev, linalg.block_ssor, linalg.smoothed_aggregation):
        assert (make(laplacian(6)) @ np.ones(6)).shape == (6,)


@pytest.mark.parametrize("method", ["cg", "minres", "bicgstab", "gmres", "fgmres"])
def test_tolerances_that_are_not_given_are_those_of_the_reference(method: str) -> None:
    solve = getattr(linalg, method)
    A, b = laplacian(40), numbers(40)
    known = inspect.signature(solve).parameters
    given = {"rtol": 1e-5, "atol": 0.0, "maxiter": None, "M": None, "callback": None}
    given |= {"restart": None, "callback_type": None} if "gmres" in method else {}
    given |= {"shift": 0.0, "show": False, "check": False} if method == "minres" else {}
    assert {name: p.default for name, p in known.items() if p.kind is p.KEYWORD_ONLY} == given
    x, info = solve(A, b)
    same, _ = solve(A, b, None, **given)
    assert info == 0 and x.tobytes() == same.tobytes()


def test_options_that_are_not_given_are_those_of_the_reference() -> None:
    A, b = hermitian(30), numbers(30)
    low = bg.bsr_array(np.tril(A.toarray()), blocksize=(2, 2))
    for found, want in (
        (linalg.chebyshev(A) @ b, linalg.chebyshev(A, 3, low=0.05, high=1.1) @ b),
        (linalg.block_ssor(A) @ b, linalg.block_ssor(A, 1.0, order="colours") @ b),
        (linalg.ilu0(A) @ b, linalg.ilu0(A, order="colours") @ b),
        (linalg.ic0(A) @ b, linalg.ic0(A, order="colours") @ b),
        (linalg.spsolve_triangular(low, b), linalg.spsolve_triangular(low, b, True, False)),
        (linalg.constrain(A, b, [3])[1], linalg.constrain(A, b, [3], 0)[1]),
    ):
        assert found.tobytes() == want.tobytes()
    B, right = laplacian(600), numbers(600)
    given = {"theta": 0.0, "max_coarse": 500, "max_levels": 20, "smoother": "chebyshev", "degree": 2, "cycle": "V"}
    found, want = linalg.smoothed_aggregation(B), linalg.smoothed_aggregation(B, None, **given)
    assert found.report() == want.report() and (found @ right).tobytes() == (want @ right).tobytes()


def test_smoothers_of_a_hierarchy_have_the_numbers_of_the_reference() -> None:
    A = hermitian(12)
    D = smoothers.inverse_blocks(A)
    found = multigrid.Options("chebyshev", 3, "V").smoothing(A, D)
    assert isinstance(found, smoothers.Chebyshev)
    assert (found.degree, found.low, found.high) == (3, 0.15, 1.1)
    other = multigrid.Options("jacobi", 2, "V").smoothing(A, D)
    assert isinstance(other, smoothers.Jacobi)
    assert other.sweeps == 2 and other.weight == 4 / 3 / other.rho


# ------------------------------------------------------------------------------------------------- levels
def test_a_level_of_so_many_rows_is_the_coarsest() -> None:
    A = laplacian(200)
    assert len(linalg.smoothed_aggregation(A, max_coarse=200).levels) == 1
    rows = [level.shape[0] for level in linalg.smoothed_aggregation(A, max_coarse=199).levels]
    assert len(rows) == 2
    assert len(linalg.smoothed_aggregation(A, max_coarse=rows[1]).levels) == 2
    deeper = [level.shape[0] for level in linalg.smoothed_aggregation(A, max_coarse=rows[1] - 1).levels]
    assert deeper[:2] == rows and len(deeper) == 3
    for most in (1, 2, 3):
        assert len(linalg.smoothed_aggregation(A, max_coarse=5, max_levels=most).levels) == most


def test_coarsening_stalls_above_nine_tenths() -> None:
    """Pairs of nodes, and nodes that are connected with nothing but by a weak coupling."""
    for pairs, want in ((10, 2), (9, 1)):
        n = 100
        dense = 4 * np.eye(n)
        for k in range(pairs):
            dense[2 * k, 2 * k + 1] = dense[2 * k + 1, 2 * k] = -1
        for k in range(2 * pairs, n):
            other = 2 * pairs + (k + 1 - 2 * pairs) % (n - 2 * pairs)
            dense[k, other] = dense[other, k] = -0.01  # coupled, and weakly
        A = bg.bsr_array(dense, blocksize=(1, 1))
        M = linalg.smoothed_aggregation(A, theta=0.1, max_coarse=50, max_levels=2)
        assert [level.shape[0] for level in M.levels][:want] == [100, 90][:want] and len(M.levels) == want


def test_the_largest_level_that_is_inverted_has_4096_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multigrid._MOST_DENSE == 4096
    monkeypatch.setattr(multigrid, "_MOST_DENSE", 90)
    A = laplacian(90)
    assert len(linalg.smoothed_aggregation(A, max_coarse=10, max_levels=1).levels) == 1
    with pytest.raises(ValueError, match="max_levels: 1 levels leave 91 rows, too many for a dense matrix; allow more"):
        linalg.smoothed_aggregation(laplacian(91), max_coarse=10, max_levels=1)
    assert len(linalg.smoothed_aggregation(laplacian(91), max_coarse=91, max_levels=1).levels) == 1
    apart = bg.bsr_array(np.diag(np.arange(1.0, 91)), blocksize=(1, 1))
    assert len(linalg.smoothed_aggregation(apart, max_coarse=10).levels) == 1
    with pytest.raises(ValueError, match="A: no node of level 0 is connected with another one"):
        linalg.smoothed_aggregation(bg.bsr_array(np.diag(np.arange(1.0, 92)), blocksize=(1, 1)), max_coarse=10)


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("theta", [0, 0.0, 0.25, np.float32(0.999)], [1, 1.0, -1e-9, True, "0", math.nan]),
        ("max_coarse", [1, np.int64(3)], [0, -1, True, 2.0, "2"]),
        ("max_levels", [1, np.int8(3)], [0, True, 2.0]),
        ("degree", [1, np.uint8(2)], [0, False, 1.0]),
        ("smoother", ["chebyshev", "jacobi"], ["", "Jacobi", None]),
        ("cycle", ["V", "W"], ["v", "F", None]),
    ],
)
def test_options_of_a_hierarchy_have_bounds(option: str, right: list[Any], wrong: list[Any]) -> None:
    A = laplacian(12)
    for value in right:
        linalg.smoothed_aggregation(A, **{option: value})
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{option}: wanted "):
            linalg.smoothed_aggregation(A, **{option: value})


@pytest.mark.parametrize("degree", [0, True, 1.0, -1])
def test_degrees_of_polynomials_are_integers_from_1_on(degree: Any) -> None:
    with pytest.raises(ValueError, match="degree: wanted an integer from 1 on"):
        linalg.chebyshev(laplacian(6), degree)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 1), (0.5, 0.4), (0.1, math.inf), (-1, 1), ("0", 1), (0.1, 1j)])
def test_intervals_of_polynomials_are_above_0_and_not_empty(low: Any, high: Any) -> None:
    with pytest.raises(ValueError, match="low, high: wanted 0 < low < high, both finite"):
        linalg.chebyshev(laplacian(6), low=low, high=high)


@pytest.mark.parametrize("omega", [0, 2, 2.0, True, -0.5, math.nan, "1"])
def test_relaxation_is_above_0_and_below_2(omega: Any) -> None:
    with pytest.raises(ValueError, match="omega: wanted a number above 0 and below 2"):
        linalg.block_ssor(laplacian(6), omega)
    linalg.block_ssor(laplacian(6), 1e-3)
    linalg.block_ssor(laplacian(6), np.float32(1.999))


# ------------------------------------------------------------------------------------------------- nodes, batches
def test_a_mode_is_dropped_below_a_share_of_1e_10() -> None:
    A = laplacian(2)
    number = np.zeros(2, np.int64)
    for share, kept in ((1.5e-10, True), (0.7e-10, False)):
        modes = np.array([[1.0, 1.0], [0.0, share]])
        T, coarse = aggregation.tentative(A, number, 1, modes)
        assert bool(T.toarray()[:, 1].any()) is kept and bool(coarse[1, 1]) is kept
        np.testing.assert_allclose(coarse[0], [1, 1])


def test_a_table_of_neighbours_is_made_if_it_is_at_most_twice_as_large() -> None:
    for most, made in ((3, True), (4, False)):
        lengths = np.array([most, 1, 1, 1])
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        assert (aggregation._highest_by_places(np.zeros(indptr[-1], np.int64), indptr) is not None) is made


@pytest.mark.parametrize(("columns", "want"), [(2**30 - 1, np.int32), (2**30, np.int64)])
def test_indices_of_a_batch_are_as_wide_as_they_have_to_be(columns: int, want: Any) -> None:
    A = bg.bsr_array((np.ones((1, 1, 1)), np.array([3], np.int32), np.array([0, 1], np.int32)), shape=(1, columns))
    assert A.indices.dtype == np.int32
    found = _block_diagonal(A, 2, np.ones((2, 1, 1)))
    assert found.indices.dtype == found.indptr.dtype == want
    assert found.indices.tolist() == [3, columns + 3] and found.indptr.tolist() == [0, 1, 2]


def test_blocks_that_are_stored_twice_are_added_up_before_a_cast() -> None:
    """Half and half is one, also as an integer; another cast of floats leaves them apart."""
    data = np.array([[0.5, 2, 0.5, 4], [1.5, 3, 1.5, 5]])[:, :, None, None] * np.ones((1, 2))
    given = data, np.array([0, 1, 0, 1]), np.array([0, 3, 3, 4])
    batch = bg.bsr_batch(given, shape=(3, 4))
    for made in (batch.astype("int32"), bg.bsr_batch(given, shape=(3, 4), dtype="int32")):
        assert made.dtype == np.int32 and made.data.shape == (2, 3, 1, 2) and made.shape == (2, 3, 4)
        assert made.indices.tolist() == [0, 1, 1] and made.indptr.tolist() == [0, 2, 2, 3]
        np.testing.assert_array_equal(made.toarray(), batch.toarray())
        np.testing.assert_array_equal(made @ np.ones((2, 4), np.int32), batch @ np.ones((2, 4)))
    assert batch.astype("float32").data.shape == batch.astype("complex64").data.shape == (2, 4, 1, 2)
    np.testing.assert_array_equal(batch.astype("bool").toarray(), batch.toarray() != 0)
    turned = bg.bsr_batch((np.array([[1, -1]])[:, :, None, None], [0, 0], [0, 2]), shape=(1, 1)).astype("bool")
    assert not turned.toarray().any()
    one = bg.bsr_array((data[0], *given[1:]), shape=(3, 4))
    two = bg.bsr_array((data[1].astype("float32"), *given[1:]), shape=(3, 4))
    mixed = bg.bsr_batch([one, two])
    assert mixed.dtype == np.float64
    np.testing.assert_array_equal(mixed.toarray(), batch.toarray())


@pytest.mark.parametrize("order", ["colours", "natural"])
def test_places_of_blocks_are_counted_in_64_bits(order: str) -> None:
    """A matrix of 50 000 block rows has more places than 32 bits count."""
    n = 50_000
    place, last = np.arange(n), np.arange(n - 4, n)
    rows = np.concatenate([place, np.repeat(last, 4)])
    columns = np.concatenate([place, np.tile(last, 4)])
    corner = 4 * np.eye(4) + numbers((4, 4))
    data = np.concatenate([np.full(n, 2.0) * (place < n - 4), corner.ravel()])[:, None, None]
    A = bg.bsr_array((data, (rows.astype(np.int32), columns.astype(np.int32))), shape=(n, n))
    A.sum_duplicates()
    A = A._new(Blocks(A.data, A.indices.astype(np.int32), A.indptr.astype(np.int32)), canonical=True)
    found = linalg.ilu0(A, order=order) @ np.ones(n)
    np.testing.assert_allclose(found[-4:], np.linalg.solve(corner, np.ones(4)))
    assert (found[:-4] == 0.5).all()
    width = 70_000
    at = np.array([0, width - 9, width - 1]), np.array([0, width - 5, width - 1])
    P = bg.bsr_array((np.ones((3, 1, 1)), at), shape=(width, width))
    T = bg.bsr_array((np.ones((2, 1, 1)), (at[0][1:], at[1][1:])), shape=(width, width))
    P, T = (
        X._new(Blocks(X.data, X.indices.astype(np.int32), X.indptr.astype(np.int32)), canonical=True) for X in (P, T)
    )
    assert multigrid._places(P, T).tolist() == [1, 2]


def test_a_column_with_nan_is_told_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_cupy.backend()
    modules = {name: types.ModuleType(name) for name in ("nvmath", "nvmath.sparse", "nvmath.sparse.advanced")}
    modules["nvmath.sparse.advanced"].direct_solver = lambda a, b, **_: b  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    A, b = bg.eye(4, blocksize=(2, 2)).to_device("cuda"), np.ones((4, 2))
    np.testing.assert_array_equal(linalg.spsolve(A, fake.from_host(b)).get(), b)
    b[2, 1] = math.nan
    with pytest.raises(ValueError, match="b: wanted finite numbers, got NaN or infinity"):
        linalg.spsolve(A, fake.from_host(b))
    b[2, 1] = 1
    bound = math.sqrt(np.finfo(float).eps)
    for factor, right in ((0.9, True), (1.1, False)):
        modules["nvmath.sparse.advanced"].direct_solver = (  # type: ignore[attr-defined]
            lambda a, b, change=1 + factor * bound, **_: b * fake.from_host(np.array([1.0, change]))
        )
        if right:
            linalg.spsolve(A, fake.from_host(b))
        else:
            with pytest.raises(RuntimeError, match="A: singular, or too badly conditioned for float64: the norm of"):
                linalg.spsolve(A, fake.from_host(b))


def test_the_pattern_of_a_batch_cannot_be_written_into() -> None:
    """A product has index arrays of its own, and would not see what is written."""
    batch = bg.bsr_batch([laplacian(4), laplacian(4)])
    for index in (batch.indices, batch.indptr):
        with pytest.raises(ValueError, match="read-only"):
            index[0] = 1
    batch.data[...] = 2
    assert (batch[1].data == 2).all()


# ------------------------------------------------------------------------------------------------- formats
def test_matrices_of_this_room_are_said_to_be_canonical_and_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody then looks for duplicates again."""
    made: list[Any] = []
    new = bg.bsr_array._new

    def noting(self: Any, *args: Any, **options: Any) -> Any:
        found = new(self, *args, **options)
        if "/bsrgemm/linalg/" in sys._getframe(1).f_code.co_filename:
            assert found._known_canonical
            made.append((sys._getframe(1).f_code.co_name, found))
        return found

    monkeypatch.setattr(bg.bsr_array, "_new", noting)
    A = hermitian(24)
    linalg.smoothed_aggregation(A, max_coarse=3)
    aggregation.tentative(A, np.full(12, -1), 0, np.ones((24, 1)))
    aggregation.tentative(A, np.arange(12) // 3 - 1, 3, np.ones((24, 1)))
    for order in ("colours", "natural"):
        linalg.ilu0(A, order=order)
    linalg.constrain(A, np.ones(24), [3])
    assert {name for name, _ in made} == {"tentative", "groups", "_rows", "_factored", "constrain"}
    for _, found in made:
        row = np.repeat(np.arange(len(found.indptr) - 1), np.diff(found.indptr)).astype(np.int64)
        assert (np.diff(row * found._block_shape[1] + found.indices) > 0).all()
        assert found.indices.dtype == found.indptr.dtype == A.indices.dtype
