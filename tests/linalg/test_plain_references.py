"""Parts of preconditioners, and what is told, beside the same written plainly: loops over nodes, and dense matrices."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as spla

import bsrgemm as bg
from bsrgemm import linalg
from bsrgemm._backend.registry import host
from bsrgemm.linalg import aggregation, multigrid, ordering, smoothers

from .problems import hermitian, laplacian, lopsided, numbers


def mixed(i: int) -> int:
    """The key of node i, in integers without end."""
    x = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
    x ^= x >> 29
    x = x * 0xBF58476D1CE4E5B9 % 2**64
    return ((x >> 35) << 32) | i


def random_pattern(n: int, seed: int, symmetric: bool = True) -> Any:
    rng = np.random.default_rng(seed)
    chosen = rng.random((n, n)) < 3 / n
    chosen = chosen | chosen.T if symmetric else chosen
    np.fill_diagonal(chosen, True)
    return bg.bsr_array(chosen * (1.0 + rng.random((n, n))), blocksize=(1, 1))


def neighbours(A: Any) -> list[set[int]]:
    return [set(A.indices[a:b].tolist()) for a, b in itertools.pairwise(A.indptr.tolist())]


# ------------------------------------------------------------------------------------------------- nodes
def test_keys_of_nodes_are_mixed_bits_above_the_index() -> None:
    for first in (0, 5, 2**31 - 2):
        assert aggregation.hashed(np, 9, first).tolist() == [mixed(i) for i in range(first, first + 9)]
    A = laplacian(50, 1, "complex64")
    found = smoothers._mixed_vector(A)
    assert found.dtype == A.dtype
    np.testing.assert_allclose(found, [(mixed(i) >> 32) / 2**28 - 1 for i in range(50)], rtol=1e-6)
    assert (abs(found.real) <= 1).all()


def plain_roots(near: list[set[int]], able: set[int], inside: set[int]) -> set[int]:
    """By descending key: a root, and everything that sees it through a node inside is none."""
    found: set[int] = set()
    around = [{k for m in near[i] if m in inside for k in near[m]} for i in range(len(near))]
    undecided = set(able)
    while undecided:
        top = {i for i in undecided if all(mixed(k) <= mixed(i) for k in around[i] if k in undecided)}
        found |= top
        undecided -= top
        undecided = {i for i in undecided if not around[i] & found}
    return found


@pytest.mark.parametrize("seed", range(6))
def test_aggregates_are_those_of_loops_over_nodes(seed: int) -> None:
    n = 60
    A = random_pattern(n, seed)
    near = neighbours(A)
    everything = set(range(n))
    roots = sorted(plain_roots(near, everything, everything))
    number = {root: k for k, root in enumerate(roots)}
    found = {i: max(number[k] for k in near[i] if k in number) for i in range(n) if near[i] & set(roots)}
    free = everything - set(found)
    able = {i for i in free if 2 * len(near[i] & free) >= len(near[i])}
    more = sorted(plain_roots(near, able, free))
    number = {root: k for k, root in enumerate(more, len(roots))}
    for i in sorted(free):
        if near[i] & set(more):
            found[i] = max(number[k] for k in near[i] if k in number)
    joined = {i: max(found[k] for k in near[i] if k in found) for i in everything - set(found)}
    want = [{**found, **joined}[i] for i in range(n)]
    got, count = aggregation.aggregates(host(), A.indices, A.indptr)
    assert got.tolist() == want and count == len(roots) + len(more)


@pytest.mark.parametrize("symmetric", [True, False])
def test_colours_are_those_of_loops_over_nodes(symmetric: bool) -> None:
    A = random_pattern(40, 3, symmetric)
    near = neighbours(A)
    both = [{k for k in range(40) if k in near[i] or i in near[k]} for i in range(40)]
    want, waiting = [-1] * 40, set(range(40))
    while waiting:
        turn = {i for i in waiting if all(mixed(k) <= mixed(i) for k in both[i] if k in waiting)}
        for i in turn:
            want[i] = min(set(range(41)) - {want[k] for k in both[i]})
        waiting -= turn
    count = max(want) + 1
    found, colours = ordering.colours(A)
    assert found.tolist() == want and colours == count and found.dtype == np.int64
    for lower in (True, False):
        level, count = ordering.levels(A, lower)
        assert level.dtype == np.int64 and count == level.max() + 1


@pytest.mark.parametrize("seed", range(4))
def test_rounds_end_as_soon_as_all_nodes_are_decided(seed: int) -> None:
    """The host asks after every second one."""
    A = random_pattern(60, seed)
    near = neighbours(A)
    around = [{k for m in near[i] for k in near[m]} for i in range(60)]
    undecided, roots, rounds = set(range(60)), set(), 0
    while undecided:
        # those near a root of this round learn of it in the next one
        out = {i for i in undecided if around[i] & roots}
        top = {i for i in undecided - out if all(mixed(k) <= mixed(i) for k in around[i] if k in undecided)}
        roots |= top
        undecided -= top | out
        rounds += 1
    table = aggregation._highest_by_places(A.indices.astype(np.int64), A.indptr)
    calls: list[int] = []

    def highest(x: Any) -> Any:
        calls.append(1)
        return np.array([x[sorted(near[i])].max() for i in range(60)]) if table is None else table(x)

    found = aggregation._roots(np, highest, aggregation.hashed(np, 60))
    assert set(np.flatnonzero(found).tolist()) == roots
    assert len(calls) == 2 * (rounds + rounds % 2) and rounds > 1


# ------------------------------------------------------------------------------------------------- smoothers
@pytest.mark.parametrize("degree", [1, 2, 5])
@pytest.mark.parametrize("started", [False, True])
def test_residuals_shrink_by_chebyshev_polynomials(degree: int, started: bool) -> None:
    values = np.linspace(0.05, 1.2, 12)
    A, D = bg.bsr_array(np.diag(values), blocksize=(2, 2)), bg.eye(12, blocksize=(2, 2))
    smoother = smoothers.Chebyshev(A, D, degree, 0.15, 1.1)
    low, high = (x * smoother.rho for x in (smoother.low, smoother.high))
    T = np.polynomial.Chebyshev.basis(degree)
    shrunk = T((high + low - 2 * values) / (high - low)) / T((high + low) / (high - low))
    b, x0 = numbers((12, 2)), numbers((12, 2), seed=1)
    kept = b.copy()
    x = smoother.improve(b, x0.copy() if started else None)
    left = b - A @ x0 if started else b
    np.testing.assert_allclose(b - A @ x, shrunk[:, None] * left, atol=1e-13)
    np.testing.assert_array_equal(b, kept)


@pytest.mark.parametrize("sweeps", [1, 3])
def test_sweeps_of_jacobi(sweeps: int) -> None:
    A = hermitian(12)
    D = smoothers.inverse_blocks(A)
    smoother = smoothers.Jacobi(A, D, 0.7, sweeps)
    assert smoother.weight == 0.7 / smoothers.spectrum(A, D).largest
    b, x = numbers(12), np.zeros(12)
    for _ in range(sweeps):
        x = x + smoother.weight * (D.toarray() @ (b - A.toarray() @ x))
    np.testing.assert_allclose(smoother.improve(b, None), x, rtol=1e-12)
    np.testing.assert_allclose(smoother.improve(b, np.zeros(12)), x, rtol=1e-12)


# ------------------------------------------------------------------------------------------------- hierarchies
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("options", [{}, {"smoother": "jacobi", "cycle": "W", "degree": 1}, {"cycle": "W"}], ids=str)
def test_a_hierarchy_is_that_of_dense_matrices(dtype: str, options: dict[str, Any]) -> None:
    A = hermitian(120, dtype)
    M = linalg.smoothed_aggregation(A, max_coarse=8, **options)
    assert len(M.levels) >= 3
    for fine, coarse in itertools.pairwise(M.levels):
        level = next(x for x in M._levels if x.A is fine)
        T = level.plans._T.toarray()
        D = smoothers.inverse_blocks(fine, singular=True).toarray()
        rho = smoothers.spectrum(fine, smoothers.inverse_blocks(fine, singular=True)).largest
        P = T - 4 / 3 / rho * D @ fine.toarray() @ T
        np.testing.assert_allclose(level.P.toarray(), P, atol=1e-12)
        np.testing.assert_allclose(level.R.toarray(), P.conj().T, atol=1e-12)
        np.testing.assert_allclose(coarse.toarray(), P.conj().T @ fine.toarray() @ P, atol=1e-12)

    def cycle(depth: int, b: Any) -> Any:
        if depth == len(M._levels):
            return np.linalg.pinv(M.levels[-1].toarray(), hermitian=True) @ b
        level = M._levels[depth]
        dense = level.A.toarray()
        x = level.smoother.improve(b.copy(), None)
        r = level.R.toarray() @ (b - dense @ x)
        e = cycle(depth + 1, r)
        if options.get("cycle") == "W" and depth + 2 <= len(M._levels):
            e = e + cycle(depth + 1, r - M.levels[depth + 1].toarray() @ e)
        return level.smoother.improve(b.copy(), x + level.P.toarray() @ e)

    for shape in ((120,), (120, 2)):
        b = numbers(shape, dtype)
        np.testing.assert_allclose(M @ b, cycle(0, b), rtol=1e-9, atol=1e-10)
    stored = [level.nnz for level in M.levels]
    assert M.operator_complexity == sum(stored) / stored[0]


def test_modes_that_depend_on_each_other_leave_singular_blocks_also_when_refreshing() -> None:
    A = hermitian(180)
    M = linalg.smoothed_aggregation(A, np.tile([1.0, 2.0], (180, 1)), max_coarse=4)
    assert len(M.levels) >= 3
    before = M @ np.ones(180)
    M.refresh(2 * A)
    np.testing.assert_allclose(M @ np.ones(180), before / 2)
    with pytest.raises(ValueError, match="A: diagonal block 0 is singular"):
        linalg.smoothed_aggregation(bg.bsr_array(np.ones((180, 180)), blocksize=(2, 2)), max_coarse=4)


def test_a_picture_has_two_bars_for_each_level() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    M = linalg.smoothed_aggregation(laplacian(120), max_coarse=20)
    _, given = plt.subplots()
    ax = M.plot(given)
    assert ax is given
    count = len(M.levels)
    bars = [(round(p.get_x(), 6), round(p.get_width(), 6), p.get_height()) for p in ax.patches]
    wide = [(k - 0.4, 0.4, level.shape[0]) for k, level in enumerate(M.levels)]
    wide += [(float(k), 0.4, level.nnz) for k, level in enumerate(M.levels)]
    np.testing.assert_allclose(bars, wide, atol=1e-6)
    assert ax.get_yscale() == "log" and ax.get_xlabel() == "level" and ax.get_xticks().tolist() == list(range(count))
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["rows", "stored elements"]
    assert ax.get_title() == f"operator complexity {M.operator_complexity:.2f}"
    plt.close("all")


def test_constant_modes_are_one_for_each_row_of_a_block() -> None:
    A = laplacian(4, 3, "float32")
    found = multigrid.near_nullspace_of(A, None)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.tile(np.eye(3), (4, 1)))
    np.testing.assert_array_equal(multigrid.near_nullspace_of(A, np.arange(12)), np.arange(12.0)[:, None])
    for wrong in (np.ones((12, 0)), np.ones((11, 1)), np.ones((12, 1, 1)), np.ones(11)):
        with pytest.raises(ValueError, match=r"near_nullspace: wanted shape \(12, m\), got "):
            multigrid.near_nullspace_of(A, wrong)


def test_rigid_bodies_turn_about_their_centre() -> None:
    places = np.array([[0.0, 0, 0], [2, 4, 6], [4, 2, 0]])
    x, y, z = (places - places.mean(axis=0)).T
    zero, one = np.zeros(3), np.ones(3)
    want = np.stack(
        [
            np.stack([one, zero, zero, -y, zero, -z], axis=1),
            np.stack([zero, one, zero, x, -z, zero], axis=1),
            np.stack([zero, zero, one, zero, y, x], axis=1),
        ],
        axis=1,
    ).reshape(9, 6)
    for dtype, made in (("float32", "float32"), ("float64", "float64"), ("int64", "float64"), ("uint8", "float64")):
        found = linalg.rigid_body_modes(places.astype(dtype))
        assert found.dtype == made
        np.testing.assert_allclose(found, want, rtol=1e-6)
    assert linalg.rigid_body_modes(np.zeros((0, 3))).shape == (0, 6)
    assert linalg.rigid_body_modes(np.zeros((0, 2))).shape == (0, 3)
    for wrong in (np.zeros(3), np.zeros((3, 1)), np.zeros((3, 4)), np.zeros((3, 3, 3))):
        with pytest.raises(ValueError, match=r"coordinates: wanted shape \(n, 2\) or \(n, 3\), got "):
            linalg.rigid_body_modes(wrong)
    for odd in (places + 0j, places > 0, {0.0}, None):
        with pytest.raises(TypeError, match="coordinates: wanted a NumPy or CuPy array of real numbers, got "):
            linalg.rigid_body_modes(odd)


# ------------------------------------------------------------------------------------------------- what is told
def test_a_batch_tells_of_its_worst_system() -> None:
    A = laplacian(20)
    batch = bg.bsr_batch([A, A, A])
    b = np.zeros((3, 20, 2))
    b[1, 3, 1], b[1, 4, 0], b[2, 5, 0] = 100, 1, 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x, info = linalg.cg(batch, b, rtol=1e-9, maxiter=3)
    left = np.linalg.norm(b - batch @ x, axis=1)
    assert info.dtype == np.int64 and info.tolist() == [[0, 0], [3, 3], [3, 0]]
    assert str(told[0].message) == (
        "cg: 3 of 6 systems are not solved; system 1, column 1: not converged after 3 iterations: the norm of the "
        f"residual is {left[1, 1]:.3g}, wanted 1e-07"
    )
    assert told[0].filename == __file__
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, info = linalg.cg(bg.bsr_batch([A, -A]), np.ones((2, 20)), rtol=1e-9)
    assert info.tolist() == [0, -1]
    assert "cg: 1 of 2 systems are not solved; system 1: A is not positive definite: the norm" in str(told[0].message)


def test_the_column_that_is_farthest_from_solved_is_named() -> None:
    A, b = laplacian(40), np.zeros((40, 3))
    b[3, 0], b[4, 1], b[5, 2] = 1, 100, 10
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x, info = linalg.cg(A, b, rtol=1e-9, maxiter=4)
    left = np.linalg.norm(b - A @ x, axis=0)
    assert info == 4 and np.argmax(left) == 1
    assert str(told[0].message) == (
        f"cg: not converged after 4 iterations in column 1: the norm of the residual is {left[1]:.3g}, wanted 1e-07"
    )
    with pytest.warns(linalg.SolverWarning, match=r"cg: A is not positive definite; stopped after 1 iterations: the"):
        assert linalg.cg(-A, b[:, 0])[1] == -1


def test_minres_shows_the_largest_residual(capsys: pytest.CaptureFixture[str]) -> None:
    A, b = laplacian(30), numbers((30, 3)) * [1, 1e4, 1]
    seen: list[Any] = []
    linalg.minres(A, b, rtol=1e-6, show=True, callback=lambda x: seen.append(np.linalg.norm(b - A @ x, axis=0).max()))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"minres: iteration {k + 1}" for k in range(len(seen))]
    np.testing.assert_allclose([float(line.split()[-1]) for line in lines[:8]], seen[:8], rtol=1e-3)


def test_lobpcg_hands_its_arguments_over(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(spla, "lobpcg", lambda *args, **options: given.append((args, options)))
    A, B, M = hermitian(4), hermitian(4), np.eye(4)
    X, Y = np.ones((4, 1)), np.ones((4, 2))
    wanted = (A, X, B, M, Y, 1e-3, 7, False, 2, True, "norms")
    linalg.lobpcg(*wanted)
    linalg.lobpcg(*wanted, restartControl=3)
    linalg.lobpcg(A, X)
    assert [g[1] for g in given] == [{}, {"restartControl": 3}, {}]
    assert all(one is other for one, other in zip(given[0][0], wanted, strict=True))
    assert given[2][0][2:] == (None, None, None, None, None, True, 0, False, False)
    for wrong in ([[1.0]], "X", None):
        with pytest.raises(TypeError, match="X: wanted a NumPy or CuPy array, got "):
            linalg.lobpcg(A, wrong)


# ------------------------------------------------------------------------------------------------- dtypes
@pytest.mark.parametrize("own", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("other", ["float32", "float64", "complex64", "complex128", "int32", "uint8", "bool"])
def test_results_have_the_promoted_dtype(own: str, other: str) -> None:
    A = bg.bsr_array(np.array([[4, 0, 0, 0], [1, 3, 0, 0], [0, 1, 2, 0], [1, 0, 1, 5]], own), blocksize=(2, 2))
    b = (np.arange(8).reshape(4, 2) % 3).astype(other)
    wide = np.result_type(own, other)
    want = np.linalg.solve(A.toarray().astype("complex128"), b.astype("complex128"))
    for columns in (slice(None), 0):
        for solve in (linalg.spsolve, linalg.spsolve_triangular):
            found = solve(A, b[:, columns])
            assert found.dtype == wide and found.shape == b[:, columns].shape
            np.testing.assert_allclose(found, want[:, columns], atol=1e-5)
    if other != "bool":
        x, info = linalg.gmres(A, b)
        assert info == 0 and x.dtype == wide
    M = linalg.block_jacobi(A)
    kept = np.dtype(other).kind in "fc" and (np.dtype(other).kind == "c" or np.dtype(own).kind == "f")
    assert (M @ b).dtype == (other if kept else own)
    np.testing.assert_allclose(M @ b, np.linalg.solve(A.block_diagonal(), b.reshape(2, 2, 2)).reshape(4, 2), atol=1e-5)


@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_constraints_are_those_of_dense_matrices(columns: int | None, dtype: str) -> None:
    A = hermitian(10, dtype)
    A.data[0, 1, 1] = 0  # unknown 1 has no number on its diagonal
    b = numbers((10,) if columns is None else (10, columns), dtype)
    dofs, values = [7, 1, 4], np.array([2.0, -1.0, 0.5])
    C, load = linalg.constrain(A, b, dofs, values)
    assert C.dtype == A.dtype and load.dtype == b.dtype
    dense, want, known = A.toarray().copy(), b.copy(), np.zeros_like(b)
    known[dofs] = values if columns is None else values[:, None]
    want = b - dense @ known
    kept = np.where(np.diagonal(dense) == 0, 1, np.diagonal(dense))
    dense[dofs] = dense[:, dofs] = 0
    for k in dofs:
        dense[k, k] = kept[k]
        want[k] = kept[k] * known[k]
    np.testing.assert_allclose(C.toarray(), dense)
    np.testing.assert_allclose(load, want, rtol=1e-5)
    chosen = np.isin(np.arange(10), dofs)
    same, other = linalg.constrain(A, b, chosen, values[[1, 2, 0]])
    np.testing.assert_array_equal(same.toarray(), C.toarray())
    np.testing.assert_allclose(other, load, rtol=1e-6)


def test_unknowns_that_are_not_stored_may_stay_free() -> None:
    A = bg.bsr_array((np.array([[[2.0]], [[1.0]], [[3.0]]]), np.array([0, 2, 0]), np.array([0, 2, 2, 3])), shape=(3, 3))
    C, load = linalg.constrain(A, np.ones(3), [0], 5.0)
    np.testing.assert_array_equal(C.toarray(), np.diag([2.0, 0, 0]))
    np.testing.assert_array_equal(load, [10.0, 1.0, -14.0])
    for place in (1, 2):
        with pytest.raises(ValueError, match="dofs: the diagonal block of a fixed unknown is not stored in A"):
            linalg.constrain(A, np.ones(3), [place])
    for wrong, got in (([3], 3), ([-1, 5], -1), ([0, 4], 4)):
        with pytest.raises(ValueError, match=f"dofs: wanted indices from 0 to 2, got {got}$"):
            linalg.constrain(A, np.ones(3), wrong)
    same, kept = linalg.constrain(A, np.ones(3), [])
    np.testing.assert_array_equal(same.toarray(), A.toarray())
    np.testing.assert_array_equal(kept, np.ones(3))


@pytest.mark.parametrize("order", ["colours", "natural"])
@pytest.mark.parametrize("make", [linalg.ic0, linalg.ilu0])
def test_pivots_are_checked_and_named(make: Any, order: str) -> None:
    A = bg.bsr_array(np.diag([1.0, 2, 3, 4, 5, 6]), blocksize=(2, 2))
    assert make(A, order=order).groups == 1
    A.data[1] = [[1, 1], [1, 1]]
    with pytest.raises(ValueError, match=r"A: pivot block 1 is singular; try a shift of the diagonal"):
        make(A, order=order)
    A.data[1] = [[1, 2], [2, 1]]
    if make is linalg.ic0:
        with pytest.raises(ValueError, match=r"A: pivot block 1 is not positive definite; shift the diagonal, or try"):
            make(A, order=order)
    else:
        np.testing.assert_allclose(make(A, order=order) @ np.ones(6), np.linalg.solve(A.toarray(), np.ones(6)))
    bound = 64 * np.finfo(np.float64).eps * 3
    for factor, right in ((0.9, True), (1.1, False)):
        dense = 3 * np.eye(4)
        dense[0, 2] = factor * bound
        B = bg.bsr_array(dense, blocksize=(2, 2))
        if right or make is linalg.ilu0:
            assert make(B, order=order).groups == 2
        else:
            with pytest.raises(ValueError, match="A: wanted a Hermitian matrix, got one that differs from its transp"):
                make(B, order=order)
    with pytest.raises(ValueError, match="order: wanted 'colours' or 'natural', got 'random'"):
        make(A, order="random")


def test_gmres_tells_residuals_relative_to_b() -> None:
    A, b = lopsided(12), 1e6 * numbers(12)
    told: list[float] = []
    linalg.gmres(A, b, rtol=1e-10, callback=told.append)
    seen: list[Any] = []
    for k in range(1, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.append(linalg.gmres(A, b, rtol=1e-10, restart=k, maxiter=1)[0])
    want = [np.linalg.norm(b - A @ x) / np.linalg.norm(b) for x in seen]
    np.testing.assert_allclose(told[:4], want, rtol=1e-6)
    assert math.isclose(told[0], want[0], rel_tol=1e-6)
