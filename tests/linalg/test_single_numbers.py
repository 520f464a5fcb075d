"""One wrong number, column or matrix among others that are right: whatever holds for all is not asked of any."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm.linalg import aggregation, krylov, multigrid, operators, ordering, systems
from bsrgemm.linalg.steps import FACTOR_IS_ZERO, Biconjugate, Conjugate, MinimalResidual

from .problems import hermitian, laplacian, numbers

pytestmark = pytest.mark.fake

METHODS: dict[str, Any] = {name: getattr(linalg, name) for name in ("cg", "minres", "bicgstab", "gmres", "fgmres")}


def spoiled(x: Any, number: float = math.nan) -> Any:
    found = x.copy()
    found.reshape(-1)[found.size // 2] = number
    return found


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_one_number_that_is_not_finite_is_told(number: float) -> None:
    A, b = hermitian(8), numbers((8, 3))
    wrong = A._with_data(spoiled(A.data, number))
    lower = bg.bsr_array(np.tril(np.ones((8, 8))) + np.eye(8), blocksize=(2, 2))
    words = "{}: wanted finite numbers, got NaN or infinity"
    calls: list[tuple[str, Any]] = [
        ("b", lambda: linalg.spsolve(A, spoiled(b, number))),
        ("A", lambda: linalg.spsolve(wrong, b)),
        ("A", lambda: linalg.spsolve_triangular(lower._with_data(spoiled(lower.data, number)), b)),
        ("values", lambda: linalg.constrain(A, b, [1, 2, 3], [0.0, number, 1.0])),
        ("near_nullspace", lambda: linalg.smoothed_aggregation(A, spoiled(b, number))),
        ("A", lambda: multigrid._pseudo_inverse(wrong)),
        *(("b", lambda solve=solve: solve(A, spoiled(b, number))) for solve in METHODS.values()),
        ("b", lambda: linalg.cg(bg.bsr_batch([A, A]), spoiled(np.ones((2, 8, 2)), number))),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=words.format(name)):
            call()
    with (
        np.errstate(all="ignore"),
        pytest.raises(RuntimeError, match="A: singular, or too badly conditioned for float"),
    ):
        linalg.spsolve(bg.bsr_array(np.diag([1e-300, 1, 1, 1]), blocksize=(2, 2)), np.array([1e300, 1, 1, 1]))


@pytest.mark.parametrize("method", METHODS)
def test_one_column_that_is_not_finite_ends_all(method: str) -> None:
    A, b, x0 = hermitian(12), numbers((12, 3)), np.zeros((12, 3))
    x0[5, 1] = math.nan
    with pytest.warns(linalg.SolverWarning, match="NaN or infinity has appeared; stopped after .* in column 1"):
        assert METHODS[method](A, b, x0, rtol=1e-12)[1] == -1


@pytest.mark.parametrize("method", METHODS)
def test_one_column_that_is_not_solved_is_told(method: str) -> None:
    A, b = laplacian(60), np.zeros((60, 3))
    b[:, 1] = numbers(60)
    options = {"restart": 2} if "gmres" in method else {}
    with pytest.warns(linalg.SolverWarning, match=f"{method}: not converged after . iterations in column 1"):
        assert METHODS[method](A, b, rtol=1e-12, maxiter=2, **options)[1] > 0


def test_a_column_with_nan_does_not_pass_for_one_that_overflows() -> None:
    b = np.array([[1.0, math.nan, 1.0]])
    with pytest.raises(ValueError, match="b: wanted finite numbers, got NaN or infinity"):
        systems.check_norms(np.array([1.0, math.nan, 1.0]), b, 0.0, lambda chosen: chosen.sum(axis=0))


def test_verdicts_are_over_all_columns() -> None:
    enough = np.ones(3)
    fine, half, nan = np.array([0.5, 1.0, 0.1]), np.array([0.5, 2.0, 0.1]), np.array([0.5, math.nan, 0.1])
    one = np.ones(3)
    for kind in (Conjugate, MinimalResidual, Biconjugate):
        assert kind.verdict((fine, one, one), enough) == (None, True)
        assert kind.verdict((half, one, one), enough) == (None, False)
        assert kind.verdict((nan, one, one), enough) == (operators.NOT_FINITE, False)
    low = np.array([1.0, -1.0, 1.0])
    assert MinimalResidual.verdict((half, low, one), enough) == ("M is not positive definite", False)
    assert MinimalResidual.verdict((half, 0 * one, one), enough) == (None, False)
    assert MinimalResidual.verdict((fine, low, one), enough) == (None, True)
    assert MinimalResidual.verdict((half, one, np.array([1.0, 0, 1])), enough) == (None, True)
    gone = np.array([1.0, 0.0, 1.0])
    for numbers_of in ((half, gone, one), (half, one, gone)):
        assert Biconjugate.verdict(numbers_of, enough) == (FACTOR_IS_ZERO, False)
    assert Biconjugate.verdict((fine, gone, gone), enough) == (None, True)
    assert Biconjugate.verdict((half, gone[::-1][[1, 0, 0]], one), enough) == (None, False)


def test_expectations_are_those_of_the_worst_column(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    make = krylov.Iterations.make
    monkeypatch.setattr(
        krylov.Iterations, "make", lambda self, left, most: (seen.append([*left, most]), make(self, left, most))[1]
    )
    A, b = laplacian(20), numbers((20, 2))
    b[:, 1] = A @ np.ones(20) * 1e-3
    norms: list[Any] = []
    x0 = np.stack([np.zeros(20), np.full(20, 0.999e-3)], axis=1)
    linalg.cg(A, b, x0, rtol=1e-6, maxiter=50, callback=lambda x: norms.append(np.linalg.norm(b - A @ x, axis=0)))
    wanted = [np.linalg.norm(b - A @ x0, axis=0), *norms]
    want = [float(np.max(x / (1e-6 * np.linalg.norm(b, axis=0)))) for x in wanted]
    *left, most = seen[4]
    np.testing.assert_allclose(left, want[:5], rtol=1e-6)
    assert most == 50 - 4


def test_one_column_that_shows_a_skew_part_is_enough() -> None:
    dense = np.eye(4)
    dense[2, 3], dense[3, 2] = 1, -1
    b = np.zeros((4, 2))
    b[0, 0] = b[2, 1] = 1
    with pytest.raises(ValueError, match="A: wanted a Hermitian matrix"):
        linalg.minres(bg.bsr_array(dense, blocksize=(2, 2)), b, check=True)


def test_unknowns_that_contradict_each_other_are_found_among_others() -> None:
    A, b = hermitian(8), np.ones(8)
    linalg.constrain(A, b, [1, 2, 1], [3.0, 4.0, 3.0])
    with pytest.raises(ValueError, match="dofs: wanted one value for each unknown, got an unknown twice with differ"):
        linalg.constrain(A, b, [1, 2, 1], [3.0, 4.0, 5.0])


# ------------------------------------------------------------------------------------------------- dtypes
class Plain:
    """An operator that does not say which numbers it has."""

    shape = (8, 8)

    def __matmul__(self, x: Any) -> Any:
        return 2 * x


def test_dtypes_that_operands_do_not_say_or_that_are_narrow() -> None:
    b = np.ones(8, np.float32)
    assert linalg.cg(Plain(), b)[0].dtype == np.float64
    A = hermitian(8, "float32")
    narrow = linalg.block_jacobi(bg.bsr_batch([A.astype("complex64")] * 2))
    x, _ = linalg.cg(bg.bsr_batch([A, A]), np.ones((2, 8), np.float32), M=narrow)
    assert x.dtype == np.complex64
    assert linalg.cg(bg.bsr_batch([A, A]), np.ones((2, 8), np.float32))[0].dtype == np.float32
    assert linalg.constrain(A, b, [1], 1j)[1].dtype == np.complex64
    for wrong in (np.ones(8, np.longdouble), np.ones(8, np.clongdouble)):
        for solve in (*METHODS.values(), linalg.spsolve):
            with pytest.raises(TypeError, match="A, b: wanted float32, float64, complex64 or complex128, got "):
                solve(A, wrong)
        with pytest.raises(TypeError, match="A, b: wanted float32"):
            linalg.cg(bg.bsr_batch([A, A]), np.stack([wrong, wrong]))
    for odd in (np.array(["x"] * 8), np.array([None] * 8)):
        for solve in (*METHODS.values(), linalg.spsolve, linalg.spsolve_triangular):
            with pytest.raises(TypeError, match="b: wanted numbers, got "):
                solve(bg.bsr_array(np.eye(8), blocksize=(2, 2)), odd)


def test_matrices_of_a_batch_are_all_of_this_package() -> None:
    A = hermitian(4)
    for wrong in ([A, A.toarray()], [A.toarray(), A], [], [A, None], "A"):
        with pytest.raises(TypeError, match=r"arg1: wanted \(data, indices, indptr\) or a sequence of bsr_array, got "):
            bg.bsr_batch(wrong)
    twice = np.array([0, 0]), np.array([0, 2])
    one = bg.bsr_array((np.array([True, True])[:, None, None], *twice), shape=(1, 1))
    two = bg.bsr_array((np.array([2, 3])[:, None, None], *twice), shape=(1, 1))
    for given in ([one, two], [two, one]):
        found = bg.bsr_batch(given).toarray().ravel().tolist()
        assert sorted(found) == [1, 5]  # true and true is true


# ------------------------------------------------------------------------------------------------- nodes
def test_a_block_that_is_missing_on_the_diagonal_has_a_norm_of_0() -> None:
    data = np.array([4.0, 0.01, 0.01, 4.0])[:, None, None]
    A = bg.bsr_array((data, np.array([0, 1, 0, 2]), np.array([0, 2, 3, 4])), shape=(3, 3))
    indices, indptr, coupled = aggregation.strong_connections(A, 0.5)
    assert indices.tolist() == [0, 1, 0, 2] and indptr.tolist() == [0, 2, 3, 4]
    assert coupled.tolist() == [True, True, False]
    T, modes = aggregation.tentative(A, np.full(3, -1), 0, np.ones((3, 1)))
    assert T.shape == (3, 0) and T.indptr.tolist() == [0] * 4 and modes.shape == (0, 1)


@pytest.mark.parametrize("lower", [True, False])
def test_levels_on_a_device_are_those_of_the_host(lower: bool) -> None:
    for A in (hermitian(24), bg.bsr_array(np.diag(np.arange(1.0, 9)), blocksize=(2, 2)), hermitian(24)[:, ::1]):
        want, count = ordering.levels(A, lower)
        found, same = ordering.levels(A.to_device("cuda"), lower)
        assert same == count and found.dtype == want.dtype == np.int64
        np.testing.assert_array_equal(found.get(), want)


def test_a_hierarchy_of_one_level_is_refreshed() -> None:
    A = hermitian(8)
    M = linalg.smoothed_aggregation(A)
    M.refresh(2 * A)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(M @ np.ones(8), np.linalg.solve(2 * A.toarray(), np.ones(8)))


WRONG = ((2,), (8,), (3, 8), (1, 8), (2, 7), (2, 9), (8, 2), (2, 7, 3), (3, 8, 3), (2, 8, 1, 1))


@pytest.mark.parametrize("shape", WRONG, ids=str)
def test_right_hand_sides_of_a_batch_have_a_vector_of_the_length_for_each_system(shape: tuple[int, ...]) -> None:
    A = bg.bsr_batch([hermitian(8)] * 2)
    with pytest.raises(ValueError, match=r"b: wanted shape \(2, 8\) or \(2, 8, k\), got " + re.escape(str(shape))):
        linalg.cg(A, np.ones(shape))


def test_batches_of_systems_without_unknowns_are_solved() -> None:
    A = bg.bsr_batch([bg.bsr_array((0, 0), blocksize=(2, 2))] * 2)
    for shape in ((2, 0), (2, 0, 3)):
        x, info = linalg.cg(A, np.ones(shape))
        assert x.shape == shape and info.shape == (shape[0], *shape[2:]) and not info.any()
    for wrong in ((2,), (1, 0), (2, 1), (2, 1, 3)):
        with pytest.raises(ValueError, match="b: wanted shape "):
            linalg.cg(A, np.ones(wrong))
